# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What the logit kernels share: the order of query heads in a tile, and its reduction.

A tile multiplies keys [N, 128] with all heads of some queries at once. The heads are
the columns of the product, and one after the other they are clipped, weighed and
summed. The accumulator of an MMA gives a thread columns 8j + 2t and 8j + 2t + 1, where
t is its lane modulo four. Columns are ordered so that these are heads of one query: the
sum over heads then needs no, or few, exchanges between threads. Any other order would
be right as well, and slower.
"""

import functools

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.fp8_bytes import e4m3_to_float16

KEY_DIM = 128
# One cached key: its e4m3 values, and a float32 scale. A page holds the values of all
# its keys first, then their scales.
SCALE_BYTES = 4
TOKEN_BYTES = KEY_DIM + SCALE_BYTES
HEADS = (16, 32, 64)

_DIM = tl.constexpr(KEY_DIM)


@triton.jit
def head_columns(QUERIES: tl.constexpr, HEADS: tl.constexpr):
    """Query and head of each column, both int32 [QUERIES * HEADS]."""
    column = tl.arange(0, QUERIES * HEADS)
    queries: tl.constexpr = QUERIES if QUERIES < 4 else 4
    threads: tl.constexpr = 4 // queries
    steps: tl.constexpr = HEADS // (2 * threads)
    lane = (column // 2) % 4
    step = column // 8
    query = (step // steps) * queries + lane // threads
    head = ((step % steps) * threads + lane % threads) * 2 + column % 2
    return query, head


@triton.jit
def sum_heads(x, KEYS: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr):
    """Sums [KEYS, QUERIES] of [KEYS, columns] over heads, in `head_columns` order."""
    queries: tl.constexpr = QUERIES if QUERIES < 4 else 4
    width: tl.constexpr = 8 // queries
    x = tl.reshape(x, (KEYS, QUERIES // queries, HEADS // width, queries, width))
    x = tl.permute(x, (0, 1, 3, 2, 4))
    return tl.sum(tl.reshape(x, (KEYS, QUERIES, HEADS)), axis=2)


@triton.jit
def load_query(
    q_ptr,
    weights_ptr,
    row,
    head,
    valid,
    HEADS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Columns of a tile [128, C], and half their weights [C].

    `row` is int64. Zeros where `valid` is false.
    """
    dim = tl.arange(0, _DIM)
    at = row * HEADS + head
    q = tl.load(
        q_ptr + (at * _DIM)[:, None] + dim[None, :], mask=valid[:, None], other=0.0
    )
    if WIDEN:
        q = e4m3_to_float16(q)
    weights = tl.load(weights_ptr + at, mask=valid, other=0.0)
    return tl.trans(q), weights * 0.5


@triton.jit
def tile_logits(
    keys,
    scales,
    columns,
    half_weights,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Logits [KEYS, QUERIES] float32 of keys [KEYS, 128] with their scales [KEYS]."""
    dots = tl.dot(keys, columns)
    # Twice the dot product, or zero. A maximum runs at half the rate of an addition.
    clipped = dots + tl.abs(dots)
    weighed = clipped * half_weights[None, :]
    return sum_heads(weighed, KEYS, QUERIES, HEADS) * scales[:, None]


@functools.cache
def device_of(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors."""
    if device.type == "cpu":
        # Triton's interpreter, for one program at a time.
        return (0, 0), 1
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count


def check_query(q: torch.Tensor, weights: torch.Tensor) -> None:
    """ValueError unless `q` is e4m3 [..., heads, 128] with float32 weights to match."""
    if q.dtype != torch.float8_e4m3fn or q.shape[-1] != KEY_DIM:
        raise ValueError(
            f"q is {q.dtype} {list(q.shape)}; expected float8_e4m3fn [..., {KEY_DIM}]"
        )
    if q.shape[-2] not in HEADS:
        raise ValueError(f"{q.shape[-2]} index heads; expected one of {HEADS}")
    wanted = (q.shape[:-2].numel(), q.shape[-2])
    if weights.dtype != torch.float32 or weights.shape != wanted:
        raise ValueError(
            f"weights are {weights.dtype} {list(weights.shape)}; expected float32"
            f" {list(wanted)}"
        )


def empty_logits(rows: int, width: int, device: torch.device) -> torch.Tensor:
    """[rows, width] float32, not initialized; rows start at multiples of 1 KiB."""
    padded = -(-max(width, 1) // 256) * 256
    out = torch.empty(rows, padded, dtype=torch.float32, device=device)
    return out[:, :width]
