# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Reads edit files. They are data: nothing in them is ever run."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import UnionType
from typing import get_args, get_type_hints

from vfork import spec
from vfork.errors import EditRef, VforkError
from vfork.ops import check_edit
from vfork.source import is_docstring

EDITS_DIR = "edits"
VENDORED = ("third_party", "vllm_flash_attn")
GENERATED = ("vllm/_version.py",)
FORWARDED = re.compile(r"https://\S+|(no|not-needed): \S.*", re.DOTALL)
ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

CONSTRUCTORS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *get_args(spec.Anchor),
        *get_args(spec.Op),
        spec.Edit,
        spec.EditFile,
    )
}


@dataclass(frozen=True)
class LoadedEditFile:
    """An edit file and the upstream file it edits, such as `vllm/envs.py`."""

    target: str
    path: Path
    file: spec.EditFile

    def ref(self, edit: spec.Edit) -> EditRef:
        return EditRef(edit.id, f"{EDITS_DIR}/{self.target}")


def load_edits(root: Path) -> tuple[LoadedEditFile, ...]:
    """All edit files below `root/edits`, sorted by target and checked.

    Owner tests are left to `owner_test_errors`: a build does not need them.
    Raises VF101 to VF112, but not VF105.
    """
    folder = root / EDITS_DIR
    paths = sorted(folder.rglob("*.py"), key=lambda path: path.as_posix())
    loaded = tuple(_load(root, path) for path in paths)
    seen: dict[str, str] = {}
    for file in loaded:
        for edit in file.file.edits:
            ref = file.ref(edit)
            if edit.id in seen:
                raise VforkError(
                    "VF106",
                    f"edit id {edit.id!r} is used in {seen[edit.id]}, too",
                    edit=ref,
                    hint="ids are unique over all edit files",
                )
            seen[edit.id] = ref.file
    return loaded


def owner_test_errors(
    root: Path, loaded: tuple[LoadedEditFile, ...]
) -> list[VforkError]:
    """VF105 for each edit whose owner test is not there."""
    errors = []
    for file in loaded:
        for edit in file.file.edits:
            missing = _missing_test(root, edit.test)
            if missing:
                errors.append(
                    VforkError(
                        "VF105",
                        f"owner test {missing} does not exist",
                        edit=file.ref(edit),
                        hint="write a test that fails without the edit, and name it",
                    )
                )
    return errors


def _missing_test(root: Path, test: str) -> str:
    name, _, function = test.partition("::")
    if not (root / name).is_file():
        return name
    wanted = function.split("[")[0].rpartition("::")[2]
    found = not wanted or f"def {wanted}(" in (root / name).read_text("utf-8")
    return "" if found else test


def applies(edit: spec.Edit, base: str, version: str) -> bool:
    """Whether an edit is meant for a base at a version."""
    return base in edit.bases and spec.release_matches(edit.releases, version)


def _load(root: Path, path: Path) -> LoadedEditFile:
    target = path.relative_to(root / EDITS_DIR).as_posix()
    name = f"{EDITS_DIR}/{target}"
    parts = PurePosixPath(target).parts
    if target in GENERATED or any(part in VENDORED for part in parts):
        raise VforkError(
            "VF107",
            f"{name}: {target} is vendored or generated",
            hint="such files are replaced at every release; change their user instead",
        )
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as err:
        raise VforkError("VF101", f"{name} cannot be read as Python: {err}") from err
    file = _Reader(name, tree).file()
    loaded = LoadedEditFile(target, path, file)
    for edit in file.edits:
        with blame(loaded.ref(edit)):
            _check(edit)
    return loaded


@contextmanager
def blame(ref: EditRef) -> Iterator[None]:
    """Says in errors from inside which edit they are about."""
    try:
        yield
    except VforkError as err:
        err.edit = err.edit or ref
        raise


class _Reader:
    """Builds the declaration of an edit file from its syntax tree."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        self.name = name
        self.body = (
            tree.body[1:] if tree.body and is_docstring(tree.body[0]) else (tree.body)
        )

    def file(self) -> spec.EditFile:
        *imports, last = self.body or [ast.Pass(lineno=1)]
        for stmt in imports:
            if not (
                isinstance(stmt, ast.ImportFrom)
                and (stmt.module, stmt.level) == ("vfork.spec", 0)
                and all(alias.asname is None for alias in stmt.names)
            ):
                raise self._error("VF102", stmt, "only imports from vfork.spec may be")
        if not (
            isinstance(last, ast.Assign)
            and len(last.targets) == 1
            and isinstance(last.targets[0], ast.Name)
            and last.targets[0].id == "FILE"
        ):
            raise self._error("VF102", last, "expected FILE = EditFile(...)")
        value = self._value(last.value)
        if not isinstance(value, spec.EditFile):
            raise self._error("VF102", last, "FILE must be an EditFile")
        return value

    def _value(self, node: ast.expr) -> object:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.Tuple):
            return tuple(self._value(element) for element in node.elts)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            kind = CONSTRUCTORS.get(node.func.id)
            if kind is not None:
                return self._construct(kind, node)
        raise self._error(
            "VF102",
            node,
            f"`{ast.unparse(node)[:60]}` is not a string, a tuple or a constructor "
            "of vfork.spec",
        )

    def _construct(self, kind: type, node: ast.Call) -> object:
        hints = get_type_hints(kind)
        fields = [field.name for field in dataclasses.fields(kind)]
        if len(node.args) > len(fields):
            raise self._error("VF103", node, f"{kind.__name__} takes {fields}")
        given = dict(zip(fields, map(self._value, node.args), strict=False))
        for keyword in node.keywords:
            if keyword.arg not in fields or keyword.arg in given:
                raise self._error(
                    "VF103",
                    node,
                    f"{kind.__name__} has no argument {keyword.arg!r}, or it is given "
                    f"twice; it takes {', '.join(fields) or 'none'}",
                )
            given[keyword.arg] = self._value(keyword.value)
        for name, value in given.items():
            if not _fits(value, hints[name]):
                raise self._error(
                    "VF103",
                    node,
                    f"{kind.__name__}({name}=...) does not take a "
                    f"{type(value).__name__}",
                )
        try:
            return kind(**given)
        except TypeError as err:
            raise self._error("VF103", node, f"{kind.__name__}: {err}") from err

    def _error(self, code: str, node: ast.stmt | ast.expr, why: str) -> VforkError:
        return VforkError(
            code,
            f"{self.name}, line {node.lineno}: {why}",
            hint="see the docstring of vfork/spec.py for what an edit file may hold",
        )


def _fits(value: object, hint: object) -> bool:
    if isinstance(hint, UnionType):
        return isinstance(value, get_args(hint))
    if isinstance(hint, type) and not get_args(hint):
        return isinstance(value, hint)
    (element, _) = get_args(hint)
    return isinstance(value, tuple) and all(isinstance(v, element) for v in value)


def _check(edit: spec.Edit) -> None:
    if not ID.fullmatch(edit.id):
        raise VforkError(
            "VF103", f"id {edit.id!r} is not lower-case words joined by hyphens"
        )
    for name in ("why", "drop_when", "test"):
        if not getattr(edit, name).strip():
            raise VforkError("VF104", f"{name} is empty", hint="say it in a sentence")
    if not FORWARDED.fullmatch(edit.forwarded):
        raise VforkError(
            "VF104",
            f"forwarded is {edit.forwarded!r}",
            hint="expected a https URL, `no: reason` or `not-needed: reason`",
        )
    _check_scope(edit)
    check_edit(edit)


def _check_scope(edit: spec.Edit) -> None:
    if not edit.bases or not set(edit.bases) <= set(spec.BASES):
        raise VforkError(
            "VF111", f"bases is {edit.bases}, expected some of {spec.BASES}"
        )
    try:
        spec.release_matches(edit.releases, "0")
    except ValueError as err:
        raise VforkError("VF111", f"releases {edit.releases!r}: {err}") from err
