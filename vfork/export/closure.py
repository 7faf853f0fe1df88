# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Finds what an exported file uses of the checkout that upstream would not have."""

import ast
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from vfork.errors import VforkError
from vfork.export.imports import module_name
from vfork.export.topics import files_below

# Folders of the checkout from which something can be imported.
FOLDERS = ("vllm/", "tests/", "vfork/", "benchmarks/", "examples/", "tools/")
_DOTTED = re.compile(r"(?<![\w./])[a-z_]\w*(?:\.\w+)+")


def checkout_modules(root: Path) -> dict[str, str]:
    """Module name -> path, for every Python file that could be imported."""
    return {
        name: path
        for folder in FOLDERS
        for path in files_below(root, folder)
        for name in module_names(path)
    }


def module_names(path: str) -> list[str]:
    """The names by which a file of the checkout is imported, if any.

    The tests put `examples/` on the path.
    """
    name = module_name(path)
    if name is None:
        return []
    short = name.removeprefix("examples.")
    return [name] if short == name else [name, short]


def lacking(
    topic: str, path: str, used: Iterable[str], modules: dict[str, str], has: set[str]
) -> list[VforkError]:
    """VF705 for each module in `used` that is a file of the checkout and not in `has`,
    the files that upstream has once the topic is applied."""
    wanted = {file for name in used for file in _files(name, modules)}
    return [
        VforkError(
            "VF705",
            f"{path} uses {file}, which topic {topic} neither brings nor needs",
            hint="add the file to the topic, name the topic that brings it in `needs`, "
            "or write a stand-in",
        )
        for file in sorted(wanted - has)
    ]


def _files(name: str, modules: dict[str, str]) -> Iterator[str]:
    """The file of the longest module that a dotted name begins with, and its
    packages."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in modules:
            break
    else:
        return
    for stop in range(1, end + 1):
        file = modules.get(".".join(parts[:stop]))
        if file:
            yield file


def used_by_source(path: str, text: str) -> Iterator[str]:
    """Dotted names that a source imports, or holds as a string of their own."""
    package = (module_name(path) or "").split(".")
    if not path.endswith("/__init__.py"):
        package = package[:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            home = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{home}.{name.name}" for name in node.names)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and _DOTTED.fullmatch(node.value)
        ):
            yield node.value


def used_by_edit(text: str) -> Collection[str]:
    """Dotted names in what an edit inserts.

    An import counts with the name that it takes from its module.
    """
    taken = re.findall(r"from ([\w.]+) import (\w+)", text)
    return {*_DOTTED.findall(text), *(f"{home}.{name}" for home, name in taken)}


def undefined(
    path: str, text: str, stand_in: str, stand_in_text: str, names: Collection[str]
) -> Iterator[VforkError]:
    """VF705 for what a source takes from a module, known as one of `names`, that its
    stand-in does not define."""
    defined = {
        target.id if isinstance(target, ast.Name) else getattr(target, "name", "")
        for stmt in ast.parse(stand_in_text).body
        for target in (stmt.targets if isinstance(stmt, ast.Assign) else [stmt])
    }
    tree = ast.parse(text)
    taken: set[str] = set()
    aliases: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.module in names:
                taken.update(name.name for name in node.names)
            aliases.update(
                name.asname or name.name
                for name in node.names
                if f"{node.module}.{name.name}" in names
            )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            taken |= {node.attr} if node.value.id in aliases else set()
    for name in sorted(taken - defined):
        yield VforkError(
            "VF705",
            f"{path} uses {name}, which {stand_in} does not define",
            hint="a stand-in has the names of the file that it replaces",
        )
