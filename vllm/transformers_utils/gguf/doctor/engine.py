# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What vLLM itself would decide, asked of its own code.

Imports vLLM when asked. For a device that is not at hand, `device_of` makes the current
platform one that reports the given compute capability, in this process only.
"""

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

from vllm.transformers_utils.gguf.doctor.machine import Kind, Machine
from vllm.transformers_utils.gguf.doctor.split import Split
from vllm.transformers_utils.gguf.ggml_types import GGMLType
from vllm.transformers_utils.gguf.glm_dsa import GlmDsaConfig, hf_config

# Compiled parts of the release that need the driver's library to be imported. What is
# asked here calls none of their operators.
_EXTENSIONS = (
    "vllm._C_stable_libtorch",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)


@dataclass(frozen=True, slots=True)
class Attention:
    """What becomes of a value of --kv-cache-dtype.

    `backend` is None if none takes it; `cache` is then None too, else the cache dtype
    that the backend makes of it. `rejected` has all backends before and behind the
    chosen one that cannot run, with their reasons.
    """

    option: str
    backend: str | None
    cache: str | None
    rejected: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Indexer:
    """What selects the keys: `path` is None if nothing can, `reason` says why."""

    path: str | None
    reason: str


def build_kind() -> Kind:
    """What the installed build serves on: GPUs, or the CPU."""
    from vllm._version import __version__

    return "cpu" if "cpu" in __version__ else "cuda"


@contextmanager
def device_of(machine: Machine | None) -> Iterator[None]:
    """Let vLLM's code find the GPUs of `machine`, if it finds other ones itself.

    To be entered before anything else of vLLM asks for its platform.
    """
    capability = machine.capability if machine is not None else None
    if machine is None or machine.here or capability is None or build_kind() == "cpu":
        yield
        return
    with _extensions():
        import vllm.platforms as platforms

        device = _device(capability, machine.memory)
        with _replaced(platforms, "_current_platform", device):
            yield


def _device(capability: tuple[int, int], memory: int) -> Any:
    """A CUDA platform that need not ask a driver."""
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Device(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*capability)

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return memory

    return Device()


@contextmanager
def _replaced(owner: ModuleType, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _extensions() -> Iterator[None]:
    """Empty modules in the place of the extensions, where there is no driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        stubs = {name: ModuleType(name) for name in _EXTENSIONS}
    else:
        stubs = {}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]


def cut_error(
    types: Mapping[str, GGMLType], config: GlmDsaConfig, degree: int, *, experts: bool
) -> str | None:
    """Why tensor parallelism of `degree` would cut blocks, None if it does not.

    `types` are the plan's block types; `experts` as --enable-expert-parallel.
    """
    from vllm.model_executor.layers.quantization.gguf.parallel import (
        check_tensor_parallel,
    )

    sizes: Any = config
    try:
        check_tensor_parallel(
            types,
            sizes,
            degree=degree,
            expert_degree=1 if experts else degree,
            shared_expert_degree=degree,
        )
    except ValueError as error:
        return str(error)
    return None


def default_layers(config: GlmDsaConfig, stages: int) -> tuple[int, ...]:
    """Hidden layers of each pipeline stage, as vLLM deals them out.

    Raises ValueError for a VLLM_PP_LAYER_PARTITION that does not fit.
    """
    if stages == 1:
        return (config.num_hidden_layers,)
    from vllm.distributed.utils import get_pp_indices

    ends = [get_pp_indices(config.num_hidden_layers, i, stages) for i in range(stages)]
    return tuple(end - start for start, end in ends)


def cpu_error(
    config: GlmDsaConfig, split: Split, dtype: str, cache_dtype: str, blocks: bool
) -> str | None:
    """Why the CPU platform refuses these options, None if it does not."""
    from vllm.platforms.cpu_sparse_mla import lift_mla_limits

    view = _view(config, split, dtype, cache_dtype, blocks=blocks)
    try:
        lift_mla_limits(view, False, True)
    except ValueError as error:
        return str(error)
    return None


def cpu_attention(option: str) -> Attention:
    """The CPU's backend for a value of --kv-cache-dtype."""
    from vllm.platforms.cpu_sparse_mla import sparse_mla_backend

    name = "CPU_MLA_SPARSE"
    try:
        sparse_mla_backend(None, SimpleNamespace(kv_cache_dtype=option))  # type: ignore[arg-type]
    except ValueError as error:
        return Attention(option, None, None, {name: (str(error),)})
    return Attention(option, name, option, {})


def cuda_attention(
    config: GlmDsaConfig,
    machine: Machine,
    split: Split,
    dtype: str,
    option: str,
) -> Attention:
    """The backend that the CUDA platform selects; to be called inside `device_of`."""
    import torch

    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.model_executor.models.config import GlmMoeDsaForCausalLM
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig

    assert machine.capability is not None
    view = _view(config, split, dtype, option)
    GlmMoeDsaForCausalLM.verify_and_update_config(view)
    wanted = view.cache_config.cache_dtype
    selector = AttentionSelectorConfig(
        head_size=config.kv_lora_rank + config.qk_rope_head_dim,
        dtype=getattr(torch, dtype),
        kv_cache_dtype=wanted,
        block_size=None,
        use_mla=True,
        use_sparse=True,
    )
    with (
        set_current_vllm_config(view),
        _replaced(cuda, "_get_attn_backend_class", _backend_class),
    ):
        valid, invalid = cuda.CudaPlatformBase.get_valid_backends(
            DeviceCapability(*machine.capability),
            selector,
            config.num_attention_heads // split.tensor,
        )
    rejected = {backend.name: tuple(why) for backend, (_, why) in invalid.items()}
    if not valid:
        return Attention(option, None, None, rejected)
    best = min(valid, key=lambda candidate: candidate.priority)
    canonical = mla_attention._canonicalize_sparse_mla_kv_cache_dtype
    cache = canonical(best.backend_class, wanted)
    return Attention(option, best.backend.name, str(cache), rejected)


def _backend_class(backend: Any) -> Any:
    """The class of a backend; one that needs a device to be imported is unavailable."""
    try:
        return backend.get_class()
    except Exception as error:
        raise ImportError(f"cannot be imported here: {error}") from error


def cuda_indexer(machine: Machine) -> Indexer:
    """What computes the index logits on GPUs; to be called inside `device_of`.

    Raises ValueError for a wrong VLLM_DSA_INDEXER.
    """
    from vllm.platforms import current_platform

    dispatch: Any = import_module("vllm.v1.attention.ops.dsa_indexer.dispatch")
    supported = current_platform.support_deep_gemm()
    if machine.here or os.environ.get(dispatch.VARIABLE):
        choice = dispatch.choose.__wrapped__()
        if choice.portable:
            return Indexer("Triton", choice.reason)
        if not supported:
            return Indexer(
                None, f"{choice.reason}, which has no kernels for this device"
            )
        return Indexer("DeepGEMM", choice.reason)
    if not supported:
        return Indexer("Triton", "DeepGEMM has no kernels for this device")
    needed = ".".join(map(str, dispatch.OLDEST_NVCC))
    return Indexer(
        "DeepGEMM", f"if nvcc {needed} or newer is there; otherwise Triton, too"
    )


def cpu_indexer() -> Indexer:
    return Indexer(
        "CPUIndexer", "plain PyTorch, with keys in the model's dtype; exact, not tuned"
    )


def _view(
    config: GlmDsaConfig,
    split: Split,
    dtype: str,
    cache_dtype: str,
    *,
    blocks: bool = True,
) -> Any:
    """As much of a VllmConfig as the code that is asked here looks at."""
    text = SimpleNamespace(**hf_config(config))
    heads = config.num_attention_heads // split.tensor
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=text,
            hf_text_config=text,
            use_mla=True,
            dtype=dtype,
            quantization="gguf_native" if blocks else None,
            get_num_attention_heads=lambda parallel: heads,
        ),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        attention_config=SimpleNamespace(backend=None, hisparse_config=None),
        compilation_config=SimpleNamespace(mode=0),
        speculative_config=None,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=split.tensor,
            pipeline_parallel_size=split.pipeline,
            data_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            enable_expert_parallel=split.experts,
            set_dcp_defaults=lambda **_: None,
        ),
    )
