# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Write GGUF files for tests, sound or broken in one chosen place.

    write_gguf(path, {"general.architecture": "x"}, [Tensor("a", (32, 2), "Q8_0")])

Data that a test does not give is a hole in the file, so a model of any size takes
no disk space. `Field` names where each number of the header lies, for mutations.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from vllm.transformers_utils.gguf.ggml_types import GGML_TYPES, GGML_TYPES_BY_NAME

KIND_IDS = {
    kind: i
    for i, kind in enumerate(
        ["u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array"]
        + ["u64", "i64", "f64"]
    )
}
_CODES = dict(
    u8="B", i8="b", u16="H", i16="h", u32="I", i32="i", f32="f", bool="?", u64="Q"
) | {"i64": "q", "f64": "d"}


class Typed(NamedTuple):
    """A value of a chosen type: "u16", "f64", "string"; "[i32]" for an array."""

    kind: str
    value: Any


class RawValue(NamedTuple):
    """Any value type id with any bytes behind it."""

    type_id: int
    payload: bytes = b""


class Field(NamedTuple):
    """One number of the header: role, position and struct code."""

    role: str
    pos: int
    code: str


@dataclass(frozen=True)
class Tensor:
    """One tensor; `dims` are in ggml order. The rest breaks or fills it."""

    name: str | bytes
    dims: Sequence[int] = (32,)
    type: str | int = "F32"
    data: bytes | None = None
    offset: int | None = None
    n_dims: int | None = None

    @property
    def type_id(self) -> int:
        if isinstance(self.type, int):
            return self.type
        return GGML_TYPES_BY_NAME[self.type].id

    @property
    def nbytes(self) -> int:
        """Bytes that the data takes; 0 where dims or type make no sense."""
        kind = GGML_TYPES.get(self.type_id)
        if kind is None or not self.dims or not 0 < prod(self.dims) < 1 << 62:
            return 0
        return prod(self.dims) // kind.block_size * kind.block_bytes


@dataclass
class Header:
    """A header under construction, and the places of its numbers."""

    out: bytearray = field(default_factory=bytearray)
    fields: list[Field] = field(default_factory=list)

    def number(self, role: str, code: str, value: Any) -> None:
        self.fields.append(Field(role, len(self.out), code))
        self.out += struct.pack(f"<{code}", value)

    def string(self, value: str | bytes) -> None:
        raw = value.encode() if isinstance(value, str) else value
        self.number("length", "Q", len(raw))
        self.out += raw

    def value(self, value: Any) -> None:
        if isinstance(value, RawValue):
            self.number("value type", "I", value.type_id)
            self.out += value.payload
            return
        kind, value = value if isinstance(value, Typed) else _infer(value)
        if not kind.startswith("["):
            self.number("value type", "I", KIND_IDS[kind])
            self._plain(kind, value)
            return
        kind = kind[1:-1]
        self.number("value type", "I", KIND_IDS["array"])
        self.number("value type", "I", KIND_IDS[kind])
        self.number("count", "Q", len(value))
        if kind != "string":
            self.out += struct.pack(f"<{len(value)}{_CODES[kind]}", *value)
        elif len(value) < 100:
            for item in value:
                self.string(item)
        else:
            raws = (v.encode() if isinstance(v, str) else v for v in value)
            self.out += b"".join(struct.pack("<Q", len(raw)) + raw for raw in raws)

    def _plain(self, kind: str, value: Any) -> None:
        if kind == "string":
            self.string(value)
        else:
            self.number("value", _CODES[kind], value)


def _infer(value: Any) -> Typed:
    if isinstance(value, bool):
        return Typed("bool", value)
    if isinstance(value, int):
        return Typed("u32" if value >= 0 else "i32", value)
    if isinstance(value, float):
        return Typed("f32", value)
    if isinstance(value, list):
        return Typed(f"[{_infer(value[0]).kind}]", value)
    return Typed("string", value)


def encode_header(
    metadata: Mapping[str, Any] | Iterable[tuple[str | bytes, Any]],
    tensors: Sequence[Tensor] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensor_count: int | None = None,
    key_count: int | None = None,
    alignment: int = 32,
) -> tuple[Header, list[int]]:
    """The header, and the offset of each tensor in the data section.

    Pass `metadata` as pairs to repeat a key. `alignment` spaces the data; the key
    general.alignment is the caller's.
    """
    pairs = list(metadata.items() if isinstance(metadata, Mapping) else metadata)
    header = Header(bytearray(magic))
    header.number("version", "I", version)
    count = len(tensors) if tensor_count is None else tensor_count
    header.number("count", "Q", count)
    header.number("count", "Q", len(pairs) if key_count is None else key_count)
    for key, value in pairs:
        header.string(key)
        header.value(value)
    offsets: list[int] = []
    end = 0
    for tensor in tensors:
        offsets.append(end)
        header.string(tensor.name)
        n_dims = len(tensor.dims) if tensor.n_dims is None else tensor.n_dims
        header.number("n_dims", "I", n_dims)
        for dim in tensor.dims:
            header.number("dim", "Q", dim % (1 << 64))
        header.number("tensor type", "I", tensor.type_id)
        offset = end if tensor.offset is None else tensor.offset
        header.number("offset", "Q", offset)
        end += _pad(tensor.nbytes, alignment)
    return header, offsets


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any] | Iterable[tuple[str | bytes, Any]] = (),
    tensors: Sequence[Tensor] = (),
    *,
    alignment: int = 32,
    **header_options: Any,
) -> Path:
    """Write one file; see `encode_header` for the options.

    A file without tensors ends with its header. Data longer or shorter than a
    tensor needs is written as it is.
    """
    header, offsets = encode_header(
        metadata, tensors, alignment=alignment, **header_options
    )
    start = _pad(len(header.out), alignment)
    with path.open("wb") as file:
        file.write(header.out)
        for tensor, offset in zip(tensors, offsets, strict=True):
            if tensor.data is not None:
                file.seek(start + offset)
                file.write(tensor.data)
        if tensors:
            end = start + offsets[-1] + _pad(tensors[-1].nbytes, alignment)
            file.truncate(max(end, file.seek(0, 2)))
    return path


def write_shards(
    directory: Path,
    base: str,
    metadata: Mapping[str, Any],
    groups: Sequence[Sequence[Tensor]],
    overrides: Mapping[int, Mapping[str, Any]] | None = None,
) -> list[Path]:
    """Write one shard per group of tensors, as llama.cpp's split tool does.

    Only the first shard holds `metadata`. `overrides` replaces keys of single
    shards by 0-based number; a value of None removes the key.
    """
    total = sum(len(group) for group in groups)
    paths = []
    for index, group in enumerate(groups):
        keys = dict(metadata) if index == 0 else {}
        keys["split.no"] = Typed("u16", index)
        keys["split.count"] = Typed("u16", len(groups))
        keys["split.tensors.count"] = Typed("i32", total)
        keys |= (overrides or {}).get(index, {})
        keys = {key: value for key, value in keys.items() if value is not None}
        name = f"{base}-{index + 1:05d}-of-{len(groups):05d}.gguf"
        paths.append(write_gguf(directory / name, keys, group))
    return paths


def _pad(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
