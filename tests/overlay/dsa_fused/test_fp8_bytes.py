# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""e4m3 values as bytes: conversions are exact, as PyTorch's are."""

import pytest
import torch

from tests.helpers.real_triton import compiling, in_interpreter, with_compiler

CODES = torch.arange(256, dtype=torch.uint8)
VALUES = CODES.view(torch.float8_e4m3fn).float()
# In one tile: the interpreter takes its time for each program, not for each element.
TILE = 1 << 19


def convert(name: str, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`name` of `fp8_bytes` applied to all elements of `source`."""
    from vllm.triton_utils import tl, triton
    from vllm.v1.attention.ops import fp8_bytes

    function = getattr(fp8_bytes, name)

    @triton.jit
    def kernel(source_ptr, out_ptr, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ptr + at, FUNCTION(tl.load(source_ptr + at)))

    out = torch.zeros(len(source), dtype=dtype)
    block = min(TILE, len(source))
    kernel[(len(source) // block,)](source, out, function, block)
    return out


def encoded(x: torch.Tensor) -> torch.Tensor:
    """What `cvt.rn.satfinite.e4m3x2.f32` makes of `x`. PyTorch does not saturate."""
    codes = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, codes).to(torch.uint8)


def check_codes(x: torch.Tensor) -> None:
    x = torch.nn.functional.pad(x, (0, -len(x) % 1024))
    wrong = (convert("float32_to_e4m3", x, torch.uint8) != encoded(x)).nonzero()
    assert not len(wrong), (len(wrong), x[wrong[0]].item())


@in_interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_every_code_becomes_its_value(dtype):
    name = f"e4m3_to_{dtype}".replace("torch.", "")
    got = convert(name, CODES, dtype)
    numbers = ~VALUES.isnan()
    assert torch.equal(got.isnan(), VALUES.isnan())
    assert torch.equal(got[numbers].float(), VALUES[numbers])
    assert torch.equal(got[numbers].signbit(), VALUES[numbers].signbit())


@in_interpreter
def test_every_value_becomes_its_code():
    got = convert("float32_to_e4m3", VALUES, torch.uint8)
    numbers = ~VALUES.isnan()
    assert torch.equal(got[numbers], CODES[numbers])
    assert got[~numbers].tolist() == [0x7F, 0x7F]


@in_interpreter
def test_ties_go_to_the_even_code_and_neighbors_of_ties_do_not():
    values = VALUES[:0x7F].double()
    ties = ((values[1:] + values[:-1]) / 2).float()
    above, below = ties.nextafter(values[1:].float()), ties.nextafter(torch.zeros(()))
    for sign in (1, -1):
        check_codes(sign * torch.cat([ties, above, below]))


@in_interpreter
def test_beyond_the_largest_value_it_is_kept():
    tie = torch.tensor(464.0)
    infinity = torch.tensor(torch.inf)
    large = [tie, tie.nextafter(infinity), tie.nextafter(-infinity), infinity]
    large += [torch.tensor(torch.finfo(torch.float32).max), torch.tensor(480.0)]
    x = torch.stack(large)
    got = convert("float32_to_e4m3", torch.cat([x, -x, x[:4]]), torch.uint8)
    assert set(got.tolist()) == {0x7E, 0xFE}


@in_interpreter
def test_random_values_of_the_format_range():
    torch.manual_seed(0)
    exponents = torch.randint(-14, 11, (TILE,))
    check_codes(torch.randn(TILE) * torch.exp2(exponents.float()))


@in_interpreter
def test_random_float32_bit_patterns():
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (4 * TILE,), dtype=torch.int64)
    check_codes(bits.to(torch.int32).view(torch.float32))


@in_interpreter
def test_all_bfloat16_values():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    check_codes(bits.view(torch.float32))


@in_interpreter
def test_scales_are_the_least_power_of_two_that_suffices():
    from vllm.triton_utils import tl, triton
    from vllm.v1.attention.ops.fp8_bytes import power_of_two_scale

    @triton.jit
    def kernel(x_ptr, out_ptr, SCALE: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(out_ptr + at, SCALE(tl.load(x_ptr + at), 1e-4))

    exact = torch.exp2(torch.arange(-16.0, 16.0))
    largest = exact * 448
    above = largest.nextafter(torch.tensor(torch.inf))
    x = torch.cat([largest, above, largest * 0.51, torch.zeros(32)])
    out = torch.empty(128)
    kernel[(1,)](x, out, power_of_two_scale, 128)
    want = torch.cat([exact, exact * 2, exact, torch.zeros(32)]).clamp(min=2.0**-13)
    assert torch.equal(out, want)


@with_compiler
@pytest.mark.parametrize("capability", [80, 86])
@pytest.mark.parametrize(
    "name, source, dtype",
    [
        ("float32_to_e4m3", VALUES, torch.uint8),
        ("e4m3_to_float16", CODES, torch.float16),
        ("e4m3_to_float32", CODES, torch.float32),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_compiles_without_fp8_hardware(name, source, dtype, capability):
    with compiling(capability) as compiled:
        convert(name, source, dtype)
    assert f".target sm_{capability}" in compiled[0].asm["ptx"]
    assert "e4m3" not in compiled[0].asm["ptx"]
