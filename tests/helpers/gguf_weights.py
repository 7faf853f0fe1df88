# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Real blocks as a file would hold them, and what they mean according to gguf-py."""

import gguf.quants
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType

from tests.helpers.ggml_quantize import random_blocks


def file_tensor(type_name: str, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """uint8 [rows, row bytes]: blocks of random weights."""
    return torch.from_numpy(random_blocks(type_name, rows, columns, seed).copy())


def file_experts(
    type_name: str, experts: int, rows: int, columns: int, seed: int = 0
) -> torch.Tensor:
    """uint8 [experts, rows, row bytes]: a stacked tensor of random experts."""
    return file_tensor(type_name, experts * rows, columns, seed).unflatten(
        0, (experts, rows)
    )


def weights(type_name: str, blocks: torch.Tensor) -> torch.Tensor:
    """float64 [..., columns]: gguf-py's values of uint8 [..., row bytes]."""
    values = gguf.quants.dequantize(blocks.numpy(), GGMLQuantizationType[type_name])
    return torch.from_numpy(np.array(values, dtype=np.float64))
