# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Who computes the index logits in the fork over the CUDA release."""

import contextlib
import functools
import importlib
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.helpers.cuda_tree import device, in_cuda_tree
from tests.overlay.dsa_indexer_triton.cases import (
    FP8,
    Paged,
    Prefill,
    check,
    make_paged,
    make_prefill,
    poisoned_results,
)

DEEP_GEMM_DEVICES = [(9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
OTHER_DEVICES = [(8, 0), (8, 6), (8, 9)]
NVCC = "Cuda compilation tools, release {}, V0"


@contextlib.contextmanager
def host(capability, *, wish=None, installed=True, nvcc="13.0"):
    """A machine: its device, its DeepGEMM, and the release of its nvcc, "" for none."""
    from vllm.v1.attention.ops.dsa_indexer import dispatch

    environment = {} if wish is None else {"VLLM_DSA_INDEXER": wish}
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(device(capability))
        enter(mock.patch.dict(os.environ, environment))
        enter(mock.patch("vllm.utils.import_utils._has_module", lambda _: installed))
        enter(mock.patch.object(dispatch, "_find_nvcc", lambda: nvcc and "nvcc"))
        version = SimpleNamespace(stdout=NVCC.format(nvcc))
        enter(mock.patch("subprocess.run", lambda *_, **__: version))
        clear = dispatch.choose.cache_clear, release_mx_scales().cache_clear
        for forget in clear:
            forget()
            stack.callback(forget)
        yield dispatch


def release_mx_scales():
    from vllm.utils import deep_gemm

    return deep_gemm.mqa_logits_use_mx_scales.__wrapped__


@in_cuda_tree
@pytest.mark.parametrize("capability", DEEP_GEMM_DEVICES)
def test_release_stays_where_deep_gemm_runs(capability):
    with host(capability) as dispatch:
        assert not dispatch.portable()
    with host(capability, nvcc="12.9") as dispatch:
        assert not dispatch.portable()


@in_cuda_tree
@pytest.mark.parametrize("capability", OTHER_DEVICES)
def test_devices_without_deep_gemm_get_triton(capability):
    with host(capability) as dispatch:
        assert dispatch.choose() == dispatch.Choice(
            True, "DeepGEMM has no kernels for this device"
        )


@in_cuda_tree
@pytest.mark.parametrize("capability", DEEP_GEMM_DEVICES)
@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ({"installed": False}, "DeepGEMM is not installed"),
        ({"nvcc": None}, "no nvcc for DeepGEMM, which needs 12.9 or newer"),
        ({"nvcc": "12.8"}, "nvcc is 12.8, DeepGEMM needs 12.9 or newer"),
        ({"nvcc": "?"}, "nvcc does not tell its version, DeepGEMM needs 12.9 or newer"),
    ],
)
def test_installations_without_deep_gemm_get_triton(capability, machine, reason):
    with host(capability, **machine) as dispatch:
        assert dispatch.choose() == dispatch.Choice(True, reason)


@in_cuda_tree
def test_variable_decides():
    with host((9, 0), wish="triton") as dispatch:
        assert dispatch.choose() == dispatch.Choice(True, "VLLM_DSA_INDEXER=triton")
    with host((8, 0), wish="deep_gemm") as dispatch:
        assert dispatch.choose() == dispatch.Choice(False, "VLLM_DSA_INDEXER=deep_gemm")
    for wish in ("auto", ""):
        with host((9, 0), wish=wish) as dispatch:
            assert not dispatch.portable()


@in_cuda_tree
def test_wrong_value_of_the_variable_is_named():
    with host((9, 0), wish="cutlass") as dispatch:
        message = "VLLM_DSA_INDEXER='cutlass' is not one of auto, triton, deep_gemm"
        with pytest.raises(ValueError, match=message):
            dispatch.choose()


@in_cuda_tree
def test_log_says_which_and_why():
    import vllm.logger

    for capability, said in (((8, 6), "Triton"), ((9, 0), "DeepGEMM")):
        with (
            host(capability) as dispatch,
            mock.patch.object(vllm.logger, "init_logger") as log,
        ):
            dispatch.portable()
            message, *parts = log.return_value.info_once.call_args.args
        assert message % tuple(parts) == (
            f"DSA indexer: logits by {said} ({dispatch_reason(said)}),"
            " top-k by the release's kernels."
        )


def dispatch_reason(said):
    if said == "Triton":
        return "DeepGEMM has no kernels for this device"
    return "DeepGEMM and a compiler for it are there"


@in_cuda_tree
def test_compiler_is_sought_where_deep_gemm_does(tmp_path):
    from vllm.v1.attention.ops.dsa_indexer import dispatch

    def tool(name: str) -> Path:
        path = tmp_path / name / "bin" / "nvcc"
        path.parent.mkdir(parents=True)
        path.touch(mode=0o755)
        return path

    named, home, path, on_path = (tool(name) for name in ("n", "home", "cuda", "p"))
    places = {
        "DG_JIT_NVCC_COMPILER": str(named),
        "CUDA_HOME": str(home.parents[1]),
        "CUDA_PATH": str(path.parents[1]),
        "PATH": str(on_path.parent),
    }
    for expected in (named, home, path, on_path):
        with mock.patch.dict(os.environ, places, clear=True):
            assert dispatch._find_nvcc() == str(expected)
        places.pop(next(iter(places)))
    with mock.patch.dict(os.environ, {"CUDA_HOME": str(tmp_path), "PATH": ""}):
        assert dispatch._find_nvcc() is None


@in_cuda_tree
def test_compiler_without_a_version_is_none(tmp_path):
    from vllm.v1.attention.ops.dsa_indexer import dispatch

    for text, version in ((NVCC.format("12.9"), (12, 9)), ("none", None)):
        nvcc = tmp_path / text[:4]
        nvcc.write_text(f"#!/bin/sh\necho '{text}'\n")
        nvcc.chmod(0o755)
        assert dispatch._nvcc_version(str(nvcc)) == version
    assert dispatch._nvcc_version(str(tmp_path / "missing")) is None


class NoOperators:
    """Instead of compiled operators, which are asked at import what they support."""

    def __getattr__(self, name):
        if "supports" in name:
            return lambda *_: False
        raise AttributeError(name)


@contextlib.contextmanager
def without_vision(*packages):
    """Import modules of packages that themselves import torchvision."""
    root = Path(importlib.import_module("vllm").__file__).parents[1]
    for name in packages:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(root.joinpath(*name.split(".")))]
    yield
    for name in packages:
        del sys.modules[name]


@functools.cache
def indexers():
    """The modules of the release that call the logits."""
    with device((9, 0)), mock.patch.object(torch.ops, "_C", NoOperators()):
        from vllm.model_executor.layers import sparse_attn_indexer
        from vllm.v1.attention.backends.mla import indexer

        with without_vision("vllm.models.glm5next", "vllm.models.glm5next.nvidia"):
            from vllm.models.glm5next.nvidia import sparse_indexer

    return sparse_attn_indexer, sparse_indexer, indexer


@in_cuda_tree
def test_logits_without_deep_gemm():
    deepseek, glm, builder = indexers()
    prefill = make_prefill(Prefill(((0, 64), (3, 70), (10, 10)), heads=16, keys=100))
    paged = make_paged(Paged((0, 1, 65), 2, heads=16))
    call = prefill.call
    for module in (deepseek, glm):
        with host((9, 0), installed=False), poisoned_results((8, 0)):
            assert module.has_deep_gemm() and builder.has_deep_gemm()
            logits = module.fp8_fp4_mqa_logits(
                (call["q"], None),
                (call["keys"], call["scales"]),
                call["weights"],
                call["starts"],
                call["ends"],
                call["width"],
            )
            assert not check(logits, prefill)
            lengths = paged.call["lengths"]
            schedule = builder.get_paged_mqa_logits_metadata(lengths, 64, 100)
            assert schedule.shape == (0, 2)
            logits = module.fp8_fp4_paged_mqa_logits(
                (paged.call["q"], None),
                paged.call["cache"],
                paged.call["weights"],
                lengths,
                paged.call["block_table"],
                schedule,
                max_model_len=paged.call["width"],
                indices=None,
            )
            assert not check(logits, paged)


@in_cuda_tree
def test_deep_gemm_is_called_where_it_runs():
    deepseek, _, builder = indexers()
    from vllm.utils import deep_gemm

    with (
        host((9, 0)),
        mock.patch.multiple(
            deep_gemm,
            _fp8_fp4_mqa_logits_impl=lambda *a: ("prefill", a),
            _fp8_fp4_paged_mqa_logits_impl=lambda *a: ("paged", a),
            _get_paged_mqa_logits_metadata_impl=lambda *a: ("schedule", a),
        ),
    ):
        assert deepseek.fp8_fp4_mqa_logits(*range(6)) == ("prefill", tuple(range(6)))
        table = torch.zeros(1, 2)
        arguments = (0, 1, 2, 3, table, 5, 6)
        assert deepseek.fp8_fp4_paged_mqa_logits(*arguments) == ("paged", arguments)
        lengths = torch.zeros(3, 1)
        schedule = builder.get_paged_mqa_logits_metadata(lengths, 64, 100)
        assert schedule == ("schedule", (lengths, 64, 100))


@in_cuda_tree
def test_nothing_else_believes_in_deep_gemm():
    from vllm.utils import deep_gemm

    for installed in (False, True):
        with host((9, 0), installed=installed, wish="triton"):
            assert deep_gemm.has_deep_gemm()
            assert deep_gemm.is_deep_gemm_supported() == installed


def construct(module):
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        layer = {"SparseAttnIndexer", "SparseAttnIndexerKpool"} & vars(module).keys()
        return getattr(module, layer.pop())(
            None, 128, "ue8m0", 2048, 128, 4096, 4096, torch.zeros(4, 2048).int()
        )


@in_cuda_tree
def test_model_is_built_without_deep_gemm():
    for module in indexers()[:2]:
        for capability in ((8, 0), (9, 0)):
            with host(capability, installed=False):
                assert construct(module).topk_tokens == 2048


@in_cuda_tree
def test_release_refuses_to_start_without_deep_gemm_if_asked():
    for module in indexers()[:2]:
        with (
            host((9, 0), installed=False, wish="deep_gemm"),
            pytest.raises(RuntimeError, match="DeepGEMM"),
        ):
            construct(module)


@in_cuda_tree
def test_scales_on_sm100_are_those_that_the_kernels_read():
    deepseek, kpool, _ = indexers()

    q, weights = torch.zeros(1, 32, 128).to(FP8), torch.ones(1, 32)
    for module in (deepseek, kpool):
        with host((10, 0)):
            assert module.mqa_logits_use_mx_scales()
        with host((10, 0), wish="triton"):
            assert not module.mqa_logits_use_mx_scales()
            assert deepseek.mqa_logits_mx_inputs(q, None, weights) == (None, weights)


@in_cuda_tree
def test_fp4_queries_are_refused():
    deepseek, _, _ = indexers()
    q = torch.zeros(1, 32, 64, dtype=torch.int8), torch.zeros(1, 32, dtype=torch.int32)
    refusal = pytest.raises(ValueError, match="fp8 index cache only")
    with host((9, 0), wish="triton"), refusal:
        deepseek.fp8_fp4_mqa_logits(q, (q[0], q[1]), q[1], q[1], q[1], 1)


@in_cuda_tree
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_one_row_for_each_query(capability):
    _, _, indexer = indexers()
    with host(capability, wish="triton"):
        assert not any(indexer._supports_native_decode(n) for n in range(1, 7))
    with host(capability, wish="deep_gemm"):
        assert indexer._supports_native_decode(2)


@in_cuda_tree
def test_warmup_compiles_no_fp8_below_sm89():
    from vllm.v1.attention.ops.common import _PACK_SEQ_TRITON_KERNEL

    def formats(capability, dtype=FP8, pad=-float("inf")):
        with device(capability):
            keys = _PACK_SEQ_TRITON_KERNEL.get_warmup_keys(dtype=dtype, pad_value=pad)
        return [(key.dtype, key.pad_value, key.pad_is_uint8) for key in keys]

    assert formats((8, 6)) == [(torch.uint8, 0, True)]
    assert formats((8, 9)) == [(FP8, -float("inf"), False)]
    assert formats((8, 0), torch.uint8, 7) == [(torch.uint8, 7, True)]
    assert formats((8, 0), torch.float32) == [(torch.float32, -float("inf"), False)]
