# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The vocabulary of edit files: what an edit may say, and nothing else.

An edit file is data. It imports names from here and binds one `FILE`:

    from vfork.spec import Assigned, Edit, EditFile, ExtendLiteral

    FILE = EditFile(topic="colors", edits=(
        Edit(id="color-teal", why="...", drop_when="...", forwarded="no: ...",
             at=Assigned("COLORS"), op=ExtendLiteral('"teal"'),
             test="tests/edits/test_colors.py"),
    ))

Source given to an operation is dedented, then indented to its place. It calls into
an overlay module and has at most `MAX_STATEMENTS` statements, nested ones counted.
"""

from dataclasses import dataclass

MAX_STATEMENTS = 3
BASES = ("cpu", "cuda")


@dataclass(frozen=True)
class Module:
    """The file itself."""


@dataclass(frozen=True)
class Function:
    """A function by qualified name: `fn`, `Class.method` or `outer.inner`.

    With `typing.overload`, the implementation is meant.
    """

    name: str


@dataclass(frozen=True)
class Class:
    """A class by qualified name: `Outer` or `Outer.Inner`."""

    name: str


@dataclass(frozen=True)
class Assigned:
    """The one statement that binds a name: `NAME`, `Class.NAME` or `fn.name`."""

    name: str


@dataclass(frozen=True)
class Statement:
    """The one statement inside a function that has the structure of `pattern`.

    Nested blocks are searched, nested functions and classes are not. In the pattern,
    `...` stands for any expression; as an argument, for any number of arguments; as
    the only statement of a block, for any block (and any `else` and the like).
    """

    inside: Function
    pattern: str


Anchor = Module | Function | Class | Assigned | Statement


@dataclass(frozen=True)
class AddImport:
    """At Module: add an import after the last one of the leading import block."""

    stmt: str


@dataclass(frozen=True)
class Decorate:
    """At Function or Class: add `@expr` directly above `def` or `class`.

    The new decorator is the innermost one, so that it gets the plain function even
    where upstream has `@property` or `@classmethod`.
    """

    expr: str


@dataclass(frozen=True)
class PrependBody:
    """At Function: insert statements before the body, after the docstring."""

    src: str


@dataclass(frozen=True)
class AppendBody:
    """At Function or Module: insert statements after the last statement."""

    src: str


@dataclass(frozen=True)
class AddMember:
    """At Class: add an attribute, method or enum entry at the end."""

    src: str


@dataclass(frozen=True)
class ExtendLiteral:
    """At Assigned: append elements to a list, tuple, set, dict or `Literal[...]`.

    `src` is written as between the brackets: `"a", "b"` or `"key": value`.
    """

    src: str


@dataclass(frozen=True)
class InsertBefore:
    """At Statement or Assigned: insert statements in front of it."""

    src: str


@dataclass(frozen=True)
class InsertAfter:
    """At Statement or Assigned: insert statements behind it."""

    src: str


@dataclass(frozen=True)
class SwapName:
    """At Function or Statement: replace the one use of a (dotted) name by another.

    Only names that are read count; of a function, only its body is searched.
    """

    old: str
    new: str


@dataclass(frozen=True)
class ReplaceFunction:
    """At Function: replace all of it, decorators included. A budgeted last resort."""

    src: str


Op = (
    AddImport
    | Decorate
    | PrependBody
    | AppendBody
    | AddMember
    | ExtendLiteral
    | InsertBefore
    | InsertAfter
    | SwapName
    | ReplaceFunction
)


@dataclass(frozen=True)
class Edit:
    """One change to an upstream file.

    `drop_when` is an event one can check. `forwarded` is a URL, `no: reason` or
    `not-needed: reason`. `test` is the owner test, `path` or `path::name`. `releases`
    limits the edit to base versions, such as `>=0.32,<0.33`; empty means all.
    """

    id: str
    why: str
    drop_when: str
    forwarded: str
    at: Anchor
    op: Op
    test: str
    releases: str = ""
    bases: tuple[str, ...] = BASES


@dataclass(frozen=True)
class EditFile:
    """All edits of one upstream file, in the order of same-place insertions."""

    topic: str
    edits: tuple[Edit, ...]


def release_tuple(version: str) -> tuple[int, ...]:
    """The release numbers of a version without trailing zeros: `0.33.0rc1` -> (0, 33).

    Raises ValueError if the version does not start with a number.
    """
    public = version.split("+", 1)[0]
    numbers: list[int] = []
    for part in public.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    if not numbers:
        raise ValueError(f"version {version!r} does not start with a number")
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def release_matches(specifier: str, version: str) -> bool:
    """Whether a version satisfies comma-separated clauses such as `>=0.32,<0.33`.

    Operators are <, <=, >, >=, == and !=. Only release numbers are compared;
    pre-release and local labels are ignored. Raises ValueError on anything else.
    """
    have = release_tuple(version)
    result = True
    for clause in filter(None, (part.strip() for part in specifier.split(","))):
        op = clause[: len(clause) - len(clause.lstrip("<>=!"))]
        number = clause[len(op) :].strip()
        if not number.replace(".", "").isdecimal():
            raise ValueError(f"{clause!r} is not an operator and a release number")
        want = release_tuple(number)
        verdicts = {
            "<": have < want,
            "<=": have <= want,
            ">": have > want,
            ">=": have >= want,
            "==": have == want,
            "!=": have != want,
        }
        if op not in verdicts:
            raise ValueError(f"{clause!r} does not start with <, <=, >, >=, == or !=")
        result = result and verdicts[op]
    return result
