# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""A GGUF file written again with some keys and tensors changed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.gguf_writer import Tensor, Typed, write_gguf
from vllm.transformers_utils.gguf.reader import open_gguf


def edit_gguf(
    source: Path,
    target: Path,
    *,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor | None] | None = None,
) -> Path:
    """Copy `source` with keys and tensors replaced, added, or dropped where None.

    Integers of the copy are 32 bits wide, which readers must take as well.
    """
    with open_gguf(source) as file:
        metadata: dict[str, Any] = {
            key: _array(file.array(key)) if _is_array(value) else value
            for key, value in file.metadata.items()
        }
        table: dict[str, Tensor] = {
            name: Tensor(name, info.dims, info.type.name, bytes(file.data(info)))
            for name, info in file.tensors.items()
        }
    for key, value in (keys or {}).items():
        _replace(metadata, key, value)
    for name, tensor in (tensors or {}).items():
        _replace(table, name, tensor)
    return write_gguf(target, metadata, list(table.values()))


def _replace(table: dict[str, Any], key: str, value: Any) -> None:
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value


def _is_array(value: Any) -> bool:
    return not isinstance(value, bool | int | float | str)


def _array(values: list[Any]) -> Typed:
    kinds = {bool: "bool", int: "i32", float: "f32", str: "string"}
    return Typed(f"[{kinds[type(values[0])]}]", values)
