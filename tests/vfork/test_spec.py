# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
import pytest

from vfork.spec import release_matches, release_tuple


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("0.33.0", (0, 33)),
        ("0.33.0rc1", (0, 33)),
        ("0.33.1.dev4+g12ab", (0, 33, 1)),
        ("1.2.post1", (1, 2)),
        ("0", (0,)),
    ],
)
def test_release_numbers_leave_out_labels_and_trailing_zeros(
    version: str, numbers: tuple[int, ...]
) -> None:
    assert release_tuple(version) == numbers


def test_version_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="does not start with a number"):
        release_tuple("main")


@pytest.mark.parametrize(
    ("specifier", "inside", "outside"),
    [
        ("<0.33", "0.32.9", "0.33.0"),
        ("<=0.33", "0.33.0", "0.33.1"),
        (">0.32", "0.32.1", "0.32.0"),
        (">=0.32.0", "0.32", "0.31.9"),
        ("==0.9", "0.9.0", "0.10.0"),
        ("!=0.32.1", "0.32.0", "0.32.1"),
        (">=0.32, <0.33", "0.32.5", "0.33.0"),
        (">=0.9,<0.100", "0.33.0", "0.100.0"),
    ],
)
def test_specifier_compares_numbers(specifier: str, inside: str, outside: str) -> None:
    assert release_matches(specifier, inside)
    assert not release_matches(specifier, outside)


def test_empty_specifier_takes_every_version() -> None:
    assert release_matches("", "0.1")


@pytest.mark.parametrize("specifier", ["0.33", "~=0.33", "<", "<0.1,nonsense", "<1.*"])
def test_malformed_clause_is_refused_wherever_it_stands(specifier: str) -> None:
    with pytest.raises(ValueError, match="clause|operator|start with"):
        release_matches(specifier, "0.32")
