# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The documents: links lead somewhere, commands parse, quoted messages exist.

Commands are parsed by the release's own parser, of the installed release and of the
CUDA one, and by the doctor's.
"""

import argparse
import ast
import functools
import re
import shlex
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.cuda_tree import in_cuda_tree

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs/guides"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_OPTION = re.compile(r"(?<![\w-])(--[a-z][\w-]*|-[a-z]+)(?![\w-])")
_COMMAND = re.compile(r"^(?:\w+=\S+ )*vllm (serve|glm-doctor) (.+)$")


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    text = _FENCED.sub("", page.read_text("utf-8"))
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        for heading in _HEADING.findall(text)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in _LINK.findall(_FENCED.sub("", page.read_text("utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def commands() -> list[tuple[str, str, list[str]]]:
    """Guide, subcommand and arguments of each command that the guides show."""
    found = []
    for guide in sorted(GUIDES.glob("*.md")):
        text = guide.read_text("utf-8")
        lines = "\n".join(_FENCED.findall(text)).replace("\\\n", " ").splitlines()
        lines += re.findall(r"(?<!`)`([^`\n]+)`(?!`)", _FENCED.sub("", text))
        for line in lines:
            if match := _COMMAND.match(line):
                words = shlex.split(match[2].partition(" #")[0])
                found.append((guide.name, match[1], words))
    return found


@functools.cache
def parsers() -> dict[str, argparse.ArgumentParser]:
    """Of `vllm serve` and `vllm glm-doctor`. Abbreviated options are refused."""
    from vllm.entrypoints.cli.glm_doctor import GlmDoctorSubcommand
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    found = {}
    for subcommand in (ServeSubcommand(), GlmDoctorSubcommand()):
        subparsers = FlexibleArgumentParser().add_subparsers()
        found[subcommand.name] = subcommand.subparser_init(subparsers)
        found[subcommand.name].allow_abbrev = False
    return found


def unparsed() -> list[str]:
    """Commands of the guides that their parser refuses."""
    found = []
    for guide, name, words in commands():
        try:
            parsers()[name].parse_args(words)
        except SystemExit:
            found.append(f"{guide}: vllm {name} {shlex.join(words)}")
    return found


def unknown_options() -> list[str]:
    """Options anywhere in the guides that neither parser has."""
    # pip's own and curl's stand in lines of these.
    foreign = re.compile(r"^ *(pip|curl|-H|-d) .*$", re.MULTILINE)
    known = {
        option
        for parser in parsers().values()
        for option in parser._option_string_actions
    }
    return [
        f"{guide.name}: {option}"
        for guide in sorted(GUIDES.glob("*.md"))
        for option in _OPTION.findall(foreign.sub("", guide.read_text("utf-8")))
        if option.startswith("--") and option not in known
    ]


def test_there_are_commands_of_both_kinds() -> None:
    names = [name for _, name, _ in commands()]
    assert names.count("serve") > 10
    assert names.count("glm-doctor") > 3


def test_commands_parse() -> None:
    assert unparsed() == []


def test_options_exist() -> None:
    assert unknown_options() == []


@in_cuda_tree
def test_commands_parse_in_the_cuda_release() -> None:
    # The server imports it, and the CPU release does without.
    sys.modules.setdefault("orjson", types.ModuleType("orjson"))
    assert unparsed() == []
    assert unknown_options() == []


def quoted_messages() -> Iterator[str]:
    """Code in the first column of the tables of messages."""
    in_table = False
    for line in (GUIDES / "troubleshooting.md").read_text("utf-8").splitlines():
        if line.startswith("| message |"):
            in_table = True
        elif not line.startswith("|"):
            in_table = False
        elif in_table:
            yield from re.findall(r"`([^`]+)`", line.split(" | ")[0])


@functools.cache
def literals() -> str:
    """All text that the fork's modules have in string constants."""
    texts: list[str] = []
    for module in sorted((ROOT / "vllm").rglob("*.py")):
        for node in ast.walk(ast.parse(module.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_quoted_messages_are_those_of_the_code() -> None:
    quoted = list(quoted_messages())
    assert len(quoted) > 60
    strange = [
        message
        for message in quoted
        if not all(part.strip() in literals() for part in message.split("…"))
    ]
    assert strange == []
