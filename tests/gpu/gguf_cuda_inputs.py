# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Blocks, values and room for results of checks of the CUDA C++ kernels."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from tests.helpers import gguf_random
from tests.helpers.gguf_random import expected_weights, random_bytes
from vllm.model_executor.layers.quantization.gguf.cuda_extension import (
    CUDA_TYPES,
    alignment,
)
from vllm.model_executor.layers.quantization.gguf.triton_moe import Experts
from vllm.transformers_utils.gguf.ggml_types import GGML_TYPES_BY_NAME, GGMLType

DEVICE = "cuda"
HIDDEN, INNER = 768, 256
NAN = float("nan")


def even_blocks(kind: GGMLType, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """uint8 [rows, row bytes]: random bits, with scales of one magnitude, so that an
    error of any weight counts."""
    shape = (rows, columns // kind.block_size, kind.block_bytes)
    blocks = random_bytes(kind, rows, columns, seed, DEVICE).view(shape)
    if kind.name == "MXFP4":
        blocks[..., 0] = 120 + blocks[..., 0] % 4
    for place in gguf_random._HIGH_BYTES[kind.name]:
        # Of float16: the sign, the exponent and two bits of the fraction.
        keep, exponent = (0x0F, 0x10) if kind.name == "IQ1_M" else (0x83, 0x1C)
        blocks[..., place] = (blocks[..., place] & keep) | exponent
    return blocks.flatten(1)


def exact(kind: GGMLType, blocks: torch.Tensor) -> torch.Tensor:
    return expected_weights(kind, blocks).double().to(DEVICE)


def placed(blocks: torch.Tensor, at: int, apart: int) -> torch.Tensor:
    """The same rows, the first `at` bytes from a multiple of 16, `apart` between."""
    rows, size = blocks.shape
    room = torch.zeros(at + rows * (size + apart), dtype=torch.uint8, device=DEVICE)
    view = room[at:].view(rows, size + apart)[:, :size]
    return view.copy_(blocks)


def places(kind: GGMLType) -> Iterator[tuple[int, int]]:
    """Where rows begin and how far they are apart, for `placed`."""
    step = alignment(kind)
    yield 0, 0
    if step < 16:
        yield from ((step, 0), (16 - step, step), (3 * step, 3 * step))
    else:
        yield 16, 16


def tokens_of(count: int, columns: int) -> torch.Tensor:
    """bfloat16 [count, columns], apart from one another."""
    wide = torch.randn(count, columns + 16, device=DEVICE).bfloat16()
    return wide[:, 8:-8]


def room_for(tokens: int, rows: int, left: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of NaN, and a part of it for results, `left` from a multiple of 16."""
    whole = torch.full((tokens + 2, rows + 16), NAN, device=DEVICE).bfloat16()
    return whole, whole[1:-1, left : left + rows]


class Case:
    """Experts of which `different` have blocks of their own, and the others repeat
    them, with gate and up of one type and down of another."""

    def __init__(self, kind: GGMLType, down: GGMLType, count: int, different: int):
        self.count, self.different = count, min(count, different)
        gate_up = even_blocks(kind, self.different * 2 * INNER, HIDDEN, 1)
        w2 = even_blocks(down, self.different * HIDDEN, INNER, 2)
        shape = (self.different, -1, HIDDEN)
        self.gate_up = exact(kind, gate_up).view(shape)
        self.down = exact(down, w2).view(self.different, HIDDEN, INNER)
        # So that gates are where silu is curved.
        self.scale = 1 / (self.gate_up.std().item() * HIDDEN**0.5)
        which = torch.arange(count, device=DEVICE) % self.different
        self.experts = Experts(
            gate_up.view(self.different, -1)[which],
            w2.view(self.different, -1)[which],
            kind,
            kind,
            down,
            INNER,
            count,
        )

    def inputs(self, tokens: int, top_k: int) -> tuple[torch.Tensor, ...]:
        """x, router weights and ids; a fifth of the ids is -1, with weights of NaN,
        and of two tokens or more the last has no expert at all."""
        x = tokens_of(tokens, HIDDEN).mul_(self.scale)
        ids = torch.rand(tokens, self.count, device=DEVICE).argsort(1)[:, :top_k]
        ids = torch.where(torch.rand(tokens, top_k, device=DEVICE) < 0.2, -1, ids)
        ids[0, 0], ids[1:][-1:] = self.count - 1, -1
        router = torch.rand(tokens, top_k, device=DEVICE) + 0.5
        router[ids < 0] = NAN
        return x, router, ids

    def reference(
        self, x: torch.Tensor, router: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
        for i in range(self.different):
            tokens, choices = torch.where((ids >= 0) & (ids % self.different == i))
            gate, up = (x[tokens].double() @ self.gate_up[i].t()).chunk(2, 1)
            values = (F.silu(gate) * up) @ self.down[i].t()
            values *= router[tokens, choices].double().unsqueeze(1)
            total.index_add_(0, tokens, values)
        return total


def other(kind: GGMLType) -> GGMLType:
    """The next type, for down projections."""
    names = sorted(CUDA_TYPES)
    following = names[(names.index(kind.name) + 1) % len(names)]
    return GGML_TYPES_BY_NAME[following]
