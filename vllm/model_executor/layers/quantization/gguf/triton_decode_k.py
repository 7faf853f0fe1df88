# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Weights of K-quants and ternary types in Triton: Q2_K to Q6_K, TQ1_0, TQ2_0.

See `triton_decode.load_weights` for the arguments. A docstring gives the block's fields
in order, with their bytes. A block has 256 weights. For `read_quants`, offsets in a
field are counted from the first block, and what else earlier blocks hold is added: so
Triton sees how many neighbors read neighboring bytes.
"""

from vllm.model_executor.layers.quantization.gguf.triton_decode_bytes import (
    byte_of,
    read_byte,
    read_float16,
    read_quants,
    read_word,
)
from vllm.triton_utils import tl, triton


@triton.jit
def _two_bits(row_ptr, column, mask, BLOCK: tl.constexpr, START: tl.constexpr):
    """Quants of 2 bits, 64 bytes at `START`: 32 bytes hold 4 times 32 weights."""
    at = row_ptr + (
        column // 256 * (BLOCK - 64) + column // 128 * 32 + column % 32 + START
    )
    return (read_quants(at, mask) >> (column // 32 % 4 * 2)) & 3


@triton.jit
def _four_of_two_bits(at, column, mask):
    """The same, from 64 bytes at `at`: the weight's and its neighbors', a byte each."""
    words = read_word(at + (column // 128 % 2 * 32 + column // 4 % 8 * 4), mask)
    return (words >> (column // 32 % 4 * 2)) & 0x03030303


@triton.jit
def _four_bits(row_ptr, column, mask, BLOCK: tl.constexpr, START: tl.constexpr):
    """Quants of 4 bits, 128 bytes at `START`: 32 bytes hold 2 times 32 weights."""
    at = row_ptr + (
        column // 256 * (BLOCK - 128) + column // 64 * 32 + column % 32 + START
    )
    return (read_quants(at, mask) >> (column // 32 % 2 * 4)) & 15


@triton.jit
def _one_bit(row_ptr, column, mask, BLOCK: tl.constexpr, START: tl.constexpr):
    """Bits, 32 bytes at `START`: bit b of byte j is that of weight 32 b + j."""
    at = row_ptr + (column // 256 * BLOCK + column % 32 + START)
    return (read_quants(at, mask) >> (column // 32 % 8)) & 1


@triton.jit
def _six_bit_scale_and_min(block, column, mask):
    """Both for 32 weights, as float32, from the 12 bytes at `block` + 4.

    Byte i has scale i below 4 and two bits of scale 4 + i, byte 4 + i the same of the
    minima, byte 8 + i the low four bits of scale and minimum 4 + i.
    """
    part = column // 32 % 8
    at = block + 4 + part % 4
    first = read_byte(at, mask)
    second = read_byte(at + 4, mask)
    third = read_byte(at + 8, mask)
    scale = tl.where(part < 4, first & 63, (third & 15) | ((first >> 2) & 48))
    minimum = tl.where(part < 4, second & 63, (third >> 4) | ((second >> 2) & 48))
    return scale.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def q2_k(row_ptr, column, mask):
    """scales and minima 16 (4 bits, for 16 weights), quants 64, d f16, dmin f16."""
    block = row_ptr + column // 256 * 84
    both = read_byte(block + column // 16 % 16, mask)
    scale = read_float16(block + 80, mask) * (both & 15).to(tl.float32)
    minimum = read_float16(block + 82, mask) * (both >> 4).to(tl.float32)
    quants = _two_bits(row_ptr, column, mask, 84, 16)
    return scale * quants.to(tl.float32) - minimum


@triton.jit
def q3_k(row_ptr, column, mask):
    """high bits 32, quants 64, scales 12 (6 bits, for 16 weights), d f16.

    Byte i of the scales has the low four bits of scales i and 8 + i, byte 8 + i the
    other two of scales i, 4 + i, 8 + i and 12 + i.
    """
    block = row_ptr + column // 256 * 110
    part = column // 16 % 16
    low = (read_byte(block + 96 + part % 8, mask) >> (part // 8 * 4)) & 15
    high = (read_byte(block + 104 + part % 4, mask) >> (part // 4 * 2)) & 3
    scale = ((low | (high << 4)) - 32).to(tl.float32)
    bits = (read_word(block + column // 4 % 8 * 4, mask) >> (column // 32 % 8)) << 2
    quants = _four_of_two_bits(block + 32, column, mask) | (bits & 0x04040404)
    quants = byte_of(quants, column % 4) - 4
    return read_float16(block + 108, mask) * scale * quants.to(tl.float32)


@triton.jit
def q4_k(row_ptr, column, mask):
    """d f16, dmin f16, scales and minima 12 (6 bits, for 32 weights), quants 128."""
    block = row_ptr + column // 256 * 144
    scale, minimum = _six_bit_scale_and_min(block, column, mask)
    scale *= read_float16(block, mask)
    minimum *= read_float16(block + 2, mask)
    quants = _four_bits(row_ptr, column, mask, 144, 16)
    return scale * quants.to(tl.float32) - minimum


@triton.jit
def q5_k(row_ptr, column, mask):
    """d f16, dmin f16, scales and minima 12 (as Q4_K), fifth bits 32, quants 128."""
    block = row_ptr + column // 256 * 176
    scale, minimum = _six_bit_scale_and_min(block, column, mask)
    scale *= read_float16(block, mask)
    minimum *= read_float16(block + 2, mask)
    quants = _four_bits(row_ptr, column, mask, 176, 48)
    quants |= _one_bit(row_ptr, column, mask, 176, 16) << 4
    return scale * quants.to(tl.float32) - minimum


@triton.jit
def q6_k(row_ptr, column, mask):
    """low bits 128, high bits 64, scales 16 (signed, for 16 weights), d f16."""
    block = row_ptr + column // 256 * 210
    code = read_byte(block + 192 + column // 16 % 16, mask)
    scale = ((code ^ 128) - 128).to(tl.float32)
    at = block + (column // 128 % 2 * 64 + column // 4 % 16 * 4)
    quants = (read_word(at, mask) >> (column // 64 % 2 * 4)) & 0x0F0F0F0F
    quants |= _four_of_two_bits(block + 128, column, mask) << 4
    quants = byte_of(quants, column % 4) - 32
    return read_float16(block + 208, mask) * scale * quants.to(tl.float32)


@triton.jit
def tq1_0(row_ptr, column, mask):
    """digits 52, d f16. A byte is a fraction of 256, whose ternary digits are weights.

    32 bytes hold 5 times 32 weights, 16 bytes 5 times 16, and 4 bytes 4 times 4.
    """
    block = row_ptr + column // 256 * 54
    inner = column % 256
    place = tl.where(inner < 160, inner % 32, 32 + inner % 16)
    place = tl.where(inner < 240, place, 48 + inner % 4)
    digit = tl.where(inner < 160, inner // 32, (inner - 160) // 16)
    digit = tl.where(inner < 240, digit, (inner - 240) // 4)
    power = tl.where(digit == 0, 1, tl.where(digit == 1, 3, 9))
    power = tl.where(digit < 3, power, tl.where(digit == 3, 27, 81))
    rest = (read_quants(block + place, mask) * power) & 255
    quants = ((rest * 3) >> 8) - 1
    return read_float16(block + 52, mask) * quants.to(tl.float32)


@triton.jit
def tq2_0(row_ptr, column, mask):
    """quants 64, d f16."""
    block = row_ptr + column // 256 * 66
    quants = byte_of(_four_of_two_bits(block, column, mask), column % 4) - 1
    return read_float16(block + 64, mask) * quants.to(tl.float32)
