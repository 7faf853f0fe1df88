# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What `drop_when` and `forwarded` say, looked for in a new release."""

import re
from collections.abc import Iterator

from vfork.edits import LoadedEditFile
from vfork.rebase.audit import NOTE, REVIEW, Finding
from vfork.rebase.facts import fingerprint
from vfork.rebase.side import Side
from vfork.rebase.tree import Tree
from vfork.source import qualified_names
from vfork.spec import Edit

_LINK = re.compile(r"https?://\S+/(?:issues|pull)/(\d+)|(?<!\w)#(\d+)")
# Words that can only be names of code: dotted, with an underscore, or with humps.
_NAME = re.compile(r"\b(?:\w+\.)+\w+\b|\b\w*[a-z0-9A-Z]_\w+\b|\b[A-Z][a-z]+[A-Z]\w*\b")
_EDIT = re.compile(r"\bedits? ([a-z0-9-]+)")


def compare_mentions(old: Side, new: Side) -> list[Finding]:
    """Events that may have come: each for people to judge."""
    ids = {e.id for file in new.loaded for e in file.file.edits}
    found: list[Finding] = []
    for file in new.loaded:
        for edit in file.file.edits:
            if new.wants(file, edit.id):
                found += _links(edit, old.tree, new.tree)
                found += _names(file, edit, old.tree, new.tree)
                found += _edits(edit, ids)
    return found


def _links(edit: Edit, old: Tree, new: Tree) -> Iterator[Finding]:
    for field in ("drop_when", "forwarded"):
        for match in _LINK.finditer(getattr(edit, field)):
            number = match[1] or match[2]
            paths = _new_mentions(number, old, new)
            message = (
                f"{field} of {edit.id} names it; look whether it is in {new.label}"
            )
            if paths:
                message += f"; files that mention #{number} now: {', '.join(paths[:4])}"
            yield Finding(
                "VF646", REVIEW if paths else NOTE, match[0], message, (edit.id,)
            )


def _new_mentions(number: str, old: Tree, new: Tree) -> list[str]:
    pattern = re.compile(rb"(?:#|/(?:issues|pull)/)%s\b" % number.encode())

    def paths(tree: Tree) -> set[str]:
        digits = number.encode()
        return {
            path
            for path, blob in tree.blobs.items()
            if digits in blob.data and pattern.search(blob.data)
        }

    return sorted(paths(new) - paths(old))


def _names(file: LoadedEditFile, edit: Edit, old: Tree, new: Tree) -> Iterator[Finding]:
    """Definitions that `drop_when` names and that came, went or changed."""
    for name in dict.fromkeys(_NAME.findall(edit.drop_when)):
        last = name.rpartition(".")[2]
        before, after = (_definitions(name, last, tree) for tree in (old, new))
        if before == after:
            continue
        paths = sorted({p for p, _ in before ^ after})
        yield Finding(
            "VF646",
            REVIEW,
            name,
            f"drop_when of {edit.id} names it, and it changed: {', '.join(paths[:4])}",
            (edit.id,),
            hint=f"see whether this has come: {' '.join(edit.drop_when.split())}",
        )


def _definitions(name: str, last: str, tree: Tree) -> set[tuple[str, str]]:
    """Path and fingerprint of all definitions whose qualified name ends in a name."""
    found = set()
    for path in tree.defining(last):
        module = tree.blobs[path].module
        if module is None:
            continue
        for qualified, place in qualified_names(module):
            if f".{qualified}".endswith(f".{name}"):
                found.add((path, fingerprint(place.stmt)))
    return found


def _edits(edit: Edit, ids: set[str]) -> Iterator[Finding]:
    """An edit goes with the one it belongs to."""
    for field in ("drop_when", "forwarded"):
        for name in _EDIT.findall(getattr(edit, field)):
            if "-" in name and name not in ids:
                yield Finding(
                    "VF646",
                    REVIEW,
                    name,
                    f"{field} of {edit.id} names the edit {name}, which is not there",
                    (edit.id,),
                    hint="drop the edit, or say another event",
                )
