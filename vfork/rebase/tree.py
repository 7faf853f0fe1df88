# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Releases as Python files by path; equal contents are read and parsed only once."""

import ast
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vfork.edits import VENDORED
from vfork.errors import VforkError
from vfork.overlay import PACKAGE
from vfork.release import Release
from vfork.source import Source, parse_quietly

_SCHEMA = re.compile(rb"([A-Za-z_]\w*)(?:\.\w+)?\([\s -~]*\) -> [ -~]+$")
_LONGEST = 4000
_WORD = re.compile(rb"[A-Za-z_]\w*")


class Blob:
    """The content of a Python file. `path` is where it was seen first."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        self.data = data

    @cached_property
    def module(self) -> ast.Module | None:
        """The syntax tree, None if this Python cannot read the file."""
        try:
            return parse_quietly(self.data)
        except (SyntaxError, ValueError):
            return None

    @cached_property
    def source(self) -> Source:
        """As for edits. Raises VforkError VF202."""
        return Source.parse(self.path, self.data)

    @cached_property
    def words(self) -> frozenset[bytes]:
        """All identifiers, those in strings and comments included."""
        return frozenset(_WORD.findall(self.data))


class Store:
    """Contents by hash, shared by all trees, and notes about their syntax nodes."""

    def __init__(self) -> None:
        self._blobs: dict[str, Blob] = {}
        self.memo: dict[Any, Any] = {}

    def blob(self, path: str, data: bytes) -> Blob:
        digest = hashlib.sha256(data).hexdigest()
        return self._blobs.setdefault(digest, Blob(path, data))

    def release_blob(self, path: str, release: Release) -> Blob:
        """A member of a release, not read again if its content is known."""
        # RECORD has the same digest in base64; both forms lead to one blob.
        key = release.record_of(path).digest
        if key not in self._blobs:
            self._blobs[key] = self.blob(path, release.read(path))
        return self._blobs[key]


@dataclass(frozen=True, eq=False)
class Tree:
    """The Python files of a release, with whatever was laid over them.

    `compiled` has the dotted names of its compiled modules, which lie in `wheel`;
    `overlay` the paths that are not the release's own.
    """

    label: str
    store: Store
    blobs: Mapping[str, Blob]
    compiled: frozenset[str] = frozenset()
    overlay: frozenset[str] = frozenset()
    wheel: Path | None = None

    @staticmethod
    def of_release(release: Release, label: str, store: Store) -> "Tree":
        """The files under `vllm/`. Raises VforkError VF203 or VF405."""
        return Tree(
            label,
            store,
            {
                name: store.release_blob(name, release)
                for name in release.names()
                if name.startswith(f"{PACKAGE}/") and name.endswith(".py")
            },
            frozenset(
                name.split(".", 1)[0].replace("/", ".")
                for name in release.names()
                if name.startswith(f"{PACKAGE}/") and name.endswith(".so")
            ),
            wheel=release.path,
        )

    @staticmethod
    def of_files(label: str, files: Mapping[str, bytes], store: Store) -> "Tree":
        blobs = {path: store.blob(path, data) for path, data in files.items()}
        return Tree(label, store, blobs)

    def laid_over(
        self, edited: Mapping[str, bytes], overlay: Mapping[str, bytes]
    ) -> "Tree":
        """This tree with edited files in place of its own, and new ones."""
        files = {
            path: self.store.blob(path, data)
            for path, data in {**edited, **overlay}.items()
        }
        return Tree(
            self.label,
            self.store,
            {**self.blobs, **files},
            self.compiled,
            frozenset(overlay),
            self.wheel,
        )

    @cached_property
    def packages(self) -> frozenset[str]:
        """Dotted names of all directories that hold files, at whatever depth."""
        found: set[str] = set()
        for path in self.blobs:
            parent = path.rpartition("/")[0].replace("/", ".")
            while parent and parent not in found:
                found.add(parent)
                parent = parent.rpartition(".")[0]
        return frozenset(found)

    def __contains__(self, path: object) -> bool:
        return path in self.blobs

    def source(self, path: str) -> Source:
        """A file by path. Raises VforkError VF201 or VF202."""
        if path not in self.blobs:
            raise VforkError("VF201", f"{path} is not in {self.label}")
        source = self.blobs[path].source
        if source.name == path:
            return source
        return Source(path, source.data, source.tree)

    def module_path(self, module: str) -> str | None:
        """The file of a dotted module name."""
        stem = module.replace(".", "/")
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if path in self.blobs:
                return path
        return None

    def schemas(self, operation: str) -> tuple[str, ...]:
        """How the compiled modules declare an operation: `name(Tensor x) -> Tensor`.

        All of a wheel's are found at once, in some seconds, and kept.
        """
        if self.wheel is None:
            return ()
        key = ("schemas", self.wheel)
        if key not in self.store.memo:
            self.store.memo[key] = _schemas(self.wheel)
        known: dict[str, tuple[str, ...]] = self.store.memo[key]
        return known.get(operation, ())

    def mentioning(self, word: str) -> Iterator[str]:
        """Paths of files with an identifier, vendored trees left out."""
        wanted = word.encode()
        for path, blob in self.blobs.items():
            if wanted in blob.words and not is_vendored(path):
                yield path

    def defining(self, name: str) -> Iterator[str]:
        """Paths of files where a function or class of that name seems to be defined,
        vendored trees left out."""
        word = name.encode()
        for path in self.mentioning(name):
            data = self.blobs[path].data
            if any(start + word in data for start in (b"def ", b"class ")):
                yield path


def _schemas(wheel: Path) -> dict[str, tuple[str, ...]]:
    found: dict[str, set[str]] = {}
    with Release(wheel) as release:
        for name in release.names():
            if name.endswith(".so"):
                for text in _strings(release.read(name), b") -> "):
                    match = _SCHEMA.search(text)
                    if match:
                        texts = found.setdefault(match[1].decode(), set())
                        texts.add(match[0].decode())
    return {name: tuple(sorted(texts)) for name, texts in found.items()}


def _strings(data: bytes, part: bytes) -> Iterator[bytes]:
    """Zero-terminated strings of a binary that hold some bytes."""
    at = data.find(part)
    while at >= 0:
        start = data.rfind(b"\0", max(0, at - _LONGEST), at) + 1
        stop = data.find(b"\0", at, at + _LONGEST)
        if start and stop >= 0:
            yield data[start:stop]
        at = data.find(part, max(stop, at + 1))


def is_vendored(path: str) -> bool:
    return any(part in VENDORED for part in path.split("/"))


def module_name(path: str) -> str:
    """`vllm/a/__init__.py` -> `vllm.a`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
