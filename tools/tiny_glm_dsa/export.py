# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The trained model's shape, and the way from and to its GGUF file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.helpers.hf_reference import read_gguf
from tiny_glm_dsa import TinySpec, write_glm_dsa
from tools.tiny_glm_dsa.model import TinyGlm
from tools.tiny_glm_dsa.vocabulary import SIZE, trained_vocabulary

NAME = "Tiny GLM DSA, trained"
# The sizes that kernels depend on are GLM-5's; the file must stay below 16 MB.
SPEC = TinySpec(
    layers=4,
    dense_layers=2,
    shared_indexers="key",
    indexer_pattern="FSSF",
    mtp=True,
    vocab_size=SIZE,
    heads=4,
    dense_ff=128,
    expert_ff=128,
)


def save_gguf(model: TinyGlm, path: Path, weight_type: str = "Q8_0") -> None:
    """Write the model as one GGUF file of `weight_type`."""
    spec = replace(model.spec, weight_type=weight_type)
    tensors = {
        name: values.detach().float().cpu().numpy()
        for name, values in model.state_dict().items()
    }
    write_glm_dsa(path, spec, tensors, trained_vocabulary(), NAME)


def load_gguf(model: TinyGlm, path: Path) -> None:
    """Fill `model` with the dequantized weights of a file written by `save_gguf`.

    Raises:
        RuntimeError: the file's tensors are not the model's.
    """
    _, state = read_gguf(path)
    model.load_state_dict(state)
