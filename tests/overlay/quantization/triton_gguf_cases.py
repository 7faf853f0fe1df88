# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What tests of products with GGUF blocks in Triton share: inputs, references, errors.

Imported where kernels are interpreted or timed: nothing of the release.
"""

from typing import Any

import torch

from vllm.transformers_utils.gguf.ggml_types import GGML_TYPES_BY_NAME, GGMLType

# Of float32 sums of a few hundred products, and of one rounding to float16.
FLOAT32 = 2e-6
FLOAT16 = 1.5e-3


def kind_of(name: str) -> GGMLType:
    return GGML_TYPES_BY_NAME[name]


# Offsets of the float16 fields of a block.
_SCALES = {
    **dict.fromkeys(("Q8_0", "IQ2_XXS", "IQ4_XS", "IQ4_NL", "IQ3_XXS", "IQ1_S"), [0]),
    **dict.fromkeys(("Q4_K", "Q5_K"), [0, 2]),
    "IQ3_S": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q6_K": [208],
}


def random_blocks(
    name: str,
    rows: int,
    columns: int,
    seed: int = 0,
    device: str = "cpu",
) -> torch.Tensor:
    """uint8 [rows, row bytes]: random bits, with scales that are small numbers."""
    kind = kind_of(name)
    generator = torch.Generator(device).manual_seed(seed)
    options = {"generator": generator, "device": device}
    if kind.block_size == 1:
        floats = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        numbers = torch.randn(rows, columns, **options).mul_(0.05)
        return numbers.to(floats[name]).view(torch.uint8)
    shape = (rows, columns // kind.block_size, kind.block_bytes)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, **options)
    if name == "MXFP4":
        blocks[..., 0] = 118 + blocks[..., 0] % 4
    for offset in _SCALES.get(name, []):
        scale = torch.rand(shape[:2], **options).add_(0.5).mul_(1e-3).half()
        blocks[..., offset : offset + 2] = scale.unsqueeze(-1).view(torch.uint8)
    if name != "MXFP4" and name not in _SCALES:
        raise ValueError(f"no random blocks of type {name}")
    return blocks.flatten(1)


def check(out: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """The relative error of the whole, and that no single value is far off."""
    difference = (out.double() - expected).abs()
    scale = expected.pow(2).mean().sqrt()
    worst = difference.argmax().item()
    error = (difference.pow(2).mean().sqrt() / scale).item()
    assert error <= bound, f"error {error:.2e} > {bound:.0e}, worst at {worst}"
    assert difference.max() <= 8 * bound * scale, f"value {worst} is off"


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def random_experts(
    name: str, experts: int, rows: int, columns: int, seed: int
) -> torch.Tensor:
    """uint8 [experts, rows, row bytes]."""
    blocks = random_blocks(name, experts * rows, columns, seed)
    return blocks.unflatten(0, (experts, rows))


class MoE:
    """A stack of experts of the file, and the sum of a token's experts in float64."""

    def __init__(
        self, types: tuple[str, str, str], experts: int, inner: int, hidden: int
    ) -> None:
        gate, up, down = types
        self.types = types
        self.inner, self.hidden, self.experts = inner, hidden, experts
        self.w1 = random_experts(gate, experts, inner, hidden, 1)
        self.w3 = random_experts(up, experts, inner, hidden, 2)
        self.w2 = random_experts(down, experts, hidden, inner, 3)

    def stacks(self, chosen_from: int | None = None) -> Any:
        from vllm.model_executor.layers.quantization.gguf.triton_moe import Experts

        w13 = torch.cat([self.w1.flatten(1), self.w3.flatten(1)], 1)
        gate, up, down = map(kind_of, self.types)
        count = chosen_from or self.experts
        return Experts(w13, self.w2.flatten(1), gate, up, down, self.inner, count)

    def reference(
        self, x: torch.Tensor, router: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        from tests.helpers.gguf_weights import weights

        blocks = (self.w1, self.w3, self.w2)
        gate, up, down = map(weights, self.types, blocks)
        out = torch.zeros(x.shape, dtype=torch.float64)
        for token, row in enumerate(x.double()):
            for weight, expert in zip(router[token], ids[token], strict=True):
                if expert >= 0:
                    hidden = torch.nn.functional.silu(gate[expert] @ row)
                    hidden *= up[expert] @ row
                    out[token] += weight.double() * (down[expert] @ hidden)
        return out


def routing(
    tokens: int, top_k: int, choices: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Router weights that do not sum to 1, and different ids out of `choices`."""
    generator = torch.Generator().manual_seed(7)
    router = torch.rand(tokens, top_k, generator=generator) * 2.5
    order = torch.rand(tokens, len(choices), generator=generator).argsort(1)
    return router, torch.tensor(choices)[order[:, :top_k]]
