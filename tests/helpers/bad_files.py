# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""GLM-DSA files broken in one place each, and what the error must say.

All are made from one sound tiny file. Weights are holes: nothing may read them.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.helpers.gguf_contents import Contents, read_contents
from tests.helpers.gguf_writer import (
    RawValue,
    Tensor,
    Typed,
    write_gguf,
    write_shards,
)
from tiny_glm_dsa import TinySpec, write_tiny_glm_dsa

_STRING, _ARRAY, _I32 = 8, 9, 5
_QUERY = "blk.1.attn_q_b.weight"


@dataclass(frozen=True)
class BadFile:
    """`make` writes the file below a directory and returns what to serve; the error
    must contain each of `says`."""

    make: Callable[[Path, Contents], Path]
    says: tuple[str, ...]


def sound_contents(directory: Path) -> Contents:
    """Keys and tensors of a file that can be served, without the weights."""
    tiny = write_tiny_glm_dsa(directory / "sound.gguf", TinySpec(weight_type="Q8_0"))
    return read_contents(tiny[0], data=False)


def _write(directory: Path, contents: Contents, **options: Any) -> Path:
    tensors = list(contents.tensors.values())
    return write_gguf(directory / "bad.gguf", contents.metadata, tensors, **options)


def _with_key(key: str, value: Any) -> Callable[[Path, Contents], Path]:
    def make(directory: Path, sound: Contents) -> Path:
        return _write(directory, replace(sound, metadata=sound.metadata | {key: value}))

    return make


def _with_query(**changes: Any) -> Callable[[Path, Contents], Path]:
    return _with_tensor(_QUERY, **changes)


def _with_tensor(name: str, **changes: Any) -> Callable[[Path, Contents], Path]:
    def make(directory: Path, sound: Contents) -> Path:
        tensor = replace(sound.tensors[name], **changes)
        return _write(directory, replace(sound, tensors=sound.tensors | {name: tensor}))

    return make


def _bytes(data: bytes) -> Callable[[Path, Contents], Path]:
    def make(directory: Path, sound: Contents) -> Path:
        path = directory / "bad.gguf"
        path.write_bytes(data)
        return path

    return make


def _cut(keep: Callable[[int], int]) -> Callable[[Path, Contents], Path]:
    def make(directory: Path, sound: Contents) -> Path:
        path = _write(directory, sound)
        with path.open("r+b") as file:
            file.truncate(keep(path.stat().st_size))
        return path

    return make


def _old_version(directory: Path, sound: Contents) -> Path:
    return _write(directory, sound, version=1)


def _shards(
    directory: Path, sound: Contents, overrides: dict[int, dict[str, Any]] | None = None
) -> list[Path]:
    tensors = list(sound.tensors.values())
    groups = [tensors[:20], tensors[20:40], tensors[40:]]
    return write_shards(directory, "bad", sound.metadata, groups, overrides)


def _missing_shard(directory: Path, sound: Contents) -> Path:
    first, second, _ = _shards(directory, sound)
    second.unlink()
    return first


def _wrong_shard_count(directory: Path, sound: Contents) -> Path:
    return _shards(directory, sound, {0: {"split.count": Typed("u16", 4)}})[0]


def _duplicate_tensor(directory: Path, sound: Contents) -> Path:
    tensors = [*sound.tensors.values(), sound.tensors[_QUERY]]
    return write_gguf(directory / "bad.gguf", sound.metadata, tensors)


def _missing_tensor(directory: Path, sound: Contents) -> Path:
    tensors = {name: t for name, t in sound.tensors.items() if name != _QUERY}
    return _write(directory, replace(sound, tensors=tensors))


def _surplus_tensor(directory: Path, sound: Contents) -> Path:
    tensors = sound.tensors | {"blk.1.surplus": Tensor("blk.1.surplus")}
    return _write(directory, replace(sound, tensors=tensors))


def _transposed_k_b(directory: Path, sound: Contents) -> Path:
    name = "blk.1.attn_k_b.weight"
    nope, latent, heads = sound.tensors[name].dims
    return _with_tensor(name, dims=(latent, nope, heads))(directory, sound)


def _token_too_few(directory: Path, sound: Contents) -> Path:
    shorter = {
        key: Typed(value.kind, value.value[:-1])
        for key, value in sound.metadata.items()
        if key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type")
    }
    return _write(directory, replace(sound, metadata=sound.metadata | shorter))


def _directory(directory: Path, sound: Contents) -> Path:
    _write(directory, sound)
    return directory


def _nonexistent(directory: Path, sound: Contents) -> Path:
    return directory / "bad.gguf"


BAD_FILES = {
    "not-a-gguf": BadFile(_bytes(b"a text of some length"), ("not a GGUF file",)),
    "empty": BadFile(_bytes(b""), ("is empty",)),
    "version-1": BadFile(_old_version, ("GGUF version 1", "expected version 3")),
    "truncated-header": BadFile(_cut(lambda size: 6000), ("truncated",)),
    "truncated-data": BadFile(_cut(lambda size: size - 4096), ("end of the file",)),
    "missing-shard": BadFile(_missing_shard, ("bad-00002-of-00003.gguf", "missing")),
    "wrong-shard-count": BadFile(_wrong_shard_count, ("split.count is 4",)),
    "duplicate-tensor": BadFile(_duplicate_tensor, (_QUERY, "twice")),
    "missing-tensor": BadFile(_missing_tensor, (_QUERY, "is missing")),
    "surplus-tensor": BadFile(_surplus_tensor, ("blk.1.surplus",)),
    "unknown-type": BadFile(_with_query(type=139), (_QUERY, "139")),
    "huge-string": BadFile(
        _with_key("general.name", RawValue(_STRING, struct.pack("<Q", 1 << 63))),
        ("general.name", str(1 << 63)),
    ),
    "huge-array": BadFile(
        _with_key("x.y", RawValue(_ARRAY, struct.pack("<IQ", _I32, 1 << 40))),
        ("x.y", str(1 << 40)),
    ),
    "negative-dim": BadFile(_with_query(dims=(256, -64)), (_QUERY, "negative (-64)")),
    "zero-dim": BadFile(_with_query(dims=(256, 0)), (_QUERY, "zero")),
    "overflowing-dims": BadFile(
        _with_query(dims=(1 << 32, 1 << 32)), (_QUERY, "overflows")
    ),
    "offset-beyond-the-file": BadFile(
        _with_query(offset=1 << 40), (_QUERY, "beyond the end of the file")
    ),
    "misaligned-offset": BadFile(_with_query(offset=33), (_QUERY, "not a multiple")),
    "wrong-k_b-dims": BadFile(_transposed_k_b, ("blk.1.attn_k_b.weight", "expected")),
    "token-too-few": BadFile(_token_too_few, ("tokenizer.ggml.tokens 511", "rows 512")),
    "other-tokenizer": BadFile(
        _with_key("tokenizer.ggml.pre", "qwen2"), ("'qwen2'", "--tokenizer")
    ),
    "other-architecture": BadFile(
        _with_key("general.architecture", "llama"),
        ("'llama'", "pip install vllm-gguf-plugin"),
    ),
    "directory": BadFile(_directory, ("a directory", "name one of")),
    "nonexistent": BadFile(_nonexistent, ("no such file",)),
}
