# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Weights of I-quants in Triton: IQ1_S to IQ4_XS.

See `triton_decode.load_weights` for the arguments. A docstring gives the block's fields
in order, with their bytes. A block has 256 weights. Groups of 8 or 4 of them are one
entry of a grid, and `tables` gives four values of an entry in one int32.
"""

from vllm.model_executor.layers.quantization.gguf.triton_decode_bytes import (
    float16_of,
    read_byte,
    read_entry,
    read_float16,
    read_uint16,
    read_word,
    signed_byte,
    table_values,
)
from vllm.triton_utils import tl, triton


@triton.jit
def _from_8(tables_ptr, entry, column):
    """Four values, a signed byte each, from a grid with entries of 8."""
    return read_entry(tables_ptr, entry * 2 + column // 4 % 2)


@triton.jit
def _value(values, signs, column):
    """The weight's of four values, which are above zero, as float32.

    It is negated where bit `column` % 8 of `signs` is set.
    """
    bits = (signs >> (column // 4 % 2 * 4)) & 15
    # Bit i goes to byte i, as there are seven bits from one factor to the next.
    minus = (bits * 0x00204081) & 0x01010101
    # No byte carries into the next: not even -1 + 1 does, without a zero.
    values = (values ^ (minus * 255)) + minus
    return signed_byte(values, column % 4).to(tl.float32)


@triton.jit
def _signs_and_scale(at, tables_ptr, column, mask, SIGNS: tl.constexpr):
    """8 signs and a scale of 4 bits, from the four bytes at `at` for 32 weights.

    Seven bits for each 8 weights are the index of their signs in the tables, whose
    first row is at `SIGNS`.
    """
    low = read_uint16(at, mask)
    high = read_uint16(at + 2, mask)
    index = ((low | (high << 16)) >> (column // 8 % 4 * 7)) & 127
    return read_entry(tables_ptr, index + SIGNS), high >> 12


@triton.jit
def iq2_xxs(row_ptr, column, mask, tables_ptr):
    """d f16; for each 32 weights grid indices 4, signs and scale 4."""
    block = row_ptr + column // 256 * 66
    part = block + 2 + column // 32 % 8 * 8
    signs, scale = _signs_and_scale(part + 4, tables_ptr, column, mask, 512)
    entry = read_byte(part + column // 8 % 4, mask)
    value = _value(_from_8(tables_ptr, entry, column), signs, column)
    scale = read_float16(block, mask) * (scale.to(tl.float32) + 0.5) * 0.25
    return scale * value


@triton.jit
def iq2_xs(row_ptr, column, mask, tables_ptr):
    """d f16, entries 64 (9 bits of grid index, 7 of signs), scales 8 (4 bits each)."""
    block = row_ptr + column // 256 * 74
    code = read_uint16(block + 2 + column // 8 % 32 * 2, mask)
    signs = read_entry(tables_ptr, 1024 + (code >> 9))
    value = _value(_from_8(tables_ptr, code & 511, column), signs, column)
    scale = read_byte(block + 66 + column // 32 % 8, mask)
    scale = ((scale >> (column // 16 % 2 * 4)) & 15).to(tl.float32)
    scale = read_float16(block, mask) * (scale + 0.5) * 0.25
    return scale * value


@triton.jit
def iq2_s(row_ptr, column, mask, tables_ptr):
    """d f16, grid indices 32, signs 32, two more bits of the indices 8, scales 8."""
    block = row_ptr + column // 256 * 82
    eight = block + column // 8 % 32
    part = block + column // 32 % 8
    more = (read_byte(part + 66, mask) >> (column // 8 % 4 * 2)) & 3
    entry = read_byte(eight + 2, mask) | (more << 8)
    signs = read_byte(eight + 34, mask)
    value = _value(_from_8(tables_ptr, entry, column), signs, column)
    scale = read_byte(part + 74, mask)
    scale = ((scale >> (column // 16 % 2 * 4)) & 15).to(tl.float32)
    scale = read_float16(block, mask) * (scale + 0.5) * 0.25
    return scale * value


@triton.jit
def iq3_xxs(row_ptr, column, mask, tables_ptr):
    """d f16, grid indices 64, signs and scales 32 (4 for 32 weights)."""
    block = row_ptr + column // 256 * 98
    part = block + 66 + column // 32 % 8 * 4
    signs, scale = _signs_and_scale(part, tables_ptr, column, mask, 256)
    entry = read_byte(block + 2 + column // 4 % 64, mask)
    value = _value(read_entry(tables_ptr, entry), signs, column)
    scale = read_float16(block, mask) * (scale.to(tl.float32) + 0.5) * 0.5
    return scale * value


@triton.jit
def iq3_s(row_ptr, column, mask, tables_ptr):
    """d f16, grid indices 64, ninth bits of them 8, signs 32, scales 4."""
    block = row_ptr + column // 256 * 110
    ninth = read_byte(block + 66 + column // 32 % 8, mask) >> (column // 4 % 8)
    entry = read_byte(block + 2 + column // 4 % 64, mask) | ((ninth & 1) << 8)
    signs = read_byte(block + 74 + column // 8 % 32, mask)
    value = _value(read_entry(tables_ptr, entry), signs, column)
    scale = read_byte(block + 106 + column // 64 % 4, mask)
    scale = ((scale >> (column // 32 % 2 * 4)) & 15) * 2 + 1
    return read_float16(block, mask) * scale.to(tl.float32) * value


@triton.jit
def iq1_s(row_ptr, column, mask, tables_ptr):
    """d f16, grid indices 32, 16 (for 32 weights: bits of 4 indices, scale, shift)."""
    block = row_ptr + column // 256 * 50
    extra = read_uint16(block + 34 + column // 32 % 8 * 2, mask)
    more = (extra >> (column // 8 % 4 * 3)) & 7
    entry = read_byte(block + 2 + column // 8 % 32, mask) | (more << 8)
    value = _from_8(tables_ptr, entry, column)
    value = signed_byte(value, column % 4).to(tl.float32)
    shift = tl.where(extra < 0x8000, 0.125, -0.125)
    scale = (((extra >> 12) & 7) * 2 + 1).to(tl.float32)
    return read_float16(block, mask) * scale * (value + shift)


@triton.jit
def iq1_m(row_ptr, column, mask, tables_ptr):
    """grid indices 32, 16 (for 8 weights 4 bits: three of an index, shift), scales 8.

    Of a 16-bit number of scales, 12 bits are the scales of 64 weights, 16 each; the
    highest four are a quarter of d, the lowest quarter first.
    """
    block = row_ptr + column // 256 * 56
    extra = read_byte(block + 32 + column // 16 % 16, mask) >> (column // 8 % 2 * 4)
    entry = read_byte(block + column // 8 % 32, mask) | ((extra & 7) << 8)
    value = _from_8(tables_ptr, entry, column)
    value = signed_byte(value, column % 4).to(tl.float32)
    shift = tl.where((extra & 8) == 0, 0.125, -0.125)
    bits = read_uint16(block + 48, mask) >> 12
    bits |= (read_uint16(block + 50, mask) >> 8) & 0xF0
    bits |= (read_uint16(block + 52, mask) >> 4) & 0xF00
    bits |= read_uint16(block + 54, mask) & 0xF000
    scale = read_uint16(block + 48 + column // 64 % 4 * 2, mask)
    scale = (((scale >> (column // 16 % 4 * 3)) & 7) * 2 + 1).to(tl.float32)
    return float16_of(bits) * scale * (value + shift)


@triton.jit
def iq4_xs(row_ptr, column, mask, tables_ptr):
    """d f16, high bits of scales 2, low bits of scales 4 (for 32 weights), indices 128.

    16 bytes hold 32 weights, the first 16 of them in their low halves.
    """
    block = row_ptr + column // 256 * 136
    low = read_byte(block + 4 + column // 64 % 4, mask) >> (column // 32 % 2 * 4)
    high = read_uint16(block + 2, mask) >> (column // 32 % 8 * 2)
    scale = (((low & 15) | ((high & 3) << 4)) - 32).to(tl.float32)
    at = block + (column // 32 % 8 * 16 + column // 4 % 4 * 4 + 8)
    index = (read_word(at, mask) >> (column // 16 % 2 * 4)) & 0x0F0F0F0F
    value = signed_byte(table_values(tables_ptr, index), column % 4)
    return read_float16(block, mask) * scale * value.to(tl.float32)
