# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Lays out what edits insert as upstream's linter and formatter want it.

In an edit file the same source stands deeper, and new imports go to the end of their
block. Lines that an edit does not insert never change.
"""

import ast
import difflib
from collections.abc import Iterator, Sequence

from vfork.export.imports import COLUMNS, import_key
from vfork.source import blocks, compile_quietly, dump, is_docstring

FIRST_PARTY = ("vllm", "tests")
LATE = "  # noqa: E402"


def tidy(before: str, after: str) -> str:
    """`after`, an edited source, with the lines that `before` lacks laid out."""
    new = _new_lines(before, after)
    lines = after.splitlines(keepends=True)
    tree = ast.parse(after)
    leading = _leading(tree)
    fresh = [stmt for stmt in _statements(tree.body) if _range(stmt) <= new]
    moved: list[ast.Import | ast.ImportFrom] = []
    for stmt in sorted(fresh, key=lambda s: -s.lineno):
        if isinstance(stmt, ast.Import | ast.ImportFrom) and stmt in tree.body:
            if stmt in leading:
                moved.append(stmt)
            else:
                first = stmt.lineno - 1
                lines[first] = lines[first].rstrip("\n") + LATE + "\n"
        elif stmt.end_lineno != stmt.lineno:
            lines[stmt.lineno - 1 : stmt.end_lineno] = _joined(stmt, lines)
    # What follows the leading imports is done, so that their numbers still hold.
    lines = _placed(lines, moved, [stmt for stmt in leading if stmt not in moved])
    text = "".join(lines)
    compile_quietly(text.encode(), "tidied")
    return text


def _new_lines(before: str, after: str) -> set[int]:
    matcher = difflib.SequenceMatcher(
        None, before.splitlines(), after.splitlines(), autojunk=False
    )
    return {
        number
        for tag, _, _, start, end in matcher.get_opcodes()
        if tag != "equal"
        for number in range(start + 1, end + 1)
    }


def _range(stmt: ast.stmt) -> set[int]:
    assert stmt.end_lineno is not None
    return set(range(stmt.lineno, stmt.end_lineno + 1))


def _statements(block: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Simple statements at any depth."""
    for stmt in block:
        inner = [*blocks(stmt)]
        if not inner:
            yield stmt
        for part in inner:
            yield from _statements(part)


def _leading(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    found: list[ast.Import | ast.ImportFrom] = []
    for stmt in tree.body:
        if isinstance(stmt, ast.Import | ast.ImportFrom):
            found.append(stmt)
        elif not is_docstring(stmt):
            break
    return found


def _joined(stmt: ast.stmt, lines: Sequence[str]) -> list[str]:
    """The statement in one line, without needless parentheses, if it fits."""
    assert stmt.end_lineno is not None
    own = list(lines[stmt.lineno - 1 : stmt.end_lineno])
    parts = [line.strip() for line in own]
    text = parts[0]
    for part in parts[1:]:
        tight = text.endswith(("(", "[", "{")) or part.startswith((")", "]", "}"))
        text += part if tight else f" {part}"
    if ",)" in text or ",]" in text or ",}" in text or "#" in text:
        return own
    head, opening, rest = text.partition("= (")
    if opening and rest.endswith(")") and _same(f"{head}= {rest[:-1]}", text):
        text = f"{head}= {rest[:-1]}"
    indent = " " * stmt.col_offset
    fits = len(indent + text) <= COLUMNS and _same(text, "".join(_dedented(own, stmt)))
    return [f"{indent}{text}\n"] if fits else own


def _dedented(own: Sequence[str], stmt: ast.stmt) -> Iterator[str]:
    yield own[0][stmt.col_offset :]
    yield from own[1:]


def _same(one: str, two: str) -> bool:
    """Whether two statements mean the same; `return` is known outside of functions."""
    try:
        return dump(ast.parse(one)) == dump(ast.parse(two))
    except SyntaxError:
        return False


def _placed(
    lines: list[str],
    moved: Sequence[ast.Import | ast.ImportFrom],
    kept: Sequence[ast.Import | ast.ImportFrom],
) -> list[str]:
    """Puts new imports of the leading block to their places in isort's order.

    One whose section would come before others, and is not there yet, stays.
    """
    insertions: list[tuple[int, str]] = []
    for stmt in sorted(moved, key=lambda s: -s.lineno):
        key = import_key(stmt, FIRST_PARTY)
        section = [k for k in kept if import_key(k, FIRST_PARTY)[0] == key[0]]
        later = [k for k in section or kept if import_key(k, FIRST_PARTY) > key]
        if not section and (later or not kept):
            continue
        place = later[0].lineno - 1 if later else (section or kept)[-1].end_lineno or 0
        start, end = stmt.lineno - 1, stmt.end_lineno or 0
        gap = "" if section else "\n"
        insertions.append((place, gap + "".join(lines[start:end])))
        lines[start:end] = [""] * (end - start)
    for place, text in sorted(insertions, reverse=True):
        lines[place:place] = [text]
    return lines
