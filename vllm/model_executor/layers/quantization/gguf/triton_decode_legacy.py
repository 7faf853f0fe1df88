# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Weights of blocks of 32, 64 and 1 in Triton: Q4_0 to Q8_0, IQ4_NL, MXFP4, NVFP4.

See `triton_decode.load_weights` for the arguments. A docstring gives the block's fields
in order, with their bytes.
"""

from vllm.model_executor.layers.quantization.gguf.triton_decode_bytes import (
    byte_of,
    read_byte,
    read_float16,
    read_odd_word,
    read_word,
    signed_byte,
    table_values,
)
from vllm.triton_utils import tl, triton


@triton.jit
def plain(row_ptr, column, mask, DTYPE: tl.constexpr):
    """Numbers of `DTYPE`."""
    numbers = row_ptr.to(tl.pointer_type(DTYPE)) + column
    return tl.load(numbers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def bf16(row_ptr, column, mask):
    """The upper halves of float32 numbers."""
    numbers = row_ptr.to(tl.pointer_type(tl.uint16)) + column
    bits = tl.load(numbers, mask=mask, other=0).to(tl.int32) << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _four_nibbles(row_ptr, column, mask, BLOCK: tl.constexpr, START: tl.constexpr):
    """Quants of 4 bits: 16 bytes at `START`, weights 0 to 15 in their low halves.

    Of the weight and its neighbors, in the four bytes of an int32.
    """
    at = row_ptr + column // 32 * BLOCK + (column // 4 % 4 * 4 + START)
    # Pointers are odd in some blocks of an odd size only.
    words = read_odd_word(at, mask) if BLOCK % 2 else read_word(at, mask)
    return (words >> (column // 16 % 2 * 4)) & 0x0F0F0F0F


@triton.jit
def _nibbles(row_ptr, column, mask, BLOCK: tl.constexpr, START: tl.constexpr):
    """The weight's own of `_four_nibbles`."""
    return byte_of(_four_nibbles(row_ptr, column, mask, BLOCK, START), column % 4)


@triton.jit
def _fifth_bit(row_ptr, column, mask, BLOCK: tl.constexpr, START: tl.constexpr):
    """16 where the bit of the weight, of 32 at byte `START`, is set, else 0."""
    at = row_ptr + (column // 32 * BLOCK + column // 8 % 4 + START)
    return ((read_byte(at, mask) >> (column % 8)) & 1) << 4


@triton.jit
def q4_0(row_ptr, column, mask):
    """scale f16, quants 16."""
    scale = read_float16(row_ptr + column // 32 * 18, mask)
    quants = _nibbles(row_ptr, column, mask, 18, 2)
    return scale * (quants - 8).to(tl.float32)


@triton.jit
def q4_1(row_ptr, column, mask):
    """scale f16, minimum f16, quants 16."""
    block = row_ptr + column // 32 * 20
    quants = _nibbles(row_ptr, column, mask, 20, 4)
    scaled = read_float16(block, mask) * quants.to(tl.float32)
    return scaled + read_float16(block + 2, mask)


@triton.jit
def q5_0(row_ptr, column, mask):
    """scale f16, fifth bits 4, quants 16."""
    scale = read_float16(row_ptr + column // 32 * 22, mask)
    quants = _nibbles(row_ptr, column, mask, 22, 6)
    quants |= _fifth_bit(row_ptr, column, mask, 22, 2)
    return scale * (quants - 16).to(tl.float32)


@triton.jit
def q5_1(row_ptr, column, mask):
    """scale f16, minimum f16, fifth bits 4, quants 16."""
    block = row_ptr + column // 32 * 24
    quants = _nibbles(row_ptr, column, mask, 24, 8)
    quants |= _fifth_bit(row_ptr, column, mask, 24, 4)
    scaled = read_float16(block, mask) * quants.to(tl.float32)
    return scaled + read_float16(block + 2, mask)


@triton.jit
def q8_0(row_ptr, column, mask):
    """scale f16, quants 32 (signed)."""
    scale = read_float16(row_ptr + column // 32 * 34, mask)
    at = row_ptr + column // 32 * 34 + (column // 4 % 8 * 4 + 2)
    quants = signed_byte(read_word(at, mask), column % 4)
    return quants.to(tl.float32) * scale


@triton.jit
def iq4_nl(row_ptr, column, mask, tables_ptr):
    """scale f16, indices 16."""
    scale = read_float16(row_ptr + column // 32 * 18, mask)
    index = _four_nibbles(row_ptr, column, mask, 18, 2)
    value = signed_byte(table_values(tables_ptr, index), column % 4)
    return scale * value.to(tl.float32)


@triton.jit
def mxfp4(row_ptr, column, mask, tables_ptr):
    """exponent 1, indices 16. The values are doubled, so the scale is half of 2**e."""
    exponent = read_byte(row_ptr + column // 32 * 17, mask)
    # The two least scales are below what float32 holds with an exponent of its own.
    bits = tl.where(exponent < 2, 0x200000 << (exponent & 1), (exponent - 1) << 23)
    scale = bits.to(tl.float32, bitcast=True)
    index = _four_nibbles(row_ptr, column, mask, 17, 1)
    value = signed_byte(table_values(tables_ptr, index), column % 4)
    return scale * value.to(tl.float32)


@triton.jit
def nvfp4(row_ptr, column, mask, tables_ptr):
    """scales 4 (e4m3, no sign), one for 16 weights; indices 32. Values are doubled."""
    block = row_ptr + column // 64 * 36
    code = read_byte(block + column // 16 % 4, mask)
    exponent = (code >> 3) & 15
    normal = (((exponent + 119) << 23) | ((code & 7) << 20)).to(
        tl.float32, bitcast=True
    )
    scale = tl.where(exponent == 0, (code & 7).to(tl.float32) * 0.0009765625, normal)
    scale = tl.where(code == 0x7F, 0.0, scale)
    # 8 bytes hold 16 weights, the first 8 of them in their low halves.
    at = block + (column // 16 % 4 * 8 + column // 4 % 2 * 4 + 4)
    index = (read_word(at, mask) >> (column // 8 % 2 * 4)) & 0x0F0F0F0F
    value = signed_byte(table_values(tables_ptr, index), column % 4)
    return scale * value.to(tl.float32)
