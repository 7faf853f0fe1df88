# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Parse the header of one GGUF v3 file by a struct walk over its memory map.

Every length and count is compared with the bytes that the file has left before
anything is read or allocated. Arrays above `LAZY_ABOVE` elements stay in the map
until `LazyArray.decode`.
"""

import math
import mmap
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from vllm.transformers_utils.gguf.errors import GGUFError
from vllm.transformers_utils.gguf.ggml_types import GGMLType, ggml_type

LAZY_ABOVE: Final = 1024
DEFAULT_ALIGNMENT: Final = 32

# Ceilings far above any real header. They bound the time and memory that a
# hostile sparse file, whose holes satisfy every other check, can take.
MAX_VALUE_BYTES: Final = 64 << 20
MAX_ARRAY_ELEMENTS: Final = 1 << 22
MAX_KEYS: Final = 1 << 16
MAX_TENSORS: Final = 1 << 20
MAX_NAME_BYTES: Final = (1 << 16) - 1
MAX_DIMS: Final = 4
_I64_MAX: Final = (1 << 63) - 1

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING: Final = 8
_ARRAY: Final = 9
# The value types by id: name, and struct code of a scalar.
_VALUE_TYPES: Final = (
    ("u8", "B"),
    ("i8", "b"),
    ("u16", "H"),
    ("i16", "h"),
    ("u32", "I"),
    ("i32", "i"),
    ("f32", "f"),
    ("bool", "?"),
    ("string", ""),
    ("array", ""),
    ("u64", "Q"),
    ("i64", "q"),
    ("f64", "d"),
)
_SCALARS = {
    type_id: struct.Struct(f"<{code}")
    for type_id, (_, code) in enumerate(_VALUE_TYPES)
    if code
}
_MIN_KEY_BYTES: Final = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES: Final = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies.

    `dims` are in ggml order, fastest first; `shape` is the same in torch order.
    `offset` counts bytes from the start of the file of shard number `shard`.
    """

    name: str
    dims: tuple[int, ...]
    type: GGMLType
    shard: int
    offset: int
    nbytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.dims[::-1]


class MappedFile:
    """One file and its read-only map, made when needed.

    After `release` the next use maps the file again, and refuses a file that
    changed in between.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        self._stamp: tuple[int, int] | None = None
        self.size = len(self.map())

    def map(self) -> mmap.mmap:
        if self._map is None:
            try:
                with self.path.open("rb") as file:
                    status = os.fstat(file.fileno())
                    stamp = status.st_size, status.st_mtime_ns
                    if not status.st_size:
                        raise GGUFError(
                            f"{self.path}: the file is empty; download it again"
                        )
                    if self._stamp is not None and self._stamp != stamp:
                        raise self.changed()
                    view = mmap.mmap(file.fileno(), stamp[0], access=mmap.ACCESS_READ)
            except OSError as error:
                raise GGUFError(
                    f"{self.path}: cannot read the file: {error.strerror or error}"
                ) from error
            self._map, self._stamp = view, stamp
        return self._map

    def changed(self) -> GGUFError:
        return GGUFError(
            f"{self.path}: the file changed after its header was read; load it again"
        )

    def release(self) -> None:
        """Drop the map; memoryviews handed out keep it alive until they die."""
        self._map = None


class LazyArray:
    """A long metadata array whose elements stay in the file until `decode`."""

    __slots__ = ("_count", "_end", "_file", "_key", "_start", "_type_id")

    def __init__(
        self, file: MappedFile, key: str, type_id: int, count: int, span: range
    ) -> None:
        self._file = file
        self._key = key
        self._type_id = type_id
        self._count = count
        self._start, self._end = span.start, span.stop

    @property
    def type(self) -> str:
        """GGUF name of the element type, such as "string" or "i32"."""
        return _VALUE_TYPES[self._type_id][0]

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"LazyArray({self._key!r}, {self.type}[{self._count}])"

    def decode(self) -> list[Any]:
        """The elements: str, int, float or bool.

        Raises:
            GGUFError: a string is not UTF-8 (its index is named), or the file
                changed after its header was read.
        """
        buf = self._file.map()
        if self._type_id != _STRING:
            layout = struct.Struct(f"<{self._count}{_VALUE_TYPES[self._type_id][1]}")
            return list(layout.unpack_from(buf, self._start))
        return self._decode_strings(buf)

    def _decode_strings(self, buf: mmap.mmap) -> list[str]:
        length_at = _U64.unpack_from
        pos, end = self._start, self._end
        strings: list[str] = []
        append = strings.append
        try:
            for _ in range(self._count):
                text = pos + 8
                pos = text + length_at(buf, pos)[0]
                if pos > end:
                    raise self._file.changed()
                append(buf[text:pos].decode())
        except UnicodeDecodeError as error:
            raise GGUFError(
                f"{self._file.path}: element {len(strings)} of {self._key!r} is not "
                f"UTF-8: {error.object[:32]!r}; convert the model again"
            ) from error
        except struct.error as error:
            raise self._file.changed() from error
        return strings


@dataclass(frozen=True, slots=True)
class Header:
    """What one file says about itself; `kinds` describes the type of each value."""

    metadata: dict[str, Any]
    kinds: dict[str, str]
    tensors: dict[str, TensorInfo]


class _Cursor:
    """A position in the header that never leaves the file."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.buf = file.map()
        self.end = file.size
        self.pos = 0
        self.elements = 0

    def error(self, text: str) -> GGUFError:
        return GGUFError(f"{self.file.path}: {text}")

    def need(self, nbytes: int, what: str) -> None:
        if nbytes > self.end - self.pos:
            raise self.error(
                f"the header is truncated or damaged: {what} needs {nbytes} bytes at "
                f"byte {self.pos}, but the file ends at {self.end}; download it again"
            )

    def scalar(self, layout: struct.Struct, what: str) -> Any:
        self.need(layout.size, what)
        value = layout.unpack_from(self.buf, self.pos)[0]
        self.pos += layout.size
        return value

    def u32(self, what: str) -> int:
        value: int = self.scalar(_U32, what)
        return value

    def u64(self, what: str) -> int:
        value: int = self.scalar(_U64, what)
        return value

    def count(self, what: str, min_bytes: int, ceiling: int) -> int:
        value = self.u64(f"the {what} count")
        if value > (self.end - self.pos) // min_bytes:
            raise self.error(
                f"the {what} count is {value}, more than the file's {self.end} bytes "
                "can hold; the file is truncated or damaged, download it again"
            )
        if value > ceiling:
            raise self.error(
                f"the {what} count is {value}, above this reader's limit of {ceiling}; "
                "the file is damaged"
            )
        return value

    def string(self, what: str, ceiling: int = MAX_VALUE_BYTES) -> bytes:
        length = self.u64(f"the length of {what}")
        self.need(length, what)
        if length > ceiling:
            raise self.error(
                f"{what} is {length} bytes long, above this reader's limit of "
                f"{ceiling}; the file is damaged"
            )
        value = self.buf[self.pos : self.pos + length]
        self.pos += length
        return value

    def name(self, what: str) -> str:
        raw = self.string(what, MAX_NAME_BYTES)
        if not raw:
            raise self.error(f"{what} is empty; the file is damaged")
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(
                f"{what} is not UTF-8: {raw[:32]!r}; the file is damaged"
            ) from error

    def array(self, key: str) -> LazyArray:
        what = f"the array {key!r}"
        type_id = self.u32(f"the element type of {what}")
        if type_id == _ARRAY:
            raise self.error(
                f"{what} holds arrays, which no known model needs; expected scalars "
                "or strings, convert the model with a current llama.cpp"
            )
        if type_id >= len(_VALUE_TYPES):
            raise self.error(f"{what} has {_unknown_value_type(type_id)}")
        fixed = None if type_id == _STRING else _SCALARS[type_id].size
        count = self.count(f"element (of {what})", fixed or 8, MAX_ARRAY_ELEMENTS)
        self.elements += count
        if self.elements > MAX_ARRAY_ELEMENTS:
            raise self.error(
                f"the arrays up to {key!r} have {self.elements} elements, above this "
                f"reader's limit of {MAX_ARRAY_ELEMENTS}; the file is damaged"
            )
        start = self.pos
        if fixed:
            self.pos += count * fixed
        else:
            self._skip_strings(count, what)
        if self.pos - start > MAX_VALUE_BYTES:
            raise self.error(
                f"{what} takes {self.pos - start} bytes, above this reader's limit of "
                f"{MAX_VALUE_BYTES}; the file is damaged"
            )
        return LazyArray(self.file, key, type_id, count, range(start, self.pos))

    def _skip_strings(self, count: int, what: str) -> None:
        # One step per token and merge: locals, and no call but the unpack.
        length_at, buf, pos, last = _U64.unpack_from, self.buf, self.pos, self.end - 8
        for index in range(count):
            if pos > last:
                raise self._overrun(what, index, count, pos)
            pos += 8 + length_at(buf, pos)[0]
        if pos > self.end:
            raise self._overrun(what, count, count, pos)
        self.pos = pos

    def _overrun(self, what: str, done: int, count: int, pos: int) -> GGUFError:
        return self.error(
            f"the header is truncated or damaged: {what} should have {count} strings, "
            f"but the first {done} end at byte {pos} and the file at {self.end}; "
            "download it again"
        )

    def value(self, key: str) -> tuple[Any, str]:
        """The value of `key` and a description of its type."""
        type_id = self.u32(f"the value type of {key!r}")
        if type_id == _STRING:
            text = self.string(f"the value of {key!r}")
            return text.decode(errors="replace"), "string"
        if type_id == _ARRAY:
            array = self.array(key)
            kind = f"array of {len(array)} {array.type}"
            return (array if len(array) > LAZY_ABOVE else array.decode()), kind
        if type_id not in _SCALARS:
            raise self.error(f"{key!r} has {_unknown_value_type(type_id)}")
        value = self.scalar(_SCALARS[type_id], f"the value of {key!r}")
        return value, _VALUE_TYPES[type_id][0]

    def tensor(self, index: int) -> TensorInfo:
        """The next tensor; its offset still counts from the data section."""
        name = self.name(f"the name of tensor {index}")
        what = f"tensor {name!r}"
        n_dims = self.u32(f"the dimension count of {what}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise self.error(
                f"{what} has {n_dims} dimensions, expected 1 to {MAX_DIMS}; the file "
                "is damaged"
            )
        dims = tuple(self.u64(f"the dimensions of {what}") for _ in range(n_dims))
        self._check_dims(what, dims)
        type_id = self.u32(f"the type of {what}")
        try:
            kind = ggml_type(type_id)
            nbytes = kind.row_bytes(dims[0]) * math.prod(dims[1:])
        except GGUFError as error:
            raise self.error(f"{what}: {error}") from error
        offset = self.u64(f"the offset of {what}")
        return TensorInfo(name, dims, kind, 0, offset, nbytes)

    def _check_dims(self, what: str, dims: tuple[int, ...]) -> None:
        for dim in dims:
            if dim == 0 or dim > _I64_MAX:
                found = "zero" if dim == 0 else f"negative ({dim - (1 << 64)})"
                raise self.error(
                    f"{what} has a {found} dimension in {list(dims)}, expected "
                    "positive sizes; the file is damaged"
                )
        # No type needs more than 8 bytes an element.
        if math.prod(dims) > _I64_MAX // 8:
            raise self.error(
                f"{what} has dimensions {list(dims)}, whose product overflows 64 bits; "
                "the file is damaged"
            )


def _unknown_value_type(type_id: int) -> str:
    return (
        f"the unknown value type {type_id}, expected 0 to {len(_VALUE_TYPES) - 1}; the "
        "file is damaged, or newer than this reader"
    )


def parse_header(file: MappedFile) -> Header:
    """Parse and check everything that the header of one file says.

    The tensors' `shard` is 0.

    Raises:
        GGUFError: anything wrong with the header, or a tensor that does not lie
            whole, aligned and alone in the file's data section.
    """
    cursor = _Cursor(file)
    _check_magic(cursor)
    tensor_count = cursor.count("tensor", _MIN_TENSOR_BYTES, MAX_TENSORS)
    key_count = cursor.count("metadata key", _MIN_KEY_BYTES, MAX_KEYS)
    metadata: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    for index in range(key_count):
        key = cursor.name(f"the name of metadata key {index}")
        if key in metadata:
            raise cursor.error(f"the key {key!r} is there twice; the file is damaged")
        metadata[key], kinds[key] = cursor.value(key)
    found: dict[str, TensorInfo] = {}
    for index in range(tensor_count):
        info = cursor.tensor(index)
        if info.name in found:
            raise cursor.error(
                f"tensor {info.name!r} is there twice; the file is damaged"
            )
        found[info.name] = info
    alignment = _alignment(cursor, metadata.get("general.alignment"))
    start = -(-cursor.pos // alignment) * alignment
    tensors = {
        name: replace(info, offset=start + info.offset) for name, info in found.items()
    }
    _check_layout(cursor, list(tensors.values()), alignment)
    return Header(metadata, kinds, tensors)


def _alignment(cursor: _Cursor, value: Any) -> int:
    if value is None:
        return DEFAULT_ALIGNMENT
    valid = isinstance(value, int) and value >= 8 and value & (value - 1) == 0
    if not valid:
        raise cursor.error(
            f"general.alignment is {value!r}, expected a power of two of at least 8; "
            "the file is damaged"
        )
    return int(value)


def _check_layout(cursor: _Cursor, tensors: list[TensorInfo], alignment: int) -> None:
    tensors.sort(key=lambda info: info.offset)
    previous: TensorInfo | None = None
    for info in tensors:
        what = f"tensor {info.name!r}"
        if info.offset % alignment:
            raise cursor.error(
                f"{what} starts at byte {info.offset}, which is not a multiple of the "
                f"alignment {alignment}; the file is damaged"
            )
        if previous and info.offset < previous.offset + previous.nbytes:
            raise cursor.error(
                f"{what} starts at byte {info.offset}, inside tensor "
                f"{previous.name!r} that ends at {previous.offset + previous.nbytes}; "
                "the file is damaged"
            )
        if info.offset + info.nbytes > cursor.end:
            where = "offset lies beyond" if info.offset >= cursor.end else "is cut by"
            raise cursor.error(
                f"{what} ({info.nbytes} bytes from byte {info.offset}) {where} the "
                f"end of the file at {cursor.end}; the file is truncated or damaged, "
                "download it again"
            )
        previous = info


def _check_magic(cursor: _Cursor) -> None:
    head = cursor.buf[:64]
    if head[:4] != b"GGUF":
        raise cursor.error(
            f"not a GGUF file: it starts with {head[:16]!r}, expected b'GGUF'; "
            f"{_hint(head)}"
        )
    cursor.pos = 4
    version = cursor.u32("the version")
    if version == 3:
        return
    if version & 0xFFFF == 0 and version:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        raise cursor.error(
            f"a big-endian GGUF (version {swapped}), expected little-endian version "
            "3; convert the model for a little-endian host"
        )
    advice = (
        "convert the model again with a current llama.cpp"
        if version < 3
        else "the file is damaged, or newer than this reader"
    )
    raise cursor.error(f"GGUF version {version}, expected version 3; {advice}")


def _hint(head: bytes) -> str:
    """What a file with these first bytes probably is, and what to do."""
    if head.startswith(b"version https://git-lfs"):
        return "this is a Git LFS pointer, fetch the content with `git lfs pull`"
    if head.startswith(b"PK\x03\x04"):
        return "this is a zip archive or a PyTorch checkpoint, name the .gguf file"
    if head[8:9] == b"{":
        return "this looks like safetensors, serve its directory without GGUF"
    if head.lstrip()[:1] == b"<":
        return "this is a web page, check the download's address and log-in"
    if head[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg"):
        return "this is a GGML file from before GGUF, convert the model again"
    if not head.strip(b"\0"):
        return "its start is all zeros, so the download is incomplete"
    return "name a .gguf file made by llama.cpp"
