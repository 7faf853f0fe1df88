# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Gives a file of the checkout the form that upstream's checks ask for."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from vfork.errors import VforkError
from vfork.export.imports import rename_modules, sort_imports
from vfork.source import compile_quietly

LICENSE = "# SPDX-License-Identifier: Apache-2.0\n"
OURS = "# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project\n"
THEIRS = "# SPDX-FileCopyrightText: Copyright contributors to the vLLM project\n"

# Upstream allows these modules only by way of a faster one.
INSTEAD = {"re": "regex", "base64": "pybase64"}
SKIP = """
if not current_platform.is_cpu():
    pytest.skip("needs the CPU platform", allow_module_level=True)
"""
_SECTION = re.compile(
    r"^\s*(Args|Arguments|Attributes|Examples?|Keyword Args|Notes?|Raises|References"
    r"|Returns?|See Also|Todo|Warnings?|Warns|Yields?):\s*$",
    re.MULTILINE,
)
_PARENTS = re.compile(r"(__file__\)(?:\.resolve\(\))?\.parents\[)(\d+)\]")
_MARK = re.compile(r"^\npytestmark = pytest\.mark\.gpu\n", re.MULTILINE)


@dataclass(frozen=True)
class Conventions:
    """What changes in the files of a patch.

    `modules` renames modules by their dotted names, `paths` files by their paths,
    `names` identifiers. `first_party` are the packages that imports list last.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    first_party: tuple[str, ...] = ("vllm", "tests")


def conform(
    source: str, target: str, data: bytes, rules: Conventions, *, cpu_only: bool = False
) -> bytes:
    """The content of `source`, a path of the checkout, as `target` upstream.

    Raises VforkError VF705 or VF706 if it cannot be brought into form.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise VforkError("VF706", f"{source} is not UTF-8: {error}") from error
    text = _replace(text, rules.paths, r"[\w./-]")
    if not source.endswith(".py") or not text:
        return text.encode()
    text = _header(source, text)
    text = _replace(text, rules.names, r"\w")
    text = rename_modules(source, text, rules.modules)
    for plain, better in INSTEAD.items():
        text = re.sub(
            rf"^(\s*)import {plain}$",
            rf"\1import {better} as {plain}",
            text,
            flags=re.M,
        )
    if cpu_only:
        text = _skip_elsewhere(text)
    text = sort_imports(text, rules.first_party)
    shift = target.count("/") - source.count("/")
    text = _PARENTS.sub(lambda m: f"{m[1]}{int(m[2]) + shift}]", text)
    text = _end_sections(_MARK.sub("", text))
    try:
        compile_quietly(text.encode(), target)
    except SyntaxError as error:
        raise VforkError("VF706", f"{target} would not compile: {error}") from error
    return text.encode()


def _replace(text: str, words: Mapping[str, str], inside: str) -> str:
    """Replaces whole words; `inside` matches a character that goes on with a word."""
    if not words:
        return text
    longest = sorted(words, key=len, reverse=True)
    pattern = rf"(?<!{inside})({'|'.join(map(re.escape, longest))})(?!\w)"
    return re.sub(pattern, lambda match: words[match[1]], text)


def _header(source: str, text: str) -> str:
    shebang, rest = "", text
    if text.startswith("#!"):
        shebang, _, rest = text.partition("\n")
        shebang += "\n"
    if not rest.startswith(LICENSE + OURS):
        raise VforkError(
            "VF706",
            f"{source} does not begin with the project's SPDX header",
            hint="every file has the same two lines at its top",
        )
    return shebang + LICENSE + THEIRS + rest.removeprefix(LICENSE + OURS)


def _skip_elsewhere(text: str) -> str:
    """Skips a test module off the CPU platform, as upstream's CPU tests do."""
    lines = text.splitlines(keepends=True)
    imports = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    added = "".join(
        line
        for line in ("import pytest\n", "from vllm.platforms import current_platform\n")
        if line not in lines
    )
    end = imports[-1].end_lineno
    assert end is not None
    lines[end:end] = [added, SKIP]
    return "".join(lines)


def _end_sections(text: str) -> str:
    """A blank line after the last section of a docstring (pydocstyle's D413)."""
    lines = text.splitlines(keepends=True)
    documented = (
        ast.Module,
        ast.ClassDef,
        ast.FunctionDef,
        ast.AsyncFunctionDef,
    )
    ends = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented):
            doc = node.body[0] if node.body else None
            said = ast.get_docstring(node, clean=False) or ""
            if doc and _SECTION.search(said):
                ends.append((doc.end_lineno or 0, doc.col_offset))
    for end, column in sorted(ends, reverse=True):
        last = lines[end - 1]
        if last.strip() not in ('"""', "'''"):
            quotes = last.rstrip()[-3:]
            head = last.rstrip()[:-3].rstrip()
            lines[end - 1 : end] = [f"{head}\n", "\n", f"{' ' * column}{quotes}\n"]
        elif lines[end - 2].strip():
            lines.insert(end - 1, "\n")
    return "".join(lines)
