# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The checks that run on GPUs pass right kernels and find wrong ones.

They run here on the CPU in Triton's interpreter, some groups of them, at small sizes.
"""

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.helpers.real_triton import in_interpreter

FP16 = [(cache, torch.float16) for cache in ("model", "model", "fp8", "fp8_ds_mla")]


def run(*groups: str) -> tuple[bool, str]:
    """Whether the groups passed, and what was printed."""
    from tests.gpu import check_sparse_mla as check

    cuda = SimpleNamespace(
        mem_get_info=lambda: (2**34, 2**34),
        empty_cache=lambda: None,
        get_device_properties=lambda device: SimpleNamespace(multi_processor_count=8),
    )
    small = {
        "DEVICE": "cpu",
        "HEADS": (3,),
        "TOKENS": (1, 6),
        "TOPK": (64,),
        "FORMATS": FP16,
        "poison_free_memory": lambda: None,
    }
    printed = io.StringIO()
    with (
        mock.patch.multiple(check, **small),
        mock.patch.object(torch, "cuda", cuda),
        contextlib.redirect_stdout(printed),
    ):
        return check.run(list(groups)), printed.getvalue()


@in_interpreter
@pytest.mark.parametrize("group", ["matrix-model-float16", "inputs-unchanged"])
def test_right_kernels_pass(group):
    passed, printed = run(group)
    assert passed, printed
    assert f"ok   {group}" in printed


def louder(out, lse):
    return out * 1.002, lse


def leaking(out, lse):
    return torch.where(lse.isinf().unsqueeze(-1), torch.nan, out), lse


def base_2(out, lse):
    return out, lse / 0.6931


def unwritten(out, lse):
    out[-1, -1, -1] = torch.nan
    return out, lse


@in_interpreter
@pytest.mark.parametrize("damage", [louder, leaking, base_2, unwritten])
def test_wrong_kernels_fail(damage):
    from tests.gpu import check_sparse_mla as check

    right = check.kernels.triton_sparse_mla
    with mock.patch.object(
        check.kernels, "triton_sparse_mla", lambda **call: damage(*right(**call))
    ):
        passed, printed = run("matrix-model-float16")
    assert not passed
    assert "FAIL matrix-model-float16" in printed
    assert "H3-T6-K64-model-float16" in printed


@in_interpreter
def test_a_kernel_that_writes_to_its_inputs_fails():
    from tests.gpu import check_sparse_mla as check

    right = check.kernels.triton_sparse_mla

    def writing(**call):
        result = right(**call)
        call["indices"][0, 0] = 5
        return result

    with mock.patch.object(check.kernels, "triton_sparse_mla", writing):
        passed, printed = run("inputs-unchanged")
    assert not passed
    assert "an input was written to" in printed


@in_interpreter
def test_a_group_without_its_memory_is_skipped_aloud():
    passed, printed = run("far-queries")
    assert passed
    assert printed == "skip far-queries: needs 40 GiB of device memory\n"


SCRIPTS = Path(__file__).parents[2] / "gpu"
SHOW = """
import sys
sys.path.insert(0, sys.argv[1])
import _standalone
_standalone.use(alone=sys.argv[2] == "alone")
from vllm.v1.attention.ops.sparse_mla import triton_sparse_mla as kernels
from tests.overlay.sparse_mla import cases
import triton, vllm
print(kernels.__file__)
print(cases.__file__)
print(getattr(vllm, "__file__", None))
print(kernels.triton is triton)
"""


@pytest.mark.parametrize("how", ["alone", "beside-vllm"])
def test_scripts_take_the_kernels_of_this_checkout(how, tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", SHOW, str(SCRIPTS), how],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    kernels, cases, vllm, real_triton = run.stdout.split()[-4:]
    root = str(SCRIPTS.parents[1])
    operations = f"{root}/vllm/v1/attention/ops"
    assert kernels == f"{operations}/sparse_mla/triton_sparse_mla.py"
    assert cases == f"{root}/tests/overlay/sparse_mla/cases.py"
    # Beside vLLM for the CPU its placeholder for Triton is in use, too.
    alone = how == "alone"
    assert (vllm == "None") is alone
    assert (real_triton == "True") is alone
