# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Random bytes as GGUF blocks, and what gguf-py makes of blocks: no quantizer needed.

Quantizers never write most of what a block can hold, such as negative scales.
"""

import gguf.quants
import torch
from gguf.constants import GGMLQuantizationType

from vllm.transformers_utils.gguf.ggml_types import GGMLType

# Where the high bytes of a block's floating-point numbers are. IQ1_M has the highest
# four bits of its scale in the last byte.
_HIGH_BYTES = {
    **{name: (1,) for name in ("F16", "BF16", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL")},
    **{name: (1,) for name in ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S")},
    **{name: (1,) for name in ("IQ3_XXS", "IQ3_S", "IQ4_XS")},
    **{name: (1, 3) for name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")},
    **{"F32": (3,), "Q2_K": (81, 83), "Q3_K": (109,), "Q6_K": (209,)},
    **{"TQ1_0": (53,), "TQ2_0": (65,), "IQ1_M": (55,), "MXFP4": (), "NVFP4": ()},
}
# The part of the exponent in that byte; float16's otherwise.
_EXPONENTS = {"F32": 0x7F, "BF16": 0x7F, "IQ1_M": 0x70}


def random_bytes(
    kind: GGMLType, rows: int, columns: int, seed: int = 0, device: str = "cpu"
) -> torch.Tensor:
    """uint8 [rows, row bytes]: any block of the type whose scales are finite."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (rows, columns // kind.block_size, kind.block_bytes)
    blocks = torch.randint(
        256, shape, dtype=torch.uint8, device=device, generator=generator
    )
    exponent = _EXPONENTS.get(kind.name, 0x7C)
    for place in _HIGH_BYTES[kind.name]:
        high = blocks[..., place]
        # Neither infinity nor NaN: the exponent is not all ones.
        blocks[..., place] = torch.where(high & exponent == exponent, high ^ 0x40, high)
    return blocks.flatten(1)


def expected_weights(kind: GGMLType, blocks: torch.Tensor) -> torch.Tensor:
    """What uint8 [rows, row bytes] mean to gguf-py: float32 [rows, columns], CPU."""
    data = blocks.cpu().contiguous().numpy()
    values = gguf.quants.dequantize(data, GGMLQuantizationType(kind.id))
    return torch.from_numpy(values.astype("float32"))
