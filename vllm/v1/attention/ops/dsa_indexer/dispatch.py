# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Who computes the logits of the DSA indexer: DeepGEMM, or the Triton kernels here.

DeepGEMM is compiled by nvcc when it is first called, and only for SM90, SM10x and
SM12x. Where that cannot work, or if VLLM_DSA_INDEXER says so, the functions of
`vllm.utils.deep_gemm` that the indexer calls lead here instead.
"""

import enum
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VARIABLE = "VLLM_DSA_INDEXER"
OLDEST_NVCC = (12, 9)
_NVCC_SECONDS = 30

Function = Callable[..., Any]


class Wish(enum.StrEnum):
    """Values of VLLM_DSA_INDEXER."""

    AUTO = "auto"
    TRITON = "triton"
    DEEP_GEMM = "deep_gemm"


@dataclass(frozen=True)
class Choice:
    """Whether the Triton kernels compute the logits, and why.

    On other platforms than CUDA they do not, and there is no reason.
    """

    portable: bool
    reason: str


@functools.cache
def choose() -> Choice:
    """The indexer of this process.

    Raises:
        ValueError: VLLM_DSA_INDEXER has no valid value.
    """
    from vllm.platforms import current_platform

    wish = _wish()
    if not current_platform.is_cuda():
        return Choice(False, "")
    if wish is not Wish.AUTO:
        return Choice(wish is Wish.TRITON, f"{VARIABLE}={wish}")
    if obstacle := _obstacle(current_platform.support_deep_gemm()):
        return Choice(True, obstacle)
    return Choice(False, "DeepGEMM and a compiler for it are there")


def portable() -> bool:
    """Whether the Triton kernels compute the logits; says so once in the log."""
    from vllm.logger import init_logger

    choice = choose()
    if choice.reason:
        init_logger(__name__).info_once(
            "DSA indexer: logits by %s (%s), top-k by the release's kernels.",
            "Triton" if choice.portable else "DeepGEMM",
            choice.reason,
        )
    return choice.portable


def portable_names(release: Mapping[str, Any]) -> dict[str, Function]:
    """Replacements for functions of `vllm.utils.deep_gemm`, whose names these are.

    They decide at each call; with DeepGEMM they are the release's functions.
    """
    has_deep_gemm = release["has_deep_gemm"]
    is_supported = release["is_deep_gemm_supported"]
    return {
        # Only the indexer imports it from there, and asks whether it can run at all.
        "has_deep_gemm": lambda: has_deep_gemm() or choose().portable,
        # The same module asks for DeepGEMM itself.
        "is_deep_gemm_supported": lambda: has_deep_gemm() and is_supported(),
        **{
            name: _or_portable(release[name], replacement)
            for name, replacement in (
                # Otherwise SM10x would cache other scales and use bfloat16 weights.
                ("mqa_logits_use_mx_scales", lambda: False),
                ("get_paged_mqa_logits_metadata", _no_schedule),
                ("fp8_fp4_mqa_logits", _mqa_logits),
                ("fp8_fp4_paged_mqa_logits", _paged_mqa_logits),
            )
        },
    }


def packed_format(dtype: torch.dtype, pad: float) -> tuple[torch.dtype, float]:
    """A dtype and padding for which the release's packing kernel compiles.

    It is compiled at startup for e4m3, which Triton does not have below SM89. With the
    Triton indexer it never runs.
    """
    from vllm.platforms import current_platform

    if dtype != torch.float8_e4m3fn or not current_platform.is_cuda():
        return dtype, pad
    if current_platform.has_device_capability(89):
        return dtype, pad
    return torch.uint8, 0


def _or_portable(release: Function, replacement: Function) -> Function:
    @functools.wraps(release)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (replacement if choose().portable else release)(*args, **kwargs)

    return run


def _wish() -> Wish:
    text = os.environ.get(VARIABLE) or Wish.AUTO
    try:
        return Wish(text)
    except ValueError:
        raise ValueError(
            f"{VARIABLE}={text!r} is not one of {', '.join(Wish)}"
        ) from None


def _obstacle(device_supported: bool) -> str:
    """Why DeepGEMM cannot run; empty if it can."""
    from vllm.utils.import_utils import has_deep_gemm

    if not device_supported:
        return "DeepGEMM has no kernels for this device"
    if not has_deep_gemm():
        return "DeepGEMM is not installed"
    needed = ".".join(map(str, OLDEST_NVCC))
    nvcc = _find_nvcc()
    if nvcc is None:
        return f"no nvcc for DeepGEMM, which needs {needed} or newer"
    version = _nvcc_version(nvcc)
    if version is None:
        return f"{nvcc} does not tell its version, DeepGEMM needs {needed} or newer"
    if version < OLDEST_NVCC:
        found = ".".join(map(str, version))
        return f"{nvcc} is {found}, DeepGEMM needs {needed} or newer"
    return ""


def _find_nvcc() -> str | None:
    """The compiler that DeepGEMM will use, which looks in this order."""
    if named := os.environ.get("DG_JIT_NVCC_COMPILER"):
        return _if_executable(named)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            return _if_executable(Path(home, "bin", "nvcc"))
    return shutil.which("nvcc") or _if_executable("/usr/local/cuda/bin/nvcc")


def _if_executable(path: str | Path) -> str | None:
    return shutil.which(str(path))


def _nvcc_version(nvcc: str) -> tuple[int, int] | None:
    try:
        text = subprocess.run(
            [nvcc, "--version"],
            capture_output=True,
            text=True,
            timeout=_NVCC_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def _no_schedule(context_lens: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    # The paged kernel finds its work from the lengths.
    return torch.empty((0, 2), dtype=torch.int32, device=context_lens.device)


def _mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    max_seqlen_k: int,
) -> torch.Tensor:
    from vllm.v1.attention.ops.dsa_indexer.prefill_logits import mqa_logits

    values, scales = kv
    return mqa_logits(
        _fp8_query(q), values, scales, weights, cu_seqlen_ks, cu_seqlen_ke, max_seqlen_k
    )


def _paged_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule_metadata: torch.Tensor,
    max_model_len: int,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    # With `indices` each query has its own row of `block_tables`, too.
    from vllm.v1.attention.ops.dsa_indexer.paged_logits import paged_mqa_logits

    return paged_mqa_logits(
        _fp8_query(q), kv_cache, weights, context_lens, block_tables, max_model_len
    )


def _fp8_query(q: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
    values, scales = q
    if scales is not None:
        raise ValueError(
            "the Triton DSA indexer reads an fp8 index cache only; serve without"
            f" an fp4 index cache, or with {VARIABLE}={Wish.DEEP_GEMM}"
        )
    return values
