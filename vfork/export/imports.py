# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Modules that get other names upstream, and the order of their imports there."""

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from vfork.errors import VforkError
from vfork.source import blocks

COLUMNS = 88

Import = ast.Import | ast.ImportFrom


def module_name(path: str) -> str | None:
    """`a/b.py` is `a.b`, `a/__init__.py` is `a`; other files are no modules."""
    pure = PurePosixPath(path)
    if pure.suffix != ".py":
        return None
    parts = pure.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def rename_modules(path: str, text: str, renames: Mapping[str, str]) -> str:
    """A source with other module names, in imports and wherever they are written out.

    Raises VforkError VF705 for `from package import a, b` if a and b part ways.
    """
    if not renames:
        return text
    text = _rename_members(path, text, renames)
    for dotted in (True, False):
        words = [name for name in renames if ("." in name) is dotted]
        words.sort(key=len, reverse=True)
        names = "|".join(map(re.escape, words))
        # A name without a dot may be anything, unless it is imported.
        start = r"(?<![\w./])()" if dotted else r"(?m)^(\s*(?:from|import) )"
        if words:
            text = re.sub(
                rf"{start}({names})(?!\w)", lambda m: m[1] + renames[m[2]], text
            )
    return text


def _rename_members(path: str, text: str, renames: Mapping[str, str]) -> str:
    """Rewrites `from package import module` where the module alone is renamed, and
    `import module` where it gets a package."""
    lines = text.splitlines(keepends=True)
    for node in sorted(_imports(ast.parse(text)), key=lambda n: -n.lineno):
        if isinstance(node, ast.Import):
            (name,) = node.names if len(node.names) == 1 else (ast.alias(""),)
            home, _, new = renames.get(name.name, "").rpartition(".")
            if "." not in name.name and home:
                indent = " " * node.col_offset
                line = f"{indent}from {home} import {_alias(new, name)}\n"
                lines[node.lineno - 1] = line
            continue
        if node.level:
            continue
        moved = {
            name.name: renames[f"{node.module}.{name.name}"]
            for name in node.names
            if renames.get(f"{node.module}.{name.name}", "") != ""
        }
        if not moved:
            continue
        homes = {new.rpartition(".")[0] for new in moved.values()}
        if len(homes) > 1 or len(moved) != len(node.names):
            raise VforkError(
                "VF705",
                f"{path}:{node.lineno} imports {', '.join(moved)} with names that "
                "have another home upstream",
                hint="import them in statements of their own",
            )
        names = [_alias(moved[n.name].rpartition(".")[2], n) for n in node.names]
        indent = " " * node.col_offset
        line = f"{indent}from {homes.pop()} import {', '.join(names)}\n"
        assert node.end_lineno is not None
        lines[node.lineno - 1 : node.end_lineno] = [line]
    return "".join(lines)


def _alias(new: str, name: ast.alias) -> str:
    used = name.asname or name.name
    return new if new == used else f"{new} as {used}"


def _imports(tree: ast.Module) -> Iterator[Import]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom))


def sort_imports(text: str, first_party: Sequence[str]) -> str:
    """Brings each run of imports into isort's order: sections by origin, in them
    modules before names. Runs with comments in them stay as they are."""
    lines = text.splitlines(keepends=True)
    runs = [*_runs(ast.parse(text).body)]
    for run in sorted(runs, key=lambda run: -run[0].lineno):
        start, end = run[0].lineno - 1, run[-1].end_lineno
        assert end is not None
        whole = lines[start:end]
        if any("#" in line for line in whole) or _shares_lines(run, lines):
            continue
        lines[start:end] = _sorted_run(run, lines, first_party)
    return "".join(lines)


def _runs(block: Sequence[ast.stmt]) -> Iterator[list[Import]]:
    run: list[Import] = []
    for stmt in block:
        if isinstance(stmt, ast.Import | ast.ImportFrom):
            run.append(stmt)
            continue
        if run:
            yield run
            run = []
        for inner in blocks(stmt):
            yield from _runs(inner)
    if run:
        yield run


def _shares_lines(run: Sequence[Import], lines: Sequence[str]) -> bool:
    """Whether a statement has something else on its lines, such as `;`."""
    return any(
        lines[node.lineno - 1][: node.col_offset].strip()
        or lines[(node.end_lineno or 0) - 1].encode()[node.end_col_offset :].strip()
        for node in run
    )


def _sorted_run(
    run: Sequence[Import], lines: Sequence[str], first_party: Sequence[str]
) -> list[str]:
    found = [(import_key(node, first_party), _text(node, lines)) for node in run]
    found.sort(key=lambda item: item[0])
    result: list[str] = []
    section = found[0][0][0]
    for key, text in found:
        if key[0] != section:
            result.append("\n")
            section = key[0]
        result.append(text)
    return result


def import_key(
    node: Import, first_party: Sequence[str]
) -> tuple[int, bool, list[tuple[str, int]]]:
    """Where isort puts an import: its section, modules before names, natural order."""
    plain = isinstance(node, ast.Import)
    name = node.names[0].name if isinstance(node, ast.Import) else node.module or ""
    top = name.partition(".")[0]
    if isinstance(node, ast.ImportFrom) and node.level:
        section = 4
    elif top == "__future__":
        section = 0
    elif top in sys.stdlib_module_names:
        section = 1
    else:
        section = 3 if top in first_party else 2
    parts = re.findall(r"(\D*)(\d*)", name.lower())
    return section, not plain, [(text, int(digits or -1)) for text, digits in parts]


def _text(node: Import, lines: Sequence[str]) -> str:
    assert node.end_lineno is not None
    text = "".join(lines[node.lineno - 1 : node.end_lineno])
    if isinstance(node, ast.Import) or text.count("\n") > 1:
        return text
    if len(text.rstrip("\n")) <= COLUMNS:
        return text
    indent = " " * node.col_offset
    names = [n.name + (f" as {n.asname}" if n.asname else "") for n in node.names]
    inner = "".join(f"{indent}    {name},\n" for name in names)
    return f"{indent}from {node.module} import (\n{inner}{indent})\n"
