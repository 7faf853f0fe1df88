# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Compares what two releases require."""

from vfork.distinfo import rewrite_metadata
from vfork.errors import VforkError
from vfork.pin import Base
from vfork.rebase.audit import BREAKS, REVIEW, Finding
from vfork.release import Release


def compare_requirements(old: Release, new: Release, base: Base) -> list[Finding]:
    """Requirements outside extras that came or went, and changes of ours that no
    longer fit."""
    before, after = (_required(release) for release in (old, new))
    found = []
    for name in sorted({*before, *after}):
        one, two = before.get(name, ()), after.get(name, ())
        if one != two:
            found.append(
                Finding(
                    "VF640",
                    REVIEW,
                    name,
                    f"{base.distribution} requires something else",
                    (f"upstream.toml: {base.name}",),
                    old="; ".join(one) or "nothing",
                    new="; ".join(two) or "nothing",
                    hint="torch and triton are pinned in upstream.toml"
                    if name in ("torch", "triton")
                    else "",
                )
            )
    try:
        rewrite_metadata(_metadata(new), base, "0", ())
    except VforkError as err:
        found.append(
            Finding(
                "VF640",
                BREAKS,
                base.distribution,
                err.message,
                (f"upstream.toml: {base.name}",),
                hint=err.hint,
            )
        )
    return found


def _metadata(release: Release) -> bytes:
    return release.read(f"{release.dist_info}/METADATA")


def _required(release: Release) -> dict[str, tuple[str, ...]]:
    """Requirements by name; `python` stands for the versions of Python."""
    found: dict[str, list[str]] = {}
    head = _metadata(release).decode("utf-8").partition("\n\n")[0]
    for line in head.splitlines():
        key, _, value = line.partition(": ")
        if key == "Requires-Python":
            found["python"] = [value]
        elif key == "Requires-Dist" and "extra ==" not in value:
            name = value.split(";")[0]
            for mark in "<>=!~[ (":
                name = name.split(mark)[0]
            found.setdefault(name.lower().replace("_", "-"), []).append(value)
    return {name: tuple(sorted(values)) for name, values in found.items()}
