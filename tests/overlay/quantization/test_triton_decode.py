# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Triton's values of GGUF blocks are gguf-py's, bit for bit.

They are compared in Triton's interpreter, which reads shared fields with `tl.load`
instead of assembly. On a GPU, `tests/gpu/check_gguf.py` repeats it.
What compilers make of it is looked at here, for devices that need not be there.
"""

import contextlib
import io
import re
from multiprocessing import get_context
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.ggml_quantize import ALL_TYPES, random_blocks
from tests.helpers.gguf_random import expected_weights, random_bytes
from tests.helpers.real_triton import (
    compiling,
    exact_conversions,
    in_interpreter,
    stack_bytes,
    with_compiler,
)
from vllm.transformers_utils.gguf.ggml_types import GGML_TYPES_BY_NAME, GGMLType

SOME_TYPES = ("F16", "Q8_0", "Q6_K", "IQ2_XS", "MXFP4")
FILLER = -7.0


def kernels():
    from vllm.model_executor.layers.quantization.gguf import triton_dequantize

    return triton_dequantize


def dequantize(blocks: torch.Tensor, kind: GGMLType, columns: int, **options):
    dtype = options.pop("dtype", torch.float32)
    return kernels().triton_dequantize(blocks, kind, columns, dtype, **options)


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal in shape, dtype and bits: 0.0 is not -0.0 here."""
    integer = torch.int32 if got.dtype == torch.float32 else torch.int16
    return got.dtype == want.dtype and torch.equal(
        got.view(integer), want.view(integer)
    )


@pytest.fixture
def real_blocks(name: str, rows: int, columns: int) -> torch.Tensor:
    """Made here: the process of interpreted tests should not start others."""
    return torch.from_numpy(random_blocks(name, rows, columns).copy())


def test_a_process_that_quantizes_ends():
    """Though the pool that it has started is still there."""
    process = get_context("spawn").Process(target=random_blocks, args=("Q8_0", 1, 256))
    process.start()
    process.join(60)
    ended = process.exitcode
    process.kill()
    assert ended == 0


@in_interpreter
def test_every_type_with_weights_is_supported():
    from vllm.model_executor.layers.quantization.gguf.triton_decode import SUPPORTED

    assert set(ALL_TYPES) == SUPPORTED


@in_interpreter
@pytest.mark.parametrize(("rows", "columns"), [(1, 256), (5, 768), (3, 2048)])
@pytest.mark.parametrize("name", ALL_TYPES)
def test_real_blocks(name, rows, columns, real_blocks):
    kind = GGML_TYPES_BY_NAME[name]
    want = expected_weights(kind, real_blocks)
    assert want.abs().max() > 0.05
    assert same_bits(dequantize(real_blocks, kind, columns), want)


@in_interpreter
@pytest.mark.parametrize("name", ALL_TYPES)
def test_any_bytes(name):
    kind = GGML_TYPES_BY_NAME[name]
    blocks = random_bytes(kind, 37, 1024)
    want = expected_weights(kind, blocks)
    assert not want.isnan().any()
    assert same_bits(dequantize(blocks, kind, 1024), want)


@in_interpreter
@pytest.mark.parametrize("columns", [32, 64, 192, 320, 4160])
@pytest.mark.parametrize("name", ["F32", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_rows_of_few_and_of_odd_numbers_of_blocks(name, columns):
    kind = GGML_TYPES_BY_NAME[name]
    blocks = random_bytes(kind, 3, columns)
    out = torch.full((4, columns + 8), FILLER)
    dequantize(blocks, kind, columns, out=out[:3, :columns])
    want = torch.full_like(out, FILLER)
    want[:3, :columns] = expected_weights(kind, blocks)
    assert same_bits(out, want)


@in_interpreter
@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_rows_of_numbers_may_have_any_length(name):
    kind = GGML_TYPES_BY_NAME[name]
    blocks = random_bytes(kind, 5, 77)
    assert same_bits(dequantize(blocks, kind, 77), expected_weights(kind, blocks))


@in_interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["F32", "Q4_K", "Q6_K", "IQ4_XS", "IQ2_XXS"])
def test_values_are_rounded_once(name, dtype):
    kind = GGML_TYPES_BY_NAME[name]
    blocks = random_bytes(kind, 5, 768)
    want = expected_weights(kind, blocks).to(dtype)
    with exact_conversions():
        assert same_bits(dequantize(blocks, kind, 768, dtype=dtype), want)


@in_interpreter
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", SOME_TYPES)
def test_rows_are_gathered_and_unknown_ones_are_zero(name, dtype):
    kind = GGML_TYPES_BY_NAME[name]
    blocks = random_bytes(kind, 9, 512)
    ids = torch.tensor([8, 0, -1, 3, 3, 9, 2**31 - 1, -(2**31), 5], dtype=dtype)
    got = dequantize(blocks, kind, 512, row_ids=ids)
    known = (ids >= 0) & (ids < 9)
    want = torch.zeros(len(ids), 512)
    want[known] = expected_weights(kind, blocks)[ids[known].long()]
    assert same_bits(got, want)


@in_interpreter
def test_row_ids_beyond_32_bits_are_unknown():
    kind = GGML_TYPES_BY_NAME["Q8_0"]
    blocks = random_bytes(kind, 3, 256)
    ids = torch.tensor([2**32, 2**32 + 1, -(2**32) + 1, 2**62])
    got = dequantize(blocks, kind, 256, row_ids=ids)
    assert same_bits(got, torch.zeros(4, 256))


@in_interpreter
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("name", SOME_TYPES)
def test_views_of_larger_buffers(name, gather):
    kind = GGML_TYPES_BY_NAME[name]
    wide = random_bytes(kind, 8, 1024)
    start, length = kind.row_bytes(256), kind.row_bytes(512)
    blocks = wide[2:7, start : start + length]
    want = expected_weights(kind, wide)[2:7, 256:768]
    ids = torch.tensor([4, 0, 2]) if gather else None
    if gather:
        want = want[ids]
    out = torch.full((7, 600), FILLER)
    part = out[1 : 1 + len(want), 40 : 40 + 512]
    got = dequantize(blocks, kind, 512, out=part, row_ids=ids)
    assert got.data_ptr() == part.data_ptr()
    assert same_bits(part.contiguous(), want.contiguous())
    part.fill_(FILLER)
    assert (out == FILLER).all()


@in_interpreter
@pytest.mark.parametrize("start", [1, 2, 3])
@pytest.mark.parametrize("name", ["F32", "F16", "Q4_K", "MXFP4"])
def test_rows_may_start_anywhere(name, start):
    kind = GGML_TYPES_BY_NAME[name]
    blocks = random_bytes(kind, 3, 256)
    buffer = torch.zeros(blocks.numel() + start, dtype=torch.uint8)
    moved = buffer[start:].view(blocks.shape)
    moved.copy_(blocks)
    assert moved.data_ptr() % 4 == start
    want = expected_weights(kind, blocks)
    launched: list[int] = []
    launch = kernels()._dequantize_kernel

    class Recorder:
        def __getitem__(self, grid):
            def run(rows, *args, **options):
                launched.append(rows.data_ptr())
                launch[grid](rows, *args, **options)

            return run

    with mock.patch.object(kernels(), "_dequantize_kernel", Recorder()):
        assert same_bits(dequantize(moved, kind, 256), want)
    # Words are read as such, which a GPU does at multiples of their size only.
    word = {"F32": 4, "F16": 2, "Q4_K": 2, "MXFP4": 1}[name]
    (address,) = launched
    assert address % word == 0
    assert (address == moved.data_ptr()) is (start % word == 0)


@in_interpreter
def test_nothing_to_do():
    kind = GGML_TYPES_BY_NAME["Q4_K"]
    blocks = random_bytes(kind, 3, 256)
    ids = torch.empty(0, dtype=torch.int64)
    assert dequantize(blocks, kind, 256, row_ids=ids).shape == (0, 256)
    assert dequantize(blocks[:0], kind, 256).shape == (0, 256)
    assert dequantize(blocks[:, :0], kind, 0).shape == (3, 0)
    ids = torch.zeros(2, dtype=torch.int64)
    got = dequantize(blocks[:0], kind, 256, row_ids=ids)
    assert same_bits(got, torch.zeros(2, 256))


@in_interpreter
@pytest.mark.parametrize("name", ALL_TYPES)
def test_kernels_load_any_part_in_any_direction(name):
    from tests.overlay.quantization import transposed_kernel as part
    from vllm.model_executor.layers.quantization.gguf.triton_decode import tables

    kind = GGML_TYPES_BY_NAME[name]
    blocks = random_bytes(kind, part.ROWS, 512)
    out = torch.full((part.COLUMNS, part.ROWS), FILLER)
    # From the middle of a block on; 40 columns less, and a row.
    start, end, rows = 213, 213 + part.COLUMNS - 40, part.ROWS - 1
    part.transposed_kernel[(1,)](
        blocks,
        out,
        tables(kind, blocks.device),
        blocks.stride(0),
        start,
        end,
        rows,
        TYPE=kind.id,
        COLUMNS=part.COLUMNS,
        ROWS=part.ROWS,
    )
    want = torch.zeros_like(out)
    want[: end - start, :rows] = expected_weights(kind, blocks)[:rows, start:end].t()
    assert torch.equal(out, want)


@in_interpreter
@pytest.mark.parametrize(
    ("name", "columns", "change", "message"),
    [
        ("Q8_K", 256, {}, "Q8_K cannot be decoded on a GPU; convert the file"),
        ("Q4_K", 128, {}, "128 weights are not a whole number of Q4_K blocks"),
        ("Q4_K", 512, {}, r"rows of 288 bytes, uint8 \[rows, 288\]; found .*144"),
        (
            "Q4_K",
            256,
            {"row_ids": torch.zeros(2)},
            "int32 or int64.*found torch.float32",
        ),
        ("Q4_K", 256, {"out": torch.zeros(3, 256).half()}, "torch.float32.*float16"),
        ("Q4_K", 256, {"out": torch.zeros(2, 256)}, r"\[3, 256\].*found.*\[2, 256\]"),
    ],
)
def test_errors_say_what_is_wrong(name, columns, change, message):
    blocks = torch.zeros(3, 144, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        dequantize(blocks, GGML_TYPES_BY_NAME[name], columns, **change)


@in_interpreter
def test_bytes_of_a_row_must_be_contiguous():
    blocks = torch.zeros(3, 288, dtype=torch.uint8)[:, ::2]
    with pytest.raises(ValueError, match=r"contiguous.*strides \[288, 2\]"):
        dequantize(blocks, GGML_TYPES_BY_NAME["Q4_K"], 256)


def run_checks(group: str) -> tuple[bool, str]:
    """Whether a group of the checks for GPUs passes here, and what is printed."""
    from tests.gpu import check_gguf as check

    small = {
        "DEVICE": "cpu",
        "SHAPES": ((3, 256),),
        "GATHERED": 20,
        "FAR_BYTES": 1 << 17,
        "kinds": [GGML_TYPES_BY_NAME[name] for name in ("Q8_0", "IQ1_M", "BF16")],
    }
    printed = io.StringIO()
    with (
        mock.patch.multiple(check, **small),
        contextlib.redirect_stdout(printed),
        exact_conversions(),
    ):
        return check.run([group]), printed.getvalue()


@in_interpreter
@pytest.mark.parametrize(
    "group", ["types", "gathered", "views", "unaligned", "parts", "far"]
)
def test_checks_for_gpus_pass_right_kernels(group):
    passed, printed = run_checks(group)
    assert passed, printed
    assert printed.startswith(f"{group}: ok")


@in_interpreter
@pytest.mark.parametrize("group", ["types", "gathered", "views", "unaligned", "far"])
def test_checks_for_gpus_find_a_wrong_bit(group):
    from tests.gpu import check_gguf as check

    right = check.triton_dequantize

    def wrong(*args, **options):
        out = right(*args, **options)
        out[-1, -1] *= -1
        return out

    with mock.patch.object(check, "triton_dequantize", wrong):
        passed, printed = run_checks(group)
    assert not passed
    assert printed.startswith(f"{group}: FAILED")


# How often a thread reads what weights share, for two times eight of a row.
SHARED_READS = {
    "F16": 0,
    "Q8_0": 2 * (1 + 2 * 2),
    "Q4_K": 5,
    "Q6_K": 2 * (2 + 2 * 4),
    "IQ2_XXS": 2 * (1 + 2 + 1 + 3),
    "IQ4_XS": 2 * (3 + 2 * 2) + 4,
    "MXFP4": 2 * (1 + 2 * 4) + 4,
}


@with_compiler
@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("name", ALL_TYPES)
def test_compiles_without_spills(name, capability):
    ptx = compile_for(capability, name)
    if name in SHARED_READS:
        assert ptx.count("ld.global.nc.") == SHARED_READS[name]


@with_compiler
@pytest.mark.parametrize("name", [name for name in SHARED_READS if name != "Q4_K"])
def test_neighbors_share_a_thread_in_any_kernel(name):
    from tests.overlay.quantization import transposed_kernel as part

    kind = GGML_TYPES_BY_NAME[name]
    blocks = torch.empty(part.ROWS, kind.row_bytes(512), dtype=torch.uint8)
    out = torch.empty(part.COLUMNS, part.ROWS)
    numbers = (blocks.stride(0), 0, 512, 16)
    with compiling(90) as compiled:
        part.transposed_kernel[(1,)](
            blocks,
            out,
            torch.zeros(1, dtype=torch.int32),
            *numbers,
            TYPE=kind.id,
            COLUMNS=part.COLUMNS,
            ROWS=part.ROWS,
            num_warps=2,
        )
    # A thread has eight weights. It reads a table once, however many they are.
    tables = 4 if name in ("IQ4_XS", "MXFP4") else 0
    reads = compiled[0].asm["ptx"].count("ld.global.nc.")
    assert reads == (SHARED_READS[name] - tables) // 2 + tables


@with_compiler
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", SOME_TYPES)
def test_gathering_compiles_without_spills(name, dtype):
    compile_for(90, name, row_ids=torch.zeros(16, dtype=dtype))


def compile_for(capability: int, name: str, **options: Any) -> str:
    """PTX of the kernel for rows of 6144 weights, in bfloat16."""
    kind = GGML_TYPES_BY_NAME[name]
    blocks = torch.empty(16, kind.row_bytes(6144), dtype=torch.uint8)
    with compiling(capability) as compiled:
        dequantize(blocks, kind, 6144, dtype=torch.bfloat16, **options)
    (kernel,) = compiled
    assert re.search(rf"\.target sm_{capability}", kernel.asm["ptx"])
    assert stack_bytes(kernel.asm["cubin"]) == 0
    assert kernel.metadata.shared <= 8192
    return kernel.asm["ptx"]
