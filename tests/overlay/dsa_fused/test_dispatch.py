# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The fused operations in the CUDA release: which GPU gets which, and do both agree."""

import importlib
import sys
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.cuda_tree import device, in_cuda_tree
from tests.helpers.real_triton import (
    compiling,
    exact_conversions,
    with_compiler_in_cuda_tree,
)
from tests.overlay.dsa_fused.cases import (
    NormRope,
    Query,
    norm_rope_inputs,
    query_inputs,
)
from tests.overlay.dsa_fused.test_compile import NORM_ROPE, QUERY

MODEL = "vllm.models.deepseek_v32"


def release() -> Any:
    """The release's module, without its model, and without CuTe, which is for SM100."""
    vllm = Path(sys.modules["vllm"].__file__ or "").parent
    for name in (MODEL, f"{MODEL}.nvidia", f"{MODEL}.nvidia.ops"):
        package = types.ModuleType(name)
        package.__path__ = [str(vllm.joinpath(*name.split(".")[1:]))]
        sys.modules.setdefault(name, package)
    cute: Any = types.ModuleType(f"{MODEL}.nvidia.ops.fused_q_cutedsl")
    cute.fused_q_cutedsl = None
    cute.is_fused_q_cutedsl_supported = lambda *args, **kwargs: False
    sys.modules.setdefault(cute.__name__, cute)
    from vllm.v1.attention.ops.dsa_fused import dispatch

    dispatch._triton_compiles_fp8.cache_clear()
    return importlib.import_module(f"{MODEL}.common.kernels")


def check_equal(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    pair = [t.contiguous().view(torch.uint8) for t in (theirs, ours)]
    wrong = (pair[0] != pair[1]).nonzero()
    assert not len(wrong), (len(wrong), wrong[:9])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


@in_cuda_tree
@pytest.mark.parametrize("case", NORM_ROPE, ids=str)
def test_norm_rope_does_what_the_release_does(case):
    from vllm.v1.attention.ops.dsa_fused.norm_rope import fused_norm_rope

    case = replace(case, dtype=torch.float32, q_dim=256)
    theirs, ours = norm_rope_inputs(case), norm_rope_inputs(case)
    with device((9, 0)), exact_conversions():
        returned = release().fused_norm_rope.__wrapped__(**theirs)
        assert returned is theirs["q_c_out"]
        assert fused_norm_rope(**ours) is ours["q_c_out"]
    for name, value in ours.items():
        if isinstance(value, torch.Tensor):
            # With the gaps between the blocks of caches.
            check_equal(*(whole(t) for t in (theirs[name], value)))


@in_cuda_tree
@pytest.mark.parametrize("case", QUERY, ids=str)
def test_query_does_what_the_release_does(case):
    from vllm.v1.attention.ops.dsa_fused.query import fused_q

    case = replace(case, dtype=torch.float32, tokens=2)
    with device((9, 0)), exact_conversions():
        theirs = release().fused_q.__wrapped__(**query_inputs(case))
    ours = fused_q(**query_inputs(case))
    assert [t.dtype for t in theirs] == [t.dtype for t in ours]
    for a, b in list(zip(theirs, ours, strict=True))[0 if case.indexer else 2 :]:
        assert a.shape == b.shape
        check_equal(a, b)


@in_cuda_tree
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 7)], ids=str)
def test_gpus_without_fp8_run_our_operations(capability):
    with device(capability):
        kernels = release()
        with pytest.raises(ValueError, match="slot_mapping is missing"):
            inputs = norm_rope_inputs(NormRope("fp8")) | {"slot_mapping": None}
            kernels.fused_norm_rope(**inputs)
        with pytest.raises(ValueError, match="cannot be quantized"):
            kernels.fused_q(**(query_inputs(Query()) | {"quantize_mqa": True}))


@in_cuda_tree
@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_other_gpus_run_the_release(capability):
    with device(capability):
        kernels = release()
        with pytest.raises(AssertionError):
            inputs = norm_rope_inputs(NormRope("fp8")) | {"slot_mapping": None}
            kernels.fused_norm_rope(**inputs)
        inputs = query_inputs(Query(tokens=1, dtype=torch.float32))
        *_, packed = kernels.fused_q(**(inputs | {"quantize_mqa": True}))
        assert packed.shape == (1, 8, 576)


@in_cuda_tree
def test_each_gpu_is_asked_for_itself():
    from vllm.platforms import current_platform
    from vllm.v1.attention.ops.dsa_fused import portable_below_sm89

    @portable_below_sm89(lambda tensor: "ours")
    def operation(tensor):
        return "the release's"

    release()
    of = {0: (8, 6), 1: (8, 9)}
    with pytest.MonkeyPatch.context() as patch:
        platform = type(current_platform)
        supports = staticmethod(lambda want, device_id=0: of[device_id] >= (8, 9))
        patch.setattr(platform, "has_device_capability", supports)
        for index, want in ((None, "ours"), (0, "ours"), (1, "the release's")):
            tensor = SimpleNamespace(device=SimpleNamespace(index=index))
            assert operation(tensor) == want


@with_compiler_in_cuda_tree
@pytest.mark.parametrize("capability", [80, 86])
def test_only_the_edited_operations_compile(capability):
    from triton.compiler import CompilationError

    with device(divmod(capability, 10)), compiling(capability) as compiled:
        kernels = release()
        for operation, inputs in (
            (kernels.fused_norm_rope, norm_rope_inputs(NORM_ROPE[0])),
            (kernels.fused_q, query_inputs(QUERY[0])),
        ):
            with pytest.raises(CompilationError, match="fp8e4nv not supported"):
                operation.__wrapped__(**inputs)
            operation(**inputs)
    assert len(compiled) == 2


@with_compiler_in_cuda_tree
@pytest.mark.parametrize("capability", [80, 86])
def test_the_norms_in_front_of_draft_layers_need_no_edit(capability):
    states, weight = torch.zeros(5, 6144).bfloat16(), torch.ones(6144).bfloat16()
    with compiling(capability) as compiled:
        release().fused_eh_norm(
            torch.arange(5), states, states, weight, weight, eps=1e-5
        )
    assert len(compiled) == 1
