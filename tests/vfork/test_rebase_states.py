# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Each state of an edit between two synthetic releases."""

import pytest

from tests.helpers.vfork_edits import edit
from tests.helpers.vfork_rebase import edit_file, sides, state
from vfork.errors import CODES
from vfork.rebase.states import CODES as STATE_CODES
from vfork.rebase.states import STATES, EditState, edit_states
from vfork.spec import (
    AddImport,
    AddMember,
    Anchor,
    AppendBody,
    Assigned,
    Class,
    Decorate,
    ExtendLiteral,
    Function,
    InsertAfter,
    Module,
    Op,
    PrependBody,
    Statement,
    SwapName,
)

TARGET = "vllm/colors.py"
OTHER = "vllm/paint.py"
SOURCE = '''"""Colors."""
import os

COLORS = ["red", "green"]


class Palette(dict):
    size = 2

    def mix(self, one, two=None):
        """Mix."""
        first = self.lookup(one)
        second = self.lookup(two)
        total = blend(first, second)
        self.remember(total)
        return total


def blend(one, two):
    amount = weight(one) + weight(two)
    return scale(amount)


def weight(color):
    return 1
'''

Where = tuple[Anchor, Op]
PREPEND: Where = (Function("Palette.mix"), PrependBody("call()"))
MEMBER: Where = (Class("Palette"), AddMember("depth = 3"))
LITERAL: Where = (Assigned("COLORS"), ExtendLiteral('"teal"'))
INSIDE: Where = (
    Statement(Function("Palette.mix"), "total = blend(...)"),
    InsertAfter("call()"),
)
IMPORT: Where = (Module(), AddImport("import teal"))
SWAP: Where = (Function("blend"), SwapName("scale", "our_scale"))
MIX = SOURCE[SOURCE.index("    def mix") : SOURCE.index("\n\ndef blend")]
PALETTE = SOURCE[SOURCE.index("class Palette") : SOURCE.index("def blend")]


def changed(where: Where, old: str, new: str, source: str = SOURCE) -> EditState:
    assert old in source
    at, op = where
    after = source.replace(old, new, 1)
    return state({TARGET: source}, {TARGET: after}, edit_file(TARGET, edit(at, op)))


def between(where: Where, new: dict[str, str]) -> EditState:
    return state({TARGET: SOURCE}, new, edit_file(TARGET, edit(*where)))


@pytest.mark.parametrize(
    ("where", "old", "new", "wanted"),
    [
        (PREPEND, "return 1", "return 2", "same"),
        (PREPEND, '"""Mix."""', '"""Mix."""  # why', "same"),
        (PREPEND, "blend(first, second)", "blend(second, first)", "body-changed"),
        (PREPEND, "two=None", "two=1", "neighbourhood-changed"),
        (PREPEND, "two=None", "three, two=None", "neighbourhood-changed"),
        (PREPEND, "first = self.lookup(one)", "first = 1", "neighbourhood-changed"),
        (INSIDE, "self.lookup(one)", "1", "neighbourhood-changed"),
        (LITERAL, '"red", ', "", "body-changed"),
        (MEMBER, "size = 2", "size = 2; depth = 4", "already-upstream"),
        (LITERAL, '"red"', '"teal"', "already-upstream"),
        (IMPORT, "import os", "import os, teal", "already-upstream"),
        (PREPEND, "first = self", "call()\n        first = self", "already-upstream"),
        (SWAP, "scale(amount)", "our_scale(amount)", "already-upstream"),
        (SWAP, "scale(amount)", "amount", "anchor-gone"),
        (INSIDE, "return total", "total = blend(1)\n        return 1", "ambiguous"),
        (SWAP, "scale(amount)", "scale(amount) + scale(1)", "ambiguous"),
        (PREPEND, MIX, MIX + MIX, "ambiguous"),
        (PREPEND, MIX, "    def mix(self): return 1\n", "unfit"),
        (LITERAL, '["red", "green"]', "make_colors()", "unfit"),
        (PREPEND, "def mix", "def combine", "renamed"),
        (MEMBER, "class Palette", "class Paints", "renamed"),
        (PREPEND, "class Palette", "class Paints", "renamed"),
        (LITERAL, "COLORS", "KNOWN_COLORS", "renamed"),
        (INSIDE, "total = blend(first", "mixed = blend(first", "renamed"),
        (INSIDE, "total = blend(first, second)", "total = 1", "anchor-gone"),
        (MEMBER, PALETTE, "", "anchor-gone"),
    ],
)
def test_state_tells_what_became_of_the_place(
    where: Where, old: str, new: str, wanted: str
) -> None:
    found = changed(where, old, new)
    assert found.state == wanted, found
    assert found.code == STATE_CODES[wanted]
    assert found.old or wanted == "same"


@pytest.mark.parametrize("wrapper", ["if FLAG:", "try:", "with lock:", "for _ in x:"])
def test_definition_that_became_conditional_is_told(wrapper: str) -> None:
    body = SOURCE[SOURCE.index("def weight") :]
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    end = "except OSError:\n    pass\n" if wrapper == "try:" else ""
    where = (Function("weight"), PrependBody("call()"))
    found = changed(where, body, f"{wrapper}\n{indented}{end}")
    assert found.state == "neighbourhood-changed"
    assert wrapper in found.new


def test_move_to_the_other_branch_is_told() -> None:
    source = "if FLAG:\n    def f():\n        one()\nelse:\n    pass\n"
    after = "if FLAG:\n    pass\nelse:\n    def f():\n        one()\n"
    where = (Function("f"), PrependBody("call()"))
    found = state({TARGET: source}, {TARGET: after}, edit_file(TARGET, edit(*where)))
    assert found.state == "neighbourhood-changed"


def test_name_bound_again_later_is_told() -> None:
    where = (Function("weight"), PrependBody("call()"))
    after = "    return 1\n\n\nweight = cached(weight)\n"
    assert changed(where, "    return 1\n", after).state == "neighbourhood-changed"


def test_class_that_moved_is_proposed_and_never_taken() -> None:
    found = between(MEMBER, {TARGET: SOURCE.replace(PALETTE, ""), OTHER: PALETTE})
    assert found.state == "moved"
    (candidate,) = found.candidates
    assert (candidate.path, candidate.name) == (OTHER, "Palette")
    assert candidate.similarity == 1.0
    assert f"Palette in {OTHER}:1 (similarity 1.00)" in found.hint
    assert "class Palette" in found.old and "class Palette" in found.new
    assert found.entry is None


def test_file_that_moved_is_proposed() -> None:
    for where in (MEMBER, IMPORT):
        found = between(where, {"vllm/art/colors.py": SOURCE})
        assert found.state == "moved"
        assert found.candidates[0].path == "vllm/art/colors.py"


def test_file_that_is_gone_has_no_candidate() -> None:
    for where in (MEMBER, IMPORT, LITERAL):
        found = between(where, {OTHER: "def unlike():\n    pass\n"})
        assert found.state == "file-gone"
        assert not found.candidates


def test_statement_in_another_function_is_proposed() -> None:
    line = "        total = blend(first, second)\n"
    after = SOURCE.replace(line, "        total = self.join(first, second)\n")
    after = after.replace(
        "\n\ndef blend",
        "\n    def join(self, first, second):\n"
        f"{line}        return total\n\n\ndef blend",
    )
    found = between(INSIDE, {TARGET: after})
    names = {candidate.name for candidate in found.candidates}
    assert found.state == "renamed" and "Palette.join" in names


def test_class_in_place_of_a_function_is_no_candidate() -> None:
    lines = "".join(f"    field_{n} = compute({n})\n" for n in range(20))
    old, new = f"def make():\n{lines}", f"class make:\n{lines}"
    for after, wanted in ((new, "anchor-gone"), (old, "moved")):
        found = state(
            {TARGET: old},
            {TARGET: "", OTHER: after},
            edit_file(TARGET, edit(Function("make"), PrependBody("call()"))),
        )
        assert found.state == wanted


def test_function_of_another_kind_or_an_old_one_is_no_candidate() -> None:
    unlike = "class mix:\n    pass\n\n\ndef blend2(a):\n    while a: print(a)\n"
    found = between(PREPEND, {TARGET: SOURCE.replace(MIX, ""), OTHER: unlike})
    assert (found.state, found.candidates) == ("anchor-gone", ())


def test_unreadable_source_is_unfit() -> None:
    found = between(PREPEND, {TARGET: "def broken(:\n"})
    assert found.state == "unfit"
    assert "cannot be read" in found.message


def test_source_that_does_not_compile_with_the_edit_is_unfit() -> None:
    # `nonlocal` after the name was assigned is told by the compiler only.
    after = SOURCE.replace("def weight(color):", "def weight(value):")
    where = (Function("weight"), PrependBody("color = 1\nglobal value"))
    source = SOURCE.replace("def weight(color):", "def weight(colors):")
    found = state({TARGET: source}, {TARGET: after}, edit_file(TARGET, edit(*where)))
    assert found.state == "unfit"


def test_edits_of_other_releases_are_new_or_retired() -> None:
    at, op = PREPEND
    late = edit_file(TARGET, edit(at, op, releases=">=2"))
    early = edit_file(TARGET, edit(at, op, releases="<2"))
    assert state({TARGET: SOURCE}, {TARGET: SOURCE}, late).state == "new"
    assert state({TARGET: SOURCE}, {TARGET: SOURCE}, early).state == "retired"


def test_edit_that_resolves_on_the_new_release_only_is_new() -> None:
    found = state(
        {TARGET: "x = 1\n"}, {TARGET: SOURCE}, edit_file(TARGET, edit(*MEMBER))
    )
    assert found.state == "new"
    assert "class Palette is not in" in found.message


def test_edit_that_resolves_nowhere_says_so() -> None:
    found = state(
        {TARGET: "x = 1\n"}, {TARGET: "x = 1\n"}, edit_file(TARGET, edit(*MEMBER))
    )
    assert found.state == "anchor-gone"
    assert "nor did it resolve on vllm 1.0" in found.message


def test_excerpts_mark_what_differs() -> None:
    found = changed(PREPEND, "self.remember(total)", "self.store(total)")
    assert ">    15         self.remember(total)" in found.old
    assert ">    15         self.store(total)" in found.new
    assert "first = " not in found.old
    added = changed(
        (Module(), AppendBody("call()")), "import os", "import os\nimport re"
    )
    assert ">     3 import re" in added.new


def test_edits_of_one_file_have_states_of_their_own() -> None:
    loaded = edit_file(
        TARGET,
        edit(Function("blend"), Decorate("deco"), id="one"),
        edit(*LITERAL, id="two"),
        edit(Function("gone"), Decorate("deco"), id="three"),
    )
    source = SOURCE + "\n\ndef gone():\n    return unlike_all_others[0]\n"
    old, new = sides({TARGET: source}, {TARGET: SOURCE}, loaded)
    found = {s.edit.id: s.state for s in edit_states(old, new)}
    assert found == {"one": "same", "two": "same", "three": "anchor-gone"}


def test_states_have_codes_in_their_order() -> None:
    codes = [STATE_CODES[state] for state in STATES]
    assert codes == sorted(codes)
    assert set(codes) <= set(CODES)
