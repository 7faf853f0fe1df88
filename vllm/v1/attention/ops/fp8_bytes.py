# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""e4m3 values as bytes, for devices whose Triton has no `tl.float8e4nv` (below SM89).

An e4m3fn code has a sign bit, four exponent bits (bias 7) and three mantissa bits. It
has no infinity: 0x7f and 0xff are NaN, 0x7e is 448, the largest value. The conversions
are exact for every input.
"""

from vllm.triton_utils import tl, triton


@triton.jit
def float32_to_e4m3(x):
    """Nearest e4m3 codes, ties to even, of float32 `x`: uint8, of the same shape.

    As `cvt.rn.satfinite.e4m3x2.f32`: what lies beyond 448 becomes 448, infinity too;
    NaN becomes 0x7f, whatever its sign.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    exponent = magnitude >> 23
    # Codes are evenly spaced from one power of two to the next, and below 2**-6 all the
    # way to zero. So a value is rounded to a multiple of the spacing by a shift of its
    # significand: 20 bits, and one more for each power of two below 2**-6. After five
    # more nothing is left, which also serves zeros and float32's own subnormals.
    binade = tl.maximum(exponent, 121)
    shift = 20 + tl.minimum(binade - exponent, 5)
    significand = (magnitude & 0x7FFFFF) | 0x800000
    odd = (significand >> shift) & 1
    steps = (significand + (1 << (shift - 1)) - 1 + odd) >> shift
    code = tl.minimum((binade - 121) * 8 + steps, 0x7E)
    code = code | ((bits >> 24) & 0x80)
    return tl.where(magnitude > 0x7F800000, 0x7F, code).to(tl.uint8)


@triton.jit
def e4m3_to_float16(code):
    """The float16 values of uint8 e4m3 codes, of the same shape."""
    # In float16's place the exponent means 2**8 less, in subnormals too. As a signed
    # byte the code brings its sign along; the mask removes the copy next to it.
    wide = code.to(tl.int8, bitcast=True).to(tl.int16)
    half = (wide << 7) & -0x4080
    value = half.to(tl.float16, bitcast=True) * 256.0
    # NaN has become 480. That times 146 is infinite, and 448 times 146 is not. Cheaper
    # than a comparison, as two values share each instruction.
    return value + (value * 146.0) * 0.0


@triton.jit
def e4m3_to_float32(code):
    """The float32 values of uint8 e4m3 codes, of the same shape."""
    return e4m3_to_float16(code).to(tl.float32)


@triton.jit
def power_of_two_scale(largest, SMALLEST: tl.constexpr):
    """Scales for float32 magnitudes of at most `largest`: float32, of the same shape.

    The least power of two that is at least `SMALLEST` and at least `largest` / 448.
    """
    scale = tl.maximum(tl.div_rn(largest, 448.0), SMALLEST)
    bits = scale.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
