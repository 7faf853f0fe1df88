# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Keys and tensors of a GGUF file in the form that `gguf_writer` writes.

Read with gguf-py, so that a test can change a sound file in one place.
"""

from dataclasses import dataclass
from pathlib import Path

from gguf import GGUFReader

from tests.helpers.gguf_writer import KIND_IDS, Tensor, Typed

_KINDS = {number: kind for kind, number in KIND_IDS.items()}


@dataclass
class Contents:
    """The keys, in file order, and the tensors by name."""

    metadata: dict[str, Typed]
    tensors: dict[str, Tensor]


def read_contents(path: Path, *, data: bool = True) -> Contents:
    """All of a GGUF file; without `data`, its copy will have holes for weights."""
    reader = GGUFReader(path)
    metadata: dict[str, Typed] = {}
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        kinds = [_KINDS[number] for number in field.types]
        kind = f"[{kinds[1]}]" if kinds[0] == "array" else kinds[0]
        metadata[key] = Typed(kind, field.contents())
    tensors = {
        tensor.name: Tensor(
            tensor.name,
            tensor.shape.tolist(),
            tensor.tensor_type.name,
            tensor.data.tobytes() if data else None,
        )
        for tensor in reader.tensors
    }
    return Contents(metadata, tensors)
