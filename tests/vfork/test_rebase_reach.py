# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Callers of hooked functions, events of `drop_when`, and requirements."""

from pathlib import Path

import pytest

from tests.helpers.vfork_edits import edit
from tests.helpers.vfork_rebase import base, edit_file, sides
from tests.vfork.conftest import File, release_files, write_wheel
from vfork.pin import Base, RequirementChanges
from vfork.rebase.audit import BREAKS, NOTE, REVIEW, Finding
from vfork.rebase.mentions import compare_mentions
from vfork.rebase.reach import compare_reach
from vfork.rebase.requirements import compare_requirements
from vfork.release import Release
from vfork.spec import Decorate, Edit, Function, PrependBody

HOOKED = """def load(path, mode="r"):
    return _open(path)


def _open(path):
    return path


class Loader:
    def fetch(self, path):
        return self._read(path)

    def _read(self, path):
        return path
"""
CALLER = """from vllm.hooked import load


def main(path):
    return load(path)
"""
FILES = {"vllm/hooked.py": HOOKED, "vllm/caller.py": CALLER}
LOAD = edit_file("vllm/hooked.py", edit(Function("load"), Decorate("d"), id="load"))
FETCH = edit_file(
    "vllm/hooked.py", edit(Function("Loader.fetch"), PrependBody("c()"), id="fetch")
)


def reach(new: dict[str, str], loaded=LOAD) -> list[Finding]:  # type: ignore[no-untyped-def]
    return compare_reach(*sides(FILES, FILES | new, loaded))


def test_same_callers_are_no_finding() -> None:
    assert reach({}) == []
    assert reach({"vllm/caller.py": f"# why\n{CALLER}"}) == []


def test_caller_that_is_lost_is_found() -> None:
    (found,) = reach({"vllm/caller.py": CALLER.replace("return load(", "return open(")})
    assert (found.code, found.severity) == ("VF638", REVIEW)
    assert "vllm/caller.py::main" in found.message
    assert found.places == ("load",)


def test_file_that_is_gone_is_no_lost_caller() -> None:
    files = {k: v for k, v in FILES.items() if k != "vllm/caller.py"}
    assert compare_reach(*sides(FILES, files, LOAD)) == []


def test_call_with_other_arguments_is_found() -> None:
    new = CALLER.replace("load(path)", "load(path, mode=1)")
    (found,) = reach({"vllm/caller.py": new})
    assert (found.code, found.severity, found.new) == ("VF639", REVIEW, "(1, mode=)")
    assert found.old == "(1)"


def test_new_caller_is_noted() -> None:
    late = "def run():\n    from vllm.hooked import load\n\n    return load(1)\n"
    (found,) = reach({"vllm/late.py": late})
    assert (found.code, found.severity) == ("VF639", NOTE)
    assert "vllm/late.py::run" in found.message


@pytest.mark.parametrize(
    "text",
    [
        "def load(path): ...\n\n\nload(1)\n",
        "from os import load\n\nload(1)\n",
        "x.load(1)\n",
        "load = 1\n",
    ],
)
def test_other_things_of_the_name_are_no_callers(text: str) -> None:
    assert [f for f in reach({"vllm/else.py": text}) if f.code != "VF637"] == []


def test_reexported_function_has_its_callers_found() -> None:
    new = {
        "vllm/__init__.py": "from vllm.hooked import load\n",
        "vllm/user.py": "from vllm import load\n\nload(2, 3)\n",
    }
    codes = {(f.code, f.severity) for f in reach(new)}
    assert ("VF639", REVIEW) in codes


def test_inner_function_that_others_call_now_is_a_bypass() -> None:
    new = CALLER + "\n\ndef quick(path):\n    from vllm.hooked import _open\n"
    new += "\n    return _open(path)\n"
    found = [f for f in reach({"vllm/caller.py": new}) if f.code == "VF637"]
    (finding,) = found
    assert finding.severity == REVIEW
    assert "_open was called from it only" in finding.message
    assert "vllm/caller.py::quick" in finding.message


def test_inner_method_that_others_call_now_is_a_bypass() -> None:
    new = {"vllm/caller.py": f"{CALLER}\n\ndef quick(x):\n    return x._read(1)\n"}
    (finding,) = reach(new, FETCH)
    assert (finding.code, finding.severity) == ("VF637", REVIEW)
    assert "Loader._read" in finding.message


def test_new_override_of_a_hooked_method_is_found() -> None:
    late = "from vllm.hooked import Loader\n\n\nclass Fast(Loader):\n"
    late += "    def fetch(self, path):\n        return 1\n"
    (finding,) = reach({"vllm/late.py": late}, FETCH)
    assert (finding.code, finding.severity) == ("VF637", REVIEW)
    assert "vllm/late.py::Fast.fetch" in finding.message
    unrelated = late.replace("(Loader)", "")
    assert reach({"vllm/late.py": unrelated}, FETCH) == []


def test_second_function_of_the_name_is_found() -> None:
    (finding,) = reach({"vllm/twin.py": "def load(path):\n    return path\n"})
    assert (finding.code, finding.severity) == ("VF637", REVIEW)
    assert "vllm/twin.py::load" in finding.message


# Mentions


def mentioned(edited: Edit, new: dict[str, str]) -> list[Finding]:
    loaded = edit_file("vllm/hooked.py", edited)
    return compare_mentions(*sides(FILES, FILES | new, loaded))


def about(drop_when: str, forwarded: str = "no: a test") -> Edit:
    return Edit(
        id="load",
        why="because",
        drop_when=drop_when,
        forwarded=forwarded,
        at=Function("load"),
        op=Decorate("d"),
        test="tests/test_load.py",
    )


def test_event_without_names_is_silent() -> None:
    assert mentioned(about("upstream does it by itself"), {}) == []


def test_issue_that_is_named_is_noted_and_for_review_once_it_is_mentioned() -> None:
    link = "https://example.org/upstream/pull/1234"
    edited = about(f"{link} is released", forwarded=link)
    found = mentioned(edited, {})
    assert {(f.code, f.severity, f.target) for f in found} == {("VF646", NOTE, link)}
    found = mentioned(edited, {"vllm/late.py": "# see #1234\n"})
    assert {f.severity for f in found} == {REVIEW}
    assert "vllm/late.py" in found[0].message
    assert {f.severity for f in mentioned(edited, {"vllm/n.py": "# #12345\n"})} == {
        NOTE
    }


def test_definition_that_drop_when_names_is_watched() -> None:
    edited = about("the release's Loader.fetch keeps the path open_file brings")
    assert mentioned(edited, {}) == []
    changed = HOOKED.replace("self._read(path)", "self._read(path, 1)")
    (finding,) = mentioned(edited, {"vllm/hooked.py": changed})
    assert (finding.code, finding.severity) == ("VF646", REVIEW)
    assert finding.target == "Loader.fetch"
    (finding,) = mentioned(edited, {"vllm/late.py": "def open_file(): ...\n"})
    assert finding.target == "open_file"


def test_edit_that_is_named_and_gone_is_found() -> None:
    (finding,) = mentioned(about("the edit load-other is dropped"), {})
    assert "load-other, which is not there" in finding.message
    assert mentioned(about("the edit load goes"), {}) == []


# Requirements


def releases(tmp_path: Path, old: str, new: str) -> tuple[Release, Release]:
    made = []
    for version in ("1.0.0", "2.0.0"):
        files = release_files("vllm", version)
        name = f"vllm-{version}.dist-info/METADATA"
        text = files[name].data.decode()
        if version == "2.0.0":
            assert old in text
            text = text.replace(old, new)
        files[name] = File(text.encode())
        wheel = tmp_path / f"vllm-{version}-cp38-abi3-linux_x86_64.whl"
        made.append(Release(write_wheel(wheel, files)))
    return made[0], made[1]


def required(
    tmp_path: Path, old: str, new: str, changes: RequirementChanges | None = None
) -> list[Finding]:
    pin = base("2.0.0")
    pin = Base(**{**vars(pin), "requires": changes or RequirementChanges()})
    one, two = releases(tmp_path, old, new)
    with one, two:
        return compare_requirements(one, two, pin)


def test_requirement_that_changed_is_found(tmp_path: Path) -> None:
    assert required(tmp_path, "regex", "regex") == []
    found = required(tmp_path, "Requires-Dist: regex", "Requires-Dist: regex>=2")
    assert [(f.code, f.severity, f.target) for f in found] == [
        ("VF640", REVIEW, "regex")
    ]
    assert (found[0].old, found[0].new) == ("regex", "regex>=2")
    (finding,) = required(tmp_path, "torch==2.0.0;", "torch==2.1.0;")
    assert "pinned in upstream.toml" in finding.hint
    (finding,) = required(tmp_path, "<3.15,>=3.11", ">=3.12")
    assert finding.target == "python"
    (finding,) = required(tmp_path, "Requires-Dist: regex\n", "")
    assert finding.new == "nothing"
    assert required(tmp_path, "torchaudio; extra", "torchaudio>3; extra") == []


def test_change_of_ours_that_no_longer_fits_breaks(tmp_path: Path) -> None:
    changes = RequirementChanges(drop=("torchaudio",))
    old = 'Requires-Dist: torchaudio; platform_machine != "s390x"\n'
    found = required(tmp_path, old, "", changes)
    assert {f.severity for f in found} == {BREAKS, REVIEW}
