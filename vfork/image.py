# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The fork as a set of files over a release: edits, overlay, extension, manifest."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vfork.apply import render
from vfork.distinfo import dist_info_files, dist_info_name
from vfork.edits import LoadedEditFile, applies, blame, load_edits
from vfork.extension import MEMBER as EXTENSION
from vfork.extension import Extension
from vfork.overlay import Member, check_overlay, overlay_files
from vfork.pin import Base
from vfork.release import RecordEntry, Release, record_entry
from vfork.spec import Edit

MANIFEST = "vllm/glm_dsa_manifest.json"
VERSION_FILE = "vllm/_version.py"


@dataclass(frozen=True)
class Image:
    """What the fork puts over a release; everything else of the release stays.

    `edited` replaces upstream files, `overlay` adds files, `compiled` holds the
    extension, if there is one. `generated` holds the manifest and the version module.
    `dist_info` takes the place of the release's dist-info, with RECORD left to
    `record`. Keys are paths in the wheel.
    """

    base: Base
    version: str
    edited: Mapping[str, Member]
    overlay: Mapping[str, Member]
    compiled: Mapping[str, Member]
    generated: Mapping[str, Member]
    dist_info: Mapping[str, Member]

    @property
    def payload(self) -> dict[str, Member]:
        """All files of the image outside dist-info."""
        return {**self.edited, **self.overlay, **self.compiled, **self.generated}

    @property
    def record_path(self) -> str:
        return f"{dist_info_name(self.version)}/RECORD"

    def unchanged(self, release: Release) -> list[str]:
        """The release's members that the image leaves as they are."""
        payload = self.payload
        dist_info = f"{release.dist_info}/"
        return [
            name
            for name in release.names()
            if name not in payload and not name.startswith(dist_info)
        ]

    def record(self, release: Release) -> dict[str, RecordEntry]:
        """RECORD of the whole fork, in the order of its wheel: payload, dist-info.

        The hashes of unchanged members are the release's own.
        """
        entries = {name: release.record_of(name) for name in self.unchanged(release)}
        for path, member in self.payload.items():
            entries[path] = record_entry(member.data)
        ordered = dict(sorted(entries.items()))
        for path, member in sorted(self.dist_info.items()):
            ordered[path] = record_entry(member.data)
        return {**ordered, self.record_path: RecordEntry("", "")}


def compose(
    root: Path,
    base: Base,
    release: Release,
    version: str,
    extension: Extension | None = None,
) -> Image:
    """Renders all edits and collects the overlay of a checkout for one release.

    Raises VforkError for an edit that does not resolve, an overlay path that collides
    with the release, or a requirement change that does not fit.
    """
    overlay = overlay_files(root)
    compiled = {EXTENSION: Member(extension.data, 0o755)} if extension else {}
    check_overlay([*overlay, *compiled], release)
    edited: dict[str, Member] = {}
    register: list[dict[str, str]] = []
    for loaded in load_edits(root):
        edits = [e for e in loaded.file.edits if applies(e, base.name, base.version)]
        if edits:
            with blame(loaded.ref(edits[0])):
                source = release.read(loaded.target)
            rendered = render(source, loaded, base.name, base.version)
            mode = release.info(loaded.target).external_attr >> 16 & 0o777
            edited[loaded.target] = Member(rendered.data, mode)
            register += [_entry(loaded, edit) for edit in edits]
    manifest = _manifest(base, version, register, overlay, extension)
    return Image(
        base=base,
        version=version,
        edited=edited,
        overlay=overlay,
        compiled=compiled,
        generated={
            MANIFEST: Member(manifest),
            VERSION_FILE: Member(_version_module(version)),
        },
        dist_info={
            path: Member(data)
            for path, data in dist_info_files(root, base, release, version).items()
        },
    )


def _entry(loaded: LoadedEditFile, edit: Edit) -> dict[str, str]:
    return {
        "id": edit.id,
        "file": loaded.target,
        "topic": loaded.file.topic,
        "why": edit.why,
        "drop_when": edit.drop_when,
        "forwarded": edit.forwarded,
    }


def _manifest(
    base: Base,
    version: str,
    register: list[dict[str, str]],
    overlay: Mapping[str, Member],
    extension: Extension | None,
) -> bytes:
    content = {
        "format": 1,
        "version": version,
        "base": {
            "name": base.name,
            "distribution": base.distribution,
            "version": base.version,
            "wheel": base.wheel,
            "sha256": base.sha256,
        },
        "edits": register,
        "overlay": [
            {"file": path, "sha256": hashlib.sha256(member.data).hexdigest()}
            for path, member in sorted(overlay.items())
        ],
        "extension": extension.entry() if extension else None,
    }
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def _version_module(version: str) -> bytes:
    """`vllm/_version.py` with the names that setuptools-scm gives it upstream."""
    public, _, local = version.partition("+")
    numbers = tuple(
        int(part) if part.isdecimal() else part for part in public.split(".")
    )
    return (
        "# Generated by vfork.\n"
        f"__version__ = version = {version!r}\n"
        f"__version_tuple__ = version_tuple = {(*numbers, local)!r}\n"
        "__commit_id__ = commit_id = None\n"
    ).encode()
