# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Reads `upstream.toml`: the release wheels the fork is laid over."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vfork.errors import VforkError

PIN_FILE = "upstream.toml"
LABEL = "glmdsa"

_TEXT_KEYS = (
    "distribution",
    "version",
    "wheel",
    "sha256",
    "python",
    "torch",
    "triton",
    "local",
)
_WHEEL = re.compile(r"(?P<name>\w+)-(?P<version>[^-]+)-(?P<tag>[^-]+-[^-]+-[^-]+)\.whl")


@dataclass(frozen=True)
class RequirementChanges:
    """Changes to `Requires-Dist`, outside extras: names to drop, requirements to put
    in place of a name's own, and requirements to add."""

    drop: tuple[str, ...] = ()
    replace: tuple[tuple[str, str], ...] = ()
    add: tuple[str, ...] = ()


@dataclass(frozen=True)
class Base:
    """One pinned release. `python` is the lowest Python it supports; `local` ends the
    local label of the fork's version."""

    name: str
    distribution: str
    version: str
    wheel: str
    sha256: str
    python: str
    torch: str
    triton: str
    local: str
    requires: RequirementChanges

    @property
    def tag(self) -> str:
        """The wheel's compatibility tag: `cp38-abi3-manylinux_2_28_x86_64`."""
        return self.wheel.removesuffix(".whl").split("-", 2)[2]

    def fork_version(self, number: int) -> str:
        """The fork's version at a build number: `0.32.0+glmdsa.7.cpu`."""
        parts = (LABEL, str(number), self.local)
        return f"{self.version}+{'.'.join(filter(None, parts))}"


def wheel_parts(name: str) -> tuple[str, str, str] | None:
    """Name, version and tag of a wheel file without a build number, else None."""
    match = _WHEEL.fullmatch(name)
    return (match["name"], match["version"], match["tag"]) if match else None


def load_pins(root: Path) -> dict[str, Base]:
    """Reads `upstream.toml` of a checkout: base name -> pin.

    Raises VforkError VF401 if the file is missing or says something unexpected.
    """
    path = root / PIN_FILE
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise VforkError(
            "VF401",
            f"{path} does not exist",
            hint="run vfork in a checkout of the fork",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise VforkError("VF401", f"{path} is not valid TOML: {error}") from error
    bases = table.get("bases")
    if not isinstance(bases, dict) or not bases or set(table) != {"bases"}:
        raise VforkError("VF401", f"{path} must hold [bases.NAME] tables only")
    return {name: _base(path, name, entry) for name, entry in bases.items()}


def pinned(root: Path, name: str) -> Base:
    """The pin of one base. Raises VforkError VF402 if there is none of that name."""
    pins = load_pins(root)
    if name not in pins:
        known = ", ".join(sorted(pins))
        raise VforkError("VF402", f"no base {name!r} in {PIN_FILE}; it has: {known}")
    return pins[name]


def _base(path: Path, name: str, entry: Any) -> Base:
    if not isinstance(entry, dict):
        raise VforkError("VF401", f"{path}: bases.{name} must be a table")
    unknown = set(entry) - {*_TEXT_KEYS, "requires"}
    missing = set(_TEXT_KEYS) - set(entry)
    if unknown or missing:
        raise VforkError(
            "VF401",
            f"{path}: [bases.{name}] has unknown keys {sorted(unknown)} "
            f"and lacks {sorted(missing)}",
        )
    for key in _TEXT_KEYS:
        if not isinstance(entry[key], str):
            raise VforkError("VF401", f"{path}: bases.{name}.{key} must be a string")
    if not re.fullmatch(r"[0-9a-f]{64}", entry["sha256"]):
        raise VforkError(
            "VF401", f"{path}: bases.{name}.sha256 must be 64 lower-case hex digits"
        )
    parts = wheel_parts(entry["wheel"])
    named = (entry["distribution"].replace("-", "_"), entry["version"])
    if parts is None or parts[:2] != named:
        raise VforkError(
            "VF401",
            f"{path}: bases.{name}.wheel is {entry['wheel']!r}, which is no wheel of "
            f"{entry['distribution']} {entry['version']}",
        )
    requires = _requirement_changes(path, name, entry.get("requires", {}))
    return Base(name=name, requires=requires, **{key: entry[key] for key in _TEXT_KEYS})


def _requirement_changes(path: Path, name: str, entry: Any) -> RequirementChanges:
    where = f"{path}: bases.{name}.requires"
    if not isinstance(entry, dict) or set(entry) - {"drop", "replace", "add"}:
        raise VforkError("VF401", f"{where} may hold drop, replace and add only")
    lists = {key: entry.get(key, []) for key in ("drop", "add")}
    replace = entry.get("replace", {})
    for key, value in lists.items():
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise VforkError("VF401", f"{where}.{key} must be a list of strings")
    if not isinstance(replace, dict) or not all(
        isinstance(value, str) for value in replace.values()
    ):
        raise VforkError("VF401", f"{where}.replace must map names to requirements")
    return RequirementChanges(
        drop=tuple(lists["drop"]),
        replace=tuple(replace.items()),
        add=tuple(lists["add"]),
    )
