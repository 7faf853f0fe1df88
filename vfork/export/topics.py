# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Reads `upstream_topics.toml`: which edits, modules and tests make one patch."""

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vfork.errors import VforkError

TOPICS_FILE = "upstream_topics.toml"
VLLM = "vllm"

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_PATH = re.compile(r"[\w.-]+(/[\w.-]+)*/?")
_ISSUE = re.compile(r"[\w.-]+/[\w.-]+#\d+")
_TOPIC_KEYS = {
    "name",
    "title",
    "why",
    "repository",
    "needs",
    "issues",
    "edit_topics",
    "edits",
    "files",
    "moved",
    "without",
    "cpu_only",
}


@dataclass(frozen=True)
class Topic:
    """What is offered as one patch.

    `files` maps paths of the checkout to paths upstream; a path that ends in `/` stands
    for all files below it but those in `without`. An edit belongs to the topic by its
    id, or by the topic of its edit file if no topic names it. Tests in `cpu_only` are
    skipped on other platforms.
    """

    name: str
    title: str
    why: str
    repository: str
    needs: tuple[str, ...]
    issues: tuple[str, ...]
    edit_topics: tuple[str, ...]
    edits: tuple[str, ...]
    files: Mapping[str, str]
    without: tuple[str, ...]
    cpu_only: tuple[str, ...]


@dataclass(frozen=True)
class Topics:
    """All topics, in the order of the series.

    `stand_ins` maps files of the checkout to files that are exported in their place,
    `names` identifiers to the ones they get upstream. `fork_only` gives the reason for
    each path, folder or edit id that no topic takes.
    """

    topics: tuple[Topic, ...]
    stand_ins: Mapping[str, str]
    names: Mapping[str, str]
    fork_only: Mapping[str, str]

    def select(self, names: Iterable[str]) -> tuple[Topic, ...]:
        """The named topics and all that they need, in order; no name means all.

        Raises VforkError VF702 for an unknown name.
        """
        by_name = {topic.name: topic for topic in self.topics}
        wanted = [*names] or [*by_name]
        chosen: set[str] = set()
        while wanted:
            name = wanted.pop()
            if name not in by_name:
                raise VforkError(
                    "VF702",
                    f"no topic {name!r} in {TOPICS_FILE}; it has: {', '.join(by_name)}",
                )
            if name not in chosen:
                chosen.add(name)
                wanted.extend(by_name[name].needs)
        return tuple(topic for topic in self.topics if topic.name in chosen)

    def needed(self, topic: Topic) -> tuple[Topic, ...]:
        """All that a topic needs, directly or not, in order; without itself."""
        return tuple(t for t in self.select([topic.name]) if t is not topic)


def load_topics(root: Path) -> Topics:
    """Reads the topics of a checkout. Raises VforkError VF701."""
    path = root / TOPICS_FILE
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise VforkError("VF701", f"{path} cannot be read: {error}") from error
    try:
        return _topics(table)
    except (KeyError, TypeError, ValueError) as error:
        raise VforkError("VF701", f"{path}: {error}") from error


def _topics(table: dict[str, Any]) -> Topics:
    _only(table, {"topics", "stand_ins", "names", "fork_only"}, "the file")
    entries = table.get("topics", [])
    _check(isinstance(entries, list) and entries, "[[topics]] is missing")
    topics = tuple(map(_topic, entries))
    seen: set[str] = set()
    for topic in topics:
        later = set(topic.needs) - seen
        _check(not later, f"{topic.name} needs {sorted(later)}, not earlier topics")
        _check(topic.name not in seen, f"topic {topic.name} is there twice")
        foreign = [
            t.name
            for t in topics
            if t.name in topic.needs and t.repository != topic.repository
        ]
        _check(not foreign, f"{topic.name} needs {foreign} of another repository")
        seen.add(topic.name)
    return Topics(
        topics=topics,
        stand_ins=_texts(table, "stand_ins"),
        names=_texts(table, "names"),
        fork_only=_texts(table, "fork_only"),
    )


def _topic(entry: Any) -> Topic:
    _check(isinstance(entry, dict), "[[topics]] must hold tables")
    name = str(entry.get("name"))
    _check(_NAME.fullmatch(name), f"topic name {name!r} is not words and hyphens")
    _only(entry, _TOPIC_KEYS, f"topic {name}")
    title, why = _text(entry, "title"), _text(entry, "why")
    _check(title.isascii() and "\n" not in title, f"{name}: title is not a line")
    repository = entry.get("repository", VLLM)
    _check(
        isinstance(repository, str) and _NAME.fullmatch(repository),
        f"{name}: repository {repository!r} is not words and hyphens",
    )
    lists = {
        key: _list(entry, key)
        for key in ("needs", "issues", "edit_topics", "edits", "without", "cpu_only")
    }
    for issue in lists["issues"]:
        _check(_ISSUE.fullmatch(issue), f"{name}: {issue!r} is not owner/repo#number")
    files = {path: path for path in _list(entry, "files")} | _texts(entry, "moved")
    for source, target in files.items():
        pair = f"{name}: {source!r} -> {target!r}"
        _check(_plain(source) and _plain(target), f"{pair} are not relative paths")
        _check(source.endswith("/") == target.endswith("/"), f"{pair} differ in kind")
    edited = lists["edits"] or lists["edit_topics"]
    _check(
        not edited or repository == VLLM, f"{name}: only {VLLM} has files to be edited"
    )
    return Topic(
        name=name, title=title, why=why, repository=repository, files=files, **lists
    )


def _plain(path: str) -> bool:
    return bool(_PATH.fullmatch(path)) and not {".", ".."} & {*path.split("/")}


def expand(
    root: Path, topic: Topic, missing: Callable[[str], object]
) -> Iterator[tuple[str, str]]:
    """Pairs of a file of the checkout and its path upstream, sorted.

    Of two entries that take a file, the longer one counts. `missing` is told the
    entries that take no file.
    """
    taken: dict[str, str] = {}
    for source, target in sorted(topic.files.items(), key=lambda item: len(item[0])):
        found = [*files_below(root, source)]
        if not found:
            missing(source)
        for path in found:
            taken[path] = target + path.removeprefix(source)
    for entry in topic.without:
        left_out = [path for path in taken if covers(entry, path)]
        if not left_out:
            missing(entry)
        for path in left_out:
            del taken[path]
    yield from sorted(taken.items())


def covers(entry: str, path: str) -> bool:
    """Whether an entry, a path or a folder with `/`, stands for a path."""
    return path.startswith(entry) if entry.endswith("/") else path == entry


def files_below(root: Path, entry: str) -> Iterator[str]:
    """Files of the checkout that an entry stands for, without caches and hidden ones"""
    top = root / entry
    for path in sorted(top.rglob("*")) if entry.endswith("/") else [top]:
        relative = path.relative_to(root)
        hidden = any(p.startswith(".") or p == "__pycache__" for p in relative.parts)
        if path.is_file() and path.suffix != ".pyc" and not hidden:
            yield relative.as_posix()


def _check(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _only(table: Mapping[str, Any], keys: set[str], where: str) -> None:
    unknown = sorted(set(table) - keys)
    _check(not unknown, f"{where} has unknown keys {unknown}")


def _text(table: Mapping[str, Any], key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{table.get('name')}: {key} must be a text")
    return value.strip()


def _list(table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{table.get('name')}: {key} must be a list of strings")
    return tuple(value)


def _texts(table: Mapping[str, Any], key: str) -> dict[str, str]:
    value = table.get(key, {})
    if not isinstance(value, dict) or not all(
        isinstance(text, str) for text in value.values()
    ):
        raise ValueError(f"{key} must map strings to strings")
    return value
