# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The fork wheel's dist-info: the release's, with our name, version, requirements."""

import re
from collections.abc import Iterable
from pathlib import Path

from vfork.errors import VforkError
from vfork.pin import Base, RequirementChanges
from vfork.release import Release

NAME = "vllm"
_LICENSE_FILES = ("LICENSE", "NOTICE")
_LICENSE_FOLDER = "vllm-glm-dsa"

Header = tuple[str, str]


def dist_info_name(version: str) -> str:
    """The dist-info directory of the fork at a version."""
    return f"{NAME}-{version}.dist-info"


def dist_info_files(
    root: Path, base: Base, release: Release, version: str
) -> dict[str, bytes]:
    """All dist-info files but RECORD, by their path in the wheel.

    Raises VforkError VF504 if a requirement change does not fit the release.
    """
    licenses = {
        f"{_LICENSE_FOLDER}/{name}": (root / name).read_bytes()
        for name in _LICENSE_FILES
        if (root / name).is_file()
    }
    kept = {
        name.removeprefix(f"{release.dist_info}/"): release.read(name)
        for name in release.names()
        if name.startswith(f"{release.dist_info}/")
    }
    del kept["RECORD"]
    metadata = rewrite_metadata(kept["METADATA"], base, version, [*licenses])
    wheel = (
        f"Wheel-Version: 1.0\nGenerator: vfork\nRoot-Is-Purelib: false\n{_tags(base)}"
    )
    files = {**kept, "METADATA": metadata, "WHEEL": wheel.encode()}
    files |= {f"licenses/{name}": data for name, data in licenses.items()}
    return {f"{dist_info_name(version)}/{name}": data for name, data in files.items()}


def _tags(base: Base) -> str:
    """`Tag:` lines; a compressed tag such as `py2.py3-none-any` gives one for each."""
    pythons, abis, platforms = (part.split(".") for part in base.tag.split("-"))
    return "".join(
        f"Tag: {python}-{abi}-{platform}\n"
        for python in pythons
        for abi in abis
        for platform in platforms
    )


def rewrite_metadata(
    data: bytes, base: Base, version: str, license_files: Iterable[str]
) -> bytes:
    """The release's METADATA as the fork's; license paths are below `licenses/`.

    Author names, classifiers, extras and the description stay. Links are marked as
    upstream's; its maintainer and addresses go, so that nobody takes fork bugs there.
    """
    head, blank, body = data.partition(b"\n\n")
    headers = _parse(head.decode("utf-8"))
    changed: list[Header] = []
    for key, value in headers:
        match key.lower():
            case "name":
                changed.append((key, NAME))
            case "version":
                changed.append((key, version))
            case "summary":
                summary = f"Fork of {base.distribution} {base.version} that serves "
                changed.append((key, summary + "GLM-5 (glm-dsa) GGUF files"))
            case "project-url":
                changed.append((key, f"Upstream {value}"))
            case "author-email" | "maintainer" | "maintainer-email":
                continue
            case "home-page" | "requires-dist":
                continue
            case _:
                changed.append((key, value))
    changed += [("License-File", name) for name in license_files]
    requirements = [value for key, value in headers if key.lower() == "requires-dist"]
    changed += [
        ("Requires-Dist", requirement)
        for requirement in change_requirements(requirements, base.requires)
    ]
    text = "\n".join(f"{key}: {value}" for key, value in changed)
    return text.encode() + (blank or b"\n") + body


def _parse(head: str) -> list[Header]:
    """Header lines in order; folded lines stay part of their value."""
    headers: list[Header] = []
    for line in head.split("\n"):
        if line[:1] in (" ", "\t") and headers:
            key, value = headers.pop()
            headers.append((key, f"{value}\n{line}"))
        else:
            key, _, value = line.partition(":")
            headers.append((key, value.strip()))
    return headers


def change_requirements(
    requirements: list[str], changes: RequirementChanges
) -> list[str]:
    """Applies the declared changes to the requirements outside extras.

    A replacement takes the place of the first requirement of that name; the others
    of that name go. Raises VforkError VF504 for a name to drop or replace that is not
    required, and for an added name that already is.
    """
    present = {_name(item) for item in requirements if not _is_extra(item)}
    replace = {_canonical(name): new for name, new in changes.replace}
    drop = {_canonical(name) for name in changes.drop}
    for name in sorted({*replace, *drop} - present):
        raise _misfit(f"{name} is to be dropped or replaced, but is not required")
    for name in sorted({_name(item) for item in changes.add} & present):
        raise _misfit(f"{name} is to be added, but is required already")
    result: list[str] = []
    placed: set[str] = set()
    for item in requirements:
        name = _name(item)
        if _is_extra(item) or name not in {*drop, *replace}:
            result.append(item)
        elif name in replace and name not in placed:
            placed.add(name)
            result.append(replace[name])
    return [*result, *changes.add]


def _misfit(what: str) -> VforkError:
    return VforkError(
        "VF504",
        f"requirement {what} by the release",
        hint="bring the base's [requires] table in upstream.toml up to date",
    )


def _is_extra(requirement: str) -> bool:
    return re.search(r"\bextra\s*==", requirement.partition(";")[2]) is not None


def _name(requirement: str) -> str:
    found = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", requirement)
    return _canonical(found[1]) if found else ""


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
