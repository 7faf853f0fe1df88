# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
import ast

import pytest

from tests.helpers.vfork_edits import apply, change, edit, refused
from vfork.errors import VforkError
from vfork.literals import parse_elements
from vfork.spec import Assigned, ExtendLiteral

X = Assigned("X")


@pytest.mark.parametrize(
    ("value", "src", "expected"),
    [
        ("[1, 2]", "3", "[1, 2, 3]"),
        ("[1, 2,]", "3", "[1, 2, 3,]"),
        ("[]", "3", "[3,]"),
        ("()", "3, 4", "(3, 4,)"),
        ("(1,)", "2", "(1, 2,)"),
        ("1, 2", "3", "1, 2, 3"),
        ("1,", "2", "1, 2,"),
        ("{1}", "2", "{1, 2}"),
        ("{}", "'a': 1", "{'a': 1,}"),
        ("{'a': 1}", "'b': 2", "{'a': 1, 'b': 2}"),
        ("{**a}", "**b", "{**a, **b}"),
        ("[(1), (2)]", "3", "[(1), (2), 3]"),
        ("[f(1), g[2]]", "*h", "[f(1), g[2], *h]"),
        ("Literal['a']", "'b'", "Literal['a', 'b']"),
        ("Literal['a', 'b',]", "'c'", "Literal['a', 'b', 'c',]"),
        ("typing.Literal['a']", "'b'", "typing.Literal['a', 'b']"),
        ("['a' 'b']", "'ü'", "['a' 'b', 'ü']"),
        ("[1, 2]  # no [brackets], here", "3", "[1, 2, 3]  # no [brackets], here"),
    ],
)
def test_one_line_container_is_extended(value: str, src: str, expected: str) -> None:
    for bind in ("X = ", "X: object = "):
        changed = change(f"{bind}{value}\ny = 1\n", X, ExtendLiteral(src))
        assert changed == f"{bind}{expected}\ny = 1\n"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(
            '[\n    "a",\n    "b",\n]', '[\n    "a",\n    "b",\n    "n",\n]', id="comma"
        ),
        pytest.param(
            '[\n    "a",\n    "b"\n]',
            '[\n    "a",\n    "b",\n    "n",\n]',
            id="no comma",
        ),
        pytest.param(
            '[\n    "a",  # one, two]\n    # three\n]',
            '[\n    "a",  # one, two]\n    "n",\n    # three\n]',
            id="comma and comments",
        ),
        pytest.param(
            '[\n    "a"  # one, two]\n    # three, four\n]',
            '[\n    "a",  # one, two]\n    "n",\n    # three, four\n]',
            id="comments without comma",
        ),
        pytest.param(
            '[\n    "a"\n    # then,\n    ,  # odd\n]',
            '[\n    "a"\n    # then,\n    ,  # odd\n    "n",\n]',
            id="comma on its own line",
        ),
        pytest.param(
            '(\n    "a",\n    ("b"\n     "c"),\n)',
            '(\n    "a",\n    ("b"\n     "c"),\n    "n",\n)',
            id="parenthesized last element",
        ),
        pytest.param(
            '(\n    "a",\n    ("b")  # c)\n)',
            '(\n    "a",\n    ("b"),  # c)\n    "n",\n)',
            id="parentheses, comment, no comma",
        ),
        pytest.param(
            'Literal[\n    "a",\n    "b",\n]',
            'Literal[\n    "a",\n    "b",\n    "n",\n]',
            id="Literal",
        ),
        pytest.param('["a",\n "b"]', '["a",\n "b", "n"]', id="closed on last line"),
        pytest.param('["a", "b"\n]', '["a", "b",\n    "n",\n]', id="opened with all"),
        pytest.param(
            "{\n\t'a',\n\tf(\n\t\t1\n\t),\n}",
            "{\n\t'a',\n\tf(\n\t\t1\n\t),\n\t\"n\",\n}",
            id="last element over lines",
        ),
        pytest.param("[\n    # none yet\n]", '["n",\n    # none yet\n]', id="empty"),
    ],
)
def test_container_over_lines_is_extended(value: str, expected: str) -> None:
    changed = change(f"X = {value}\ny = 1\n", X, ExtendLiteral('"n"'))
    assert changed == f"X = {expected}\ny = 1\n"


def test_dict_items_line_up_with_keys() -> None:
    source = "X: dict[str, int] = {\n    'a': call(\n        1\n    ),\n}\n"
    changed = change(source, X, ExtendLiteral("'b': 2,\n'c': 3"))
    assert changed.endswith("    ),\n    'b': 2,\n    'c': 3,\n}\n")


@pytest.mark.parametrize("comma", [",", ""])
@pytest.mark.parametrize(
    "shape", ["[\n    1{}  # c\n]", "[1{}]", "[\n    1{}\n]"], ids=repr
)
def test_two_edits_extend_one_container_in_order(shape: str, comma: str) -> None:
    source = f"X = {shape.format(comma)}\n"
    two, three = ExtendLiteral("2"), ExtendLiteral("3")
    changed = apply(source, edit(X, two, id="b"), edit(X, three, id="c"))
    (stmt,) = ast.parse(changed).body
    assert isinstance(stmt, ast.Assign)
    assert ast.literal_eval(stmt.value) == [1, 2, 3]
    assert ("# c" in changed) == ("# c" in source)


def test_class_attribute_is_extended() -> None:
    source = "class A:\n    X = [1]\n"
    changed = change(source, Assigned("A.X"), ExtendLiteral("2"))
    assert changed == "class A:\n    X = [1, 2]\n"


@pytest.mark.parametrize("newline", [b"\r\n", b"\r", b"\n"])
def test_line_ends_are_kept(newline: bytes) -> None:
    source = b"X = [\n    1,\n    2\n]\n".replace(b"\n", newline)
    expected = b"X = [\n    1,\n    2,\n    3,\n    4,\n]\n".replace(b"\n", newline)
    assert change(source, X, ExtendLiteral("3,\n4")).encode() == expected


@pytest.mark.parametrize(
    ("value", "src"),
    [
        ("['a', 'b']", "'a'"),
        ("{'a': 1}", "'a': 2"),
        ("Literal['a']", "'a'"),
        ("{**a}", "**a"),
    ],
)
def test_element_that_is_there_is_refused(value: str, src: str) -> None:
    refused("VF206", f"X = {value}\n", edit(X, ExtendLiteral(src)))


@pytest.mark.parametrize(
    ("value", "src"),
    [
        ("make()", "1"),
        ("frozenset({1})", "2"),
        ("Union['a', 'b']", "'c'"),
        ("[i for i in y]", "1"),
        ("{'a': 1}", "'b'"),
        ("['a']", "'b': 1"),
        ("(1), (2)", "3"),
        ("Literal[('a', 'b')]", "'c'"),
        ("[1]", "2  # a comment"),
    ],
)
def test_value_that_cannot_be_extended_safely_is_refused(value: str, src: str) -> None:
    refused("VF207", f"X = {value}\n", edit(X, ExtendLiteral(src)))


@pytest.mark.parametrize("src", ["", ",", "a b", "x for x in y", "1] + [2", "a=1"])
def test_source_must_be_elements(src: str) -> None:
    with pytest.raises(VforkError) as caught:
        parse_elements(src)
    assert caught.value.code == "VF109"
