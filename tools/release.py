# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Make the files of a release: both wheels, checksums, and an SBOM for each wheel.

    python tools/release.py --out dist/release

Refuses a tree with changes, findings of `vfork check`, and a changelog without a
section for the version. The SBOM is CycloneDX 1.6 JSON: the release that a wheel was
made from with its hash, the requirements with their version ranges, and every file of
ours with its hash. Needs requirements/release.txt and the releases (`vfork fetch`).
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from email.parser import HeaderParser
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = "vllm/glm_dsa_manifest.json"


class ReleaseError(Exception):
    """Why there is no release, and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "release")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout")
    args = parser.parse_args(argv)
    try:
        for path in make_release(args.root, args.out):
            print(path)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


def make_release(root: Path, out: Path) -> list[Path]:
    """Write the files of a release into `out`, which must be empty or missing.

    Raises:
        ReleaseError: the checkout is not fit for a release.
    """
    if out.exists() and any(out.iterdir()):
        raise ReleaseError(f"{out} is not empty; remove it or name another folder")
    if changes := _run(root, "git", "status", "--porcelain"):
        raise ReleaseError(f"the tree has changes; commit them first:\n{changes}")
    _run(root, sys.executable, "-m", "vfork", "check")
    wheels = []
    for base in ("cpu", "cuda"):
        built = _run(
            root,
            *(sys.executable, "-m", "vfork", "wheel", "--json"),
            *("--base", base, "--out", str(out)),
        )
        wheels.append(out / Path(json.loads(built)["wheel"]).name)
    for wheel in wheels:
        check_changelog((root / "CHANGELOG.md").read_text(), version_of(wheel))
    files = list(wheels)
    for wheel in wheels:
        files.append(wheel.with_suffix(".cdx.json"))
        files[-1].write_text(sbom(wheel))
    files.append(out / "SHA256SUMS")
    files[-1].write_text(checksums(files[:-1]))
    return files


def version_of(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def check_changelog(text: str, version: str) -> None:
    """Raise ReleaseError unless `text` has a section `## <version>`, `.cpu` or not."""
    wanted = version.removesuffix(".cpu")
    label = wanted.partition("+")[2]
    heads = re.findall(r"^## (.+?)\s*$", text, re.MULTILINE)
    if not any(label in head.split() or wanted in head.split() for head in heads):
        raise ReleaseError(
            f"CHANGELOG.md has no section for {wanted}: found {', '.join(heads)};"
            f" rename `## Unreleased` to `## {label}`"
        )


def checksums(files: Iterable[Path]) -> str:
    """As `sha256sum` prints it, for `sha256sum -c` in the same folder."""
    return "".join(f"{_sha256(path)}  {path.name}\n" for path in files)


def sbom(wheel: Path) -> str:
    """The CycloneDX document of a fork wheel; the same wheel gives the same text.

    Raises:
        ReleaseError: the file is not a wheel of this fork.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if MANIFEST not in names:
            raise ReleaseError(f"{wheel}: no {MANIFEST}; expected a wheel of this fork")
        manifest = json.loads(archive.read(MANIFEST))
        [metadata] = [n for n in names if n.endswith(".dist-info/METADATA")]
        headers = HeaderParser().parsestr(archive.read(metadata).decode())
        newest = max(info.date_time for info in archive.infolist())
    version = headers["Version"]
    bom = Bom(serial_number=uuid5(NAMESPACE_URL, f"{wheel.name}#{_sha256(wheel)}"))
    bom.metadata.timestamp = datetime(*newest, tzinfo=UTC)
    fork = bom.metadata.component = Component(
        name="vllm",
        version=version,
        type=ComponentType.APPLICATION,
        purl=PackageURL("pypi", name="vllm", version=version),
        bom_ref="fork",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=_sha256(wheel))],
        licenses=[LicenseExpression("Apache-2.0")],
    )
    parts = [_release(manifest), *_requirements(headers), *_files(manifest)]
    for part in parts:
        bom.components.add(part)
    bom.register_dependency(fork, parts)
    text = JsonV1Dot6(bom).output_as_string(indent=1)
    if errors := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise ReleaseError(f"the SBOM of {wheel.name} is not valid: {errors}")
    return text + "\n"


def _release(manifest: dict[str, Any]) -> Component:
    base = manifest["base"]
    name, version = base["distribution"], base["version"]
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        purl=PackageURL("pypi", name=name, version=version),
        bom_ref="release",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=base["sha256"])],
        licenses=[LicenseExpression("Apache-2.0")],
    )


def _requirements(headers: Any) -> Iterable[Component]:
    for line in headers.get_all("Requires-Dist") or ():
        requirement = Requirement(line)
        if requirement.marker is not None and "extra" in str(requirement.marker):
            continue
        properties = [Property(name="python:requirement", value=line)]
        yield Component(
            name=requirement.name,
            type=ComponentType.LIBRARY,
            purl=PackageURL("pypi", name=requirement.name),
            bom_ref=f"requirement:{line}",
            scope=ComponentScope.REQUIRED,
            properties=properties,
        )


def _files(manifest: dict[str, Any]) -> Iterable[Component]:
    extension = manifest.get("extension")
    for entry in [*manifest["overlay"], *([extension] if extension else [])]:
        yield Component(
            name=entry["file"],
            type=ComponentType.FILE,
            bom_ref=f"file:{entry['file']}",
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=entry["sha256"])],
            licenses=[LicenseExpression("Apache-2.0")],
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _run(root: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(
            f"`{' '.join(command)}` failed:\n{done.stdout}{done.stderr}".rstrip()
        )
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
