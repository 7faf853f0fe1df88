# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Turns topics into the changes of a series of patches on one release."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vfork.apply import render
from vfork.edits import LoadedEditFile, applies, blame, load_edits
from vfork.errors import VforkError
from vfork.export.closure import (
    checkout_modules,
    lacking,
    module_names,
    undefined,
    used_by_edit,
    used_by_source,
)
from vfork.export.conventions import Conventions, conform
from vfork.export.imports import module_name
from vfork.export.patch import Change
from vfork.export.tidy import tidy
from vfork.export.topics import (
    TOPICS_FILE,
    VLLM,
    Topic,
    Topics,
    covers,
    expand,
    files_below,
)
from vfork.overlay import check_overlay
from vfork.pin import Base
from vfork.release import Release
from vfork.report import op_source
from vfork.source import parse_quietly
from vfork.spec import Edit

# Everything in these folders is exported, or has a reason not to be.
COVERED = ("vllm/", "tests/overlay/", "csrc/")


@dataclass(frozen=True)
class TopicChange:
    """What a topic changes after the topics before it."""

    topic: Topic
    edits: tuple[tuple[str, Edit], ...]
    changes: tuple[Change, ...]


class Checkout:
    """The files and edits of a checkout by topic, on one base."""

    def __init__(self, root: Path, base: Base, topics: Topics) -> None:
        self.root, self.base, self.topics = root, base, topics
        self.loaded = load_edits(root)
        self.errors: list[VforkError] = []
        self.files = {
            topic.name: dict(expand(root, topic, self._missing(topic)))
            for topic in topics.topics
        }
        self.edits = {topic.name: self._edits_of(topic) for topic in topics.topics}
        self._check_names()

    def _missing(self, topic: Topic) -> Callable[[str], None]:
        return lambda entry: self._unknown(f"{topic.name}: no file {entry}")

    def _unknown(self, what: str) -> None:
        self.errors.append(
            VforkError("VF703", what, hint=f"bring {TOPICS_FILE} up to date")
        )

    def _named(self) -> dict[str, tuple[LoadedEditFile, Edit]]:
        return {e.id: (file, e) for file in self.loaded for e in file.file.edits}

    def _edits_of(self, topic: Topic) -> tuple[tuple[str, Edit], ...]:
        """Pairs of target and edit, those that are not for this base included."""
        claimed = {name for other in self.topics.topics for name in other.edits}
        return tuple(
            (file.target, edit)
            for file, edit in self._named().values()
            if edit.id in topic.edits
            or (edit.id not in claimed and file.file.topic in topic.edit_topics)
        )

    def _check_names(self) -> None:
        named = self._named()
        groups = {file.file.topic for file in self.loaded}
        for topic in self.topics.topics:
            for name in topic.edits:
                if name not in named:
                    self._unknown(f"{topic.name}: no edit {name}")
            for name in topic.edit_topics:
                if name not in groups:
                    self._unknown(f"{topic.name}: no edit file of topic {name}")
            for name in topic.cpu_only:
                if name not in self.files[topic.name]:
                    self._unknown(f"{topic.name}: cpu_only names no file: {name}")
        for path in (*self.topics.stand_ins, *self.topics.stand_ins.values()):
            if not (self.root / path).is_file():
                self._unknown(f"stand_ins: no file {path}")
        for entry in self.topics.fork_only:
            found = [*files_below(self.root, entry)] or entry in named
            if not found:
                self._unknown(f"fork_only: no file or edit {entry}")

    def uncovered(self) -> list[VforkError]:
        """VF704 for each file and edit that has neither a topic nor a reason."""
        ours = [topic for topic in self.topics.topics if topic.repository == VLLM]
        taken = {path for topic in ours for path in self.files[topic.name]}
        edits = {edit.id for topic in ours for _, edit in self.edits[topic.name]}
        left = [
            path
            for folder in COVERED
            for path in files_below(self.root, folder)
            if path not in taken and not self._kept(path)
        ]
        left += [n for n in self._named() if n not in edits and not self._kept(n)]
        return [
            VforkError(
                "VF704",
                f"no topic takes {name}",
                hint=f"add it to a topic of {TOPICS_FILE}, or to fork_only with the "
                "reason",
            )
            for name in left
        ]

    def _kept(self, name: str) -> bool:
        return any(covers(entry, name) for entry in self.topics.fork_only)

    def read(self, path: str) -> bytes:
        """A file to export, or its stand-in."""
        return (self.root / self.topics.stand_ins.get(path, path)).read_bytes()

    def source(self, path: str) -> str:
        """A Python file to export. Raises VforkError VF706 if it is none."""
        try:
            text = self.read(path).decode("utf-8")
            parse_quietly(text)
        except (UnicodeDecodeError, SyntaxError, ValueError) as error:
            raise VforkError("VF706", f"{path} is not Python: {error}") from error
        return text


def check_closure(checkout: Checkout, selected: Sequence[Topic]) -> list[VforkError]:
    """VF705 for whatever a topic uses and neither brings nor needs."""
    modules = checkout_modules(checkout.root)
    errors: list[VforkError] = []
    for topic in selected:
        needed = checkout.topics.needed(topic)
        has = {path for t in (*needed, topic) for path in checkout.files[t.name]}
        for path in checkout.files[topic.name]:
            if path.endswith(".py"):
                text = checkout.source(path)
                used = used_by_source(path, text)
                errors += lacking(topic.name, path, used, modules, has)
                errors += _undefined(checkout, path, text)
        for _, edit in checkout.edits[topic.name]:
            used_here = used_by_edit(op_source(edit.op))
            errors += lacking(topic.name, f"edit {edit.id}", used_here, modules, has)
    return errors


def _undefined(checkout: Checkout, path: str, text: str) -> Iterator[VforkError]:
    for replaced in checkout.topics.stand_ins:
        if replaced != path and Path(replaced).stem in text:
            other = checkout.source(replaced)
            stand_in = checkout.topics.stand_ins[replaced]
            yield from undefined(path, text, stand_in, other, module_names(replaced))


def make_series(
    checkout: Checkout, release: Release, selected: Sequence[Topic]
) -> list[TopicChange]:
    """The changes of the topics of one repository, each on top of those before.

    Raises VforkError for an edit that does not resolve or a file that cannot be
    exported.
    """
    edited: dict[str, set[str]] = {}
    added: set[str] = set()
    series = []
    for topic in selected:
        made = _added_files(checkout, release, topic, added)
        applied, changed = _edited_files(checkout, release, topic, edited)
        changes = (*made, *changed)
        # git takes no patch without a change.
        if changes:
            series.append(TopicChange(topic, applied, changes))
        added |= {change.path for change in made}
    return series


def _added_files(
    checkout: Checkout, release: Release, topic: Topic, added: set[str]
) -> list[Change]:
    files = checkout.files[topic.name]
    rules = _conventions(checkout, topic)
    if topic.repository == VLLM:
        check_overlay([p for p in files.values() if p.startswith("vllm/")], release)
    made = []
    for source, target in files.items():
        if target in added:
            continue
        data = conform(
            source,
            target,
            checkout.read(source),
            rules,
            cpu_only=source in topic.cpu_only,
        )
        mode = (checkout.root / source).stat().st_mode & 0o777
        made.append(Change(target, None, data, mode))
    return made


def _conventions(checkout: Checkout, topic: Topic) -> Conventions:
    moved: dict[str, str] = {}
    for other in (*checkout.topics.needed(topic), topic):
        moved |= checkout.files[other.name]
    modules = {
        name: module_name(target)
        for source, target in moved.items()
        if source != target
        for name in module_names(source)
    }
    own = (topic.repository.replace("-", "_"), "tests")
    return Conventions(
        modules={name: new for name, new in modules.items() if new},
        paths={s: t for s, t in moved.items() if s != t},
        names=checkout.topics.names,
        first_party=own,
    )


def _edited_files(
    checkout: Checkout,
    release: Release,
    topic: Topic,
    edited: dict[str, set[str]],
) -> tuple[tuple[tuple[str, Edit], ...], list[Change]]:
    """The edits that are new in a topic, and the files that they change."""
    base = checkout.base
    fresh = tuple(
        (target, edit)
        for target, edit in checkout.edits[topic.name]
        if applies(edit, base.name, base.version)
        and edit.id not in edited.get(target, ())
    )
    changes = []
    for target in sorted({target for target, _ in fresh}):
        before = _rendered(checkout, release, target, edited.get(target, set()))
        edited.setdefault(target, set()).update(e.id for t, e in fresh if t == target)
        after = _rendered(checkout, release, target, edited[target])
        mode = release.info(target).external_attr >> 16 & 0o777
        changes.append(Change(target, before, after, mode))
    return fresh, changes


def _rendered(
    checkout: Checkout, release: Release, target: str, ids: set[str]
) -> bytes:
    (loaded,) = (file for file in checkout.loaded if file.target == target)
    edits = tuple(edit for edit in loaded.file.edits if edit.id in ids)
    file = dataclasses.replace(loaded.file, edits=edits)
    with blame(loaded.ref(edits[0] if edits else loaded.file.edits[0])):
        source = release.read(target)
    part = LoadedEditFile(target, loaded.path, file)
    base = checkout.base
    data = render(source, part, base.name, base.version, notice=False).data
    return tidy(source.decode(), data.decode()).encode()


def remarks(changes: Sequence[TopicChange]) -> Mapping[str, list[str]]:
    """Places in exported files that speak of the fork or its documents, by topic: a
    person rewords them before a patch is offered."""
    words = ("vfork", "the fork", "glm-dsa project", "docs/design/")
    return {
        item.topic.name: [
            f"{change.path}:{number}: {line.strip()}"
            for change in item.changes
            if change.before is None
            for number, line in enumerate(change.after.decode().split("\n"), start=1)
            if any(word in line.lower() for word in words)
        ]
        for item in changes
    }
