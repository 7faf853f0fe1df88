# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Open a GGUF model of one file or of many shards.

`open_gguf` reads headers only and finds everything wrong with them before any
weight is read. docs/design/gguf_reader.md says what is checked and why.
"""

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self, TypeVar, overload

from vllm.transformers_utils.gguf.errors import GGUFError
from vllm.transformers_utils.gguf.header import (
    Header,
    LazyArray,
    MappedFile,
    TensorInfo,
    parse_header,
)

__all__ = ["GGUFError", "GGUFFile", "LazyArray", "TensorInfo", "open_gguf"]

T = TypeVar("T")
D = TypeVar("D")

_SHARD_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_MISSING: Final = object()


class GGUFFile:
    """The headers of all shards of one model, and the maps of their data.

    Attributes:
        paths: all shards in order.
        metadata: key -> value of the first shard, which holds the model's keys.
            Values are bool, int, float, str, list, or a LazyArray for arrays of
            more than 1,024 elements. In a scalar string, bytes that are not UTF-8
            become U+FFFD; in an array of strings they are an error.
        tensors: name -> TensorInfo over all shards, in file order.
        total_bytes: bytes of all tensors.

    `close` and leaving a `with` block release the maps. Memoryviews handed out
    stay valid; using the object again maps the files again.
    """

    def __init__(self, files: list[MappedFile], headers: list[Header]) -> None:
        self._files = files
        self._kinds = headers[0].kinds
        self.paths = tuple(file.path for file in files)
        self.metadata: Mapping[str, Any] = MappingProxyType(headers[0].metadata)
        self.tensors: dict[str, TensorInfo] = {}
        for header in headers:
            self.tensors.update(header.tensors)
        self.total_bytes = sum(info.nbytes for info in self.tensors.values())

    @overload
    def get(self, key: str, types: type[T] | tuple[type[T], ...]) -> T: ...
    @overload
    def get(
        self, key: str, types: type[T] | tuple[type[T], ...], default: D
    ) -> T | D: ...
    def get(self, key: str, types: Any, default: Any = _MISSING) -> Any:
        """The scalar `key` as one of `types` out of bool, int, float, str.

        A bool is no int here; an int is taken, and converted, where a float is
        expected. `default` is returned for an absent key only.

        Raises:
            GGUFError: the key is absent without a default, or of another type.
        """
        if key not in self.metadata:
            return self._absent(key, default)
        wanted = types if isinstance(types, tuple) else (types,)
        value = self.metadata[key]
        if type(value) in wanted:
            return value
        if float in wanted and type(value) is int:
            return float(value)
        raise self._wrong_type(key, " or ".join(kind.__name__ for kind in wanted))

    def array(self, key: str, default: Any = _MISSING) -> list[Any]:
        """The array `key`, decoded; errors as for `get`, plus LazyArray.decode's."""
        if key not in self.metadata:
            found: list[Any] = self._absent(key, default)
            return found
        value = self.metadata[key]
        if isinstance(value, LazyArray):
            return value.decode()
        if not isinstance(value, list):
            raise self._wrong_type(key, "array")
        return list(value)

    def _absent(self, key: str, default: Any) -> Any:
        if default is _MISSING:
            raise GGUFError(
                f"{self.paths[0]}: the metadata key {key!r} is missing; convert the "
                "model again with a current llama.cpp"
            )
        return default

    def _wrong_type(self, key: str, expected: str) -> GGUFError:
        shown = repr(self.metadata[key])[:64]
        return GGUFError(
            f"{self.paths[0]}: the metadata key {key!r} is {shown} (type "
            f"{self._kinds[key]}), expected {expected}; convert the model again with "
            "a current llama.cpp"
        )

    def data(self, info: TensorInfo) -> memoryview:
        """The `info.nbytes` bytes of one tensor: read-only, not copied."""
        view = memoryview(self._files[info.shard].map())
        return view[info.offset : info.offset + info.nbytes]

    def close(self) -> None:
        """Release the maps of all shards."""
        for file in self._files:
            file.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a GGUF model; any one shard names them all.

    Raises:
        GGUFError: a file is absent, unreadable or not a sound GGUF v3, or the
            shards do not make up one model.
    """
    given = Path(path)
    _check_is_file(given)
    given, match = _shard_name(given)
    file = MappedFile(given)
    header = parse_header(file)
    count = _split_key(header, given, "split.count")
    # llama.cpp's merge tool leaves a split.count of 0 in the merged file.
    total = max(count or 0, 1)
    if match is None:
        if total > 1:
            raise GGUFError(
                f"{given}: split.count is {total}, but the file name does not end in "
                f"-00001-of-{total:05d}.gguf or alike; give the shards their names back"
            )
        return _assemble([file], [header])
    number, named = int(match[1]), int(match[2])
    if named != total or not 1 <= number <= named:
        found = "absent" if count is None else count
        raise GGUFError(
            f"{given}: the file name says shard {number} of {named}, but split.count "
            f"is {found}; fetch the shards of one model, under their own names"
        )
    base = given.name[: match.start()]
    paths = [
        given.with_name(f"{base}-{i:05d}-of-{named:05d}.gguf")
        for i in range(1, named + 1)
    ]
    _check_present(paths)
    return _open_shards(paths, number - 1, file, header)


def _check_is_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise GGUFError(f"{path}: no such file; {_nearby(path.parent)}") from error
    except OSError as error:
        raise GGUFError(
            f"{path}: cannot read the file: {error.strerror or error}"
        ) from error
    if stat.S_ISDIR(mode):
        raise GGUFError(f"{path}: a directory, expected a .gguf file; {_nearby(path)}")
    if not stat.S_ISREG(mode):
        raise GGUFError(f"{path}: not a regular file, expected a .gguf file")


def _nearby(directory: Path) -> str:
    """Which .gguf files could be meant, as the end of an error message."""
    shown = 5
    found = sorted(
        str(file)
        for pattern in ("*.gguf", "*/*.gguf")
        for file in directory.glob(pattern)
    )
    if not found:
        return f"there are no .gguf files in {directory}"
    more = f" and {len(found) - shown} more" if len(found) > shown else ""
    return f"name one of {', '.join(found[:shown])}{more}"


def _shard_name(path: Path) -> tuple[Path, re.Match[str] | None]:
    """The match of a shard's name, looked for behind a symbolic link too."""
    match = _SHARD_NAME.search(path.name)
    if match is None and path.is_symlink():
        target = path.resolve()
        match = _SHARD_NAME.search(target.name)
        path = target if match else path
    return path, match


def _check_present(paths: list[Path]) -> None:
    shown = 3
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        more = f" and {len(missing) - shown} more" if len(missing) > shown else ""
        raise GGUFError(
            f"{paths[0].parent}: {len(missing)} of {len(paths)} shards missing: "
            f"{', '.join(missing[:shown])}{more}; fetch them into this directory"
        )


def _split_key(header: Header, path: Path, key: str) -> int | None:
    value = header.metadata.get(key)
    if value is not None and type(value) is not int:
        raise GGUFError(
            f"{path}: the metadata key {key!r} is of type {header.kinds[key]}, "
            "expected an integer; split the model again with llama.cpp"
        )
    return value


def _open_shards(
    paths: list[Path], known: int, file: MappedFile, header: Header
) -> GGUFFile:
    """Open all shards but number `known`, which is open, and check each."""
    files: list[MappedFile] = []
    headers: list[Header] = []
    for index, path in enumerate(paths):
        if index == known:
            files.append(file)
            headers.append(header)
        else:
            _check_is_file(path)
            files.append(MappedFile(path))
            headers.append(parse_header(files[-1]))
        if len(paths) > 1:
            _check_shard(headers, path, len(paths))
    return _assemble(files, headers)


def _check_shard(headers: list[Header], path: Path, total: int) -> None:
    """Check that the newest of `headers` is the shard that its name says."""
    header, index = headers[-1], len(headers) - 1
    for key, expected in (("split.count", total), ("split.no", index)):
        found = _split_key(header, path, key)
        if found != expected:
            raise GGUFError(
                f"{path}: {key} is {'absent' if found is None else found}, expected "
                f"{expected}; fetch the shards of one model, under their own names"
            )
    ours = header.metadata.get("general.architecture")
    first = headers[0].metadata.get("general.architecture")
    if ours not in (None, first):
        raise GGUFError(
            f"{path}: general.architecture is {ours!r}, but {first!r} in the first "
            "shard; fetch the shards of one model"
        )


def _assemble(files: list[MappedFile], headers: list[Header]) -> GGUFFile:
    """Number the tensors' shards and check the model as a whole."""
    home: dict[str, Path] = {}
    numbered: list[Header] = []
    for shard, (file, header) in enumerate(zip(files, headers, strict=True)):
        for name in header.tensors:
            if name in home:
                raise GGUFError(
                    f"{file.path}: tensor {name!r} is also in {home[name]}; fetch the "
                    "shards of one model"
                )
            home[name] = file.path
        tensors = {n: replace(t, shard=shard) for n, t in header.tensors.items()}
        numbered.append(replace(header, tensors=tensors))
    for file, header in zip(files, headers, strict=True):
        declared = _split_key(header, file.path, "split.tensors.count")
        if declared is None and len(files) > 1 and header is headers[0]:
            raise GGUFError(
                f"{file.path}: split.tensors.count is absent from the first of "
                f"{len(files)} shards; split the model again with llama.cpp"
            )
        if declared not in (None, len(home)):
            raise GGUFError(
                f"{file.path}: split.tensors.count is {declared}, but "
                f"{len(files)} shard(s) hold {len(home)} tensors; fetch the shards of "
                "one model again"
            )
    return GGUFFile(files, numbered)
