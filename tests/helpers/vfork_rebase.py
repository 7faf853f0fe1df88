# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Two synthetic releases as sides of a comparison, without wheels."""

from collections.abc import Mapping
from pathlib import Path

from vfork.edits import LoadedEditFile
from vfork.pin import Base, RequirementChanges
from vfork.rebase.side import Side
from vfork.rebase.states import EditState, edit_states
from vfork.rebase.tree import Store, Tree
from vfork.spec import Edit, EditFile

Files = Mapping[str, str]


def base(version: str, name: str = "cuda") -> Base:
    return Base(
        name=name,
        distribution="vllm",
        version=version,
        wheel=f"vllm-{version}-cp38-abi3-linux_x86_64.whl",
        sha256="0" * 64,
        python="3.11",
        torch="2.0.0",
        triton="",
        local="",
        requires=RequirementChanges(),
    )


def edit_file(target: str, *edits: Edit) -> LoadedEditFile:
    return LoadedEditFile(target, Path("edits", target), EditFile("test", edits))


def sides(
    old: Files,
    new: Files,
    *loaded: LoadedEditFile,
    overlay: Files | None = None,
    compiled: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset()),
) -> tuple[Side, Side]:
    """Releases 1.0 and 2.0 with these files, and the fork on each."""
    store = Store()
    ours = {path: text.encode() for path, text in (overlay or {}).items()}
    made = []
    for version, files, modules in (
        ("1.0", old, compiled[0]),
        ("2.0", new, compiled[1]),
    ):
        blobs = {path: store.blob(path, text.encode()) for path, text in files.items()}
        tree = Tree(f"vllm {version}", store, blobs, modules)
        made.append(Side(base(version), tree, loaded, ours))
    return made[0], made[1]


def state(old: Files, new: Files, *loaded: LoadedEditFile) -> EditState:
    """The state of the only edit."""
    (found,) = edit_states(*sides(old, new, *loaded))
    return found
