# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""How Triton kernels read the fields of raw GGUF blocks.

Scales, codebooks and words of four quants are shared by neighboring weights. `tl.load`
would fetch them again for each weight, since Triton never merges loads. The functions
here read them by inline assembly that is declared free of side effects, so the compiler
keeps one read for all weights of a thread that share it, and does once what is done to
the shared value alone, such as shifting four quants. The price: a kernel must not write
what it reads so. Triton's interpreter, which knows no assembly, takes `tl.load`.

Quants of types whose blocks are a multiple of four bytes are better left to `tl.load`:
a thread gets 4 to 16 bytes at once, and loops can fetch them ahead.
"""

import os

from vllm.triton_utils import tl, triton

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def read_byte(pointer, mask):
    """The bytes at uint8 pointers, as int32; 0 where `mask` is false."""
    if _INTERPRETED:
        return tl.load(pointer, mask=mask, other=0).to(tl.int32)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0;"
            " @p ld.global.nc.u8 $0, [$1]; }",
            "=r,l,r",
            [pointer, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def read_uint16(pointer, mask):
    """The numbers at uint8 pointers, even ones, as int32; 0 where `mask` is false."""
    if _INTERPRETED:
        pointer = pointer.to(tl.pointer_type(tl.uint16))
        return tl.load(pointer, mask=mask, other=0).to(tl.int32)
    else:
        bits = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b16 $0, 0;"
            " @p ld.global.nc.b16 $0, [$1]; }",
            "=h,l,r",
            [pointer, mask.to(tl.int32)],
            dtype=tl.uint16,
            is_pure=True,
            pack=1,
        )
        return bits.to(tl.int32)


@triton.jit
def read_word(pointer, mask):
    """The four bytes at even uint8 pointers, as int32; 0 where `mask` is false."""
    return read_uint16(pointer, mask) | (read_uint16(pointer + 2, mask) << 16)


@triton.jit
def read_odd_word(pointer, mask):
    """The four bytes at any uint8 pointers, as int32; 0 where `mask` is false."""
    low = read_byte(pointer, mask) | (read_byte(pointer + 1, mask) << 8)
    high = read_byte(pointer + 2, mask) | (read_byte(pointer + 3, mask) << 8)
    return low | (high << 16)


@triton.jit
def read_entry(tables_ptr, index):
    """The entries of an int32 table; every index must lie within it."""
    if _INTERPRETED:
        return tl.load(tables_ptr + index)
    else:
        return tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];",
            "=r,l",
            [tables_ptr + index],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def read_quants(pointer, mask):
    """The bytes at uint8 pointers, for every weight its own, as int32."""
    return tl.load(pointer, mask=mask, other=0).to(tl.int32)


@triton.jit
def float16_of(bits):
    """float32 of the float16 whose bits are int32 `bits`, below 2**16."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def read_float16(pointer, mask):
    """float32 of the float16 at uint8 pointers, even ones."""
    return float16_of(read_uint16(pointer, mask))


@triton.jit
def byte_of(word, place):
    """Byte `place`, 0 (lowest) to 3, of int32 `word`, without a sign."""
    return (word >> (place * 8)) & 255


@triton.jit
def signed_byte(word, place):
    """Byte `place`, 0 (lowest) to 3, of int32 `word`, with its sign."""
    return (word << (24 - place * 8)) >> 24


@triton.jit
def _choose_bytes(low, high, choice):
    """Bytes of int32 `low` (0 to 3) and `high` (4 to 7), by the nibbles of `choice`.

    choice: int32, four nibbles below 8. Returns int32, a byte for each.
    """
    if _INTERPRETED:
        chosen = choice * 0
        for place in tl.static_range(4):
            number = (choice >> (place * 4)) & 7
            word = tl.where(number < 4, low, high)
            chosen |= byte_of(word, number % 4) << (place * 8)
        return chosen
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [low, high, choice],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def table_values(tables_ptr, index):
    """Four values, a signed byte each, of the table of 16 that `tables` gives.

    index: int32, four bytes below 16.
    """
    pairs = (index | (index >> 4)) & 0x00FF00FF
    choice = (pairs | (pairs >> 8)) & 0x7777
    low = _choose_bytes(read_entry(tables_ptr, 0), read_entry(tables_ptr, 1), choice)
    high = _choose_bytes(read_entry(tables_ptr, 2), read_entry(tables_ptr, 3), choice)
    is_high = ((index >> 3) & 0x01010101) * 255
    return low ^ ((low ^ high) & is_high)


@triton.jit
def eight_in_a_thread(weights, column, tables_ptr):
    """`weights`, unchanged, with eight neighboring columns in each thread.

    Triton lays tensors out among threads as its loads want it, those by assembly not
    counted, and by itself gives neighbors to different threads, where they share
    nothing. So here is a load that would be best with eight. None takes place: nothing
    uses it in the end. For one and two dimensions.
    """
    ALONG: tl.constexpr = 1 if column.shape[0] == 1 else 0
    if _INTERPRETED or len(weights.shape) > 2:
        return weights
    else:
        numbers = tl.arange(0, weights.shape[ALONG])
        if len(weights.shape) == 2:
            numbers = tl.expand_dims(numbers, 1 - ALONG)
            numbers = tl.broadcast_to(numbers, weights.shape)
        never = tl.broadcast_to(tables_ptr.to(tl.int64) == 0, weights.shape)
        pointer = tables_ptr.to(tl.pointer_type(tl.uint16)) + numbers
        nothing = tl.load(pointer, mask=never, other=0)
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $2; mov.b32 $1, $3; // $4",
            "=f,=f,f,f,r",
            [weights, nothing],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
