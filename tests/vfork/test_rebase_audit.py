# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Each kind of audit finding, on two synthetic releases."""

import pytest

from tests.helpers.vfork_edits import edit
from tests.helpers.vfork_rebase import edit_file, sides
from vfork.edits import LoadedEditFile
from vfork.rebase.audit import BREAKS, NOTE, REVIEW, Audit, audit
from vfork.spec import (
    AddImport,
    AddMember,
    AppendBody,
    Class,
    Decorate,
    ExtendLiteral,
    Function,
    Module,
    PrependBody,
)
from vfork.spec import Assigned as AssignedTo

CORE = """from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal


class Mode(Enum):
    NONE = 0
    FULL = 1


@dataclass
class Config:
    size: int
    name: str = "x"
    mode: Mode = Mode.NONE
    tags: list[str] = field(default_factory=list)


class Engine(ABC):
    limit = 3

    def __init__(self, config: Config) -> None:
        self.config = config
        self.count = 0

    def run(self, batch, scale=1) -> Config:
        return self.prepare(batch)

    def prepare(self, batch):
        return self.config

    @abstractmethod
    def build(self): ...

    @property
    def ready(self) -> bool:
        return True

    @classmethod
    def create(cls, config: Config) -> "Engine": ...


def make(config: Config | None, *, fast: bool = False) -> Engine:
    return Engine(config)


def start(engine: Engine) -> None:
    engine.build()


LIMIT = 5
Kind = Literal["a", "b"]
TABLE = {"one": Engine}
current: Engine = make(None)
"""
OURS = """import torch

import vllm.core
from vllm import core
from vllm.api import Config, Engine, Mode, make
from vllm.core import LIMIT, Kind, current


class OurEngine(Engine):
    limit = 4

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra = 1

    def run(self, batch, scale=1) -> Config:
        return self.prepare(batch)

    def build(self):
        return self.config.mode == Mode.FULL, self.ready, self.count

    def own_helper(self):
        return vllm.core.LIMIT


def use(config: "Config | None") -> object:
    engine = make(config, fast=True)
    made = Config(1, name="y")
    core.start(engine)
    return engine.run(made, scale=2).size, current.count, Mode["NONE"]


def narrow(thing) -> object:
    if isinstance(thing, Config):
        return thing.tags


def soft(engine: Engine, kind: Kind) -> object:
    return getattr(engine, "later", LIMIT), torch.ops.ns.fuse(1)


PATHS = ("vllm.core.Engine", "vllm.core:TABLE")
"""
API = "from vllm.core import *\nfrom vllm.core import Config, Engine, Mode, make\n"
OPS = "import torch\n\n\ndef fuse(x):\n    return torch.ops.ns.fuse(x)\n"
FILES = {"vllm/__init__.py": "", "vllm/core.py": CORE, "vllm/api.py": API}
FILES |= {"vllm/ops.py": OPS}


def compared(
    new: dict[str, str],
    *loaded: LoadedEditFile,
    ours: str = OURS,
    old: dict[str, str] | None = None,
) -> Audit:
    files = FILES | (old or {})
    one, two = sides(files, files | new, *loaded, overlay={"vllm/ours.py": ours})
    return audit(one, two)


def changed(before: str, after: str, path: str = "vllm/core.py") -> Audit:
    assert before in FILES[path]
    return compared({path: FILES[path].replace(before, after, 1)})


def test_same_release_has_no_findings_and_sound_uses() -> None:
    found = compared({})
    assert found.findings == ()
    assert found.uses > 40
    assert found.unknown == 0


PREPARE = "    def prepare(self, batch):\n"
MAKE = "def make(config: Config | None, *, fast: bool = False)"
RUN = "def run(self, batch, scale=1)"
CREATE = "    @classmethod\n    def create(cls"
ABSTRACT = CREATE.replace("def", "@abstractmethod\n    def")


@pytest.mark.parametrize(
    ("before", "after", "code", "target"),
    [
        # names
        ("def make(", "def build_one(", "VF621", "vllm.api.make"),
        ("class Mode(Enum)", "class Modes(Enum)", "VF621", "vllm.api.Mode"),
        ("LIMIT = 5", "BOUND = 5", "VF621", "vllm.core.LIMIT"),
        ("def start(", "def launch(", "VF621", "vllm.core.start"),
        # fields, attributes, methods, enum members
        ("    size: int\n", "    length: int\n", "VF622", "vllm.core.Config.size"),
        ("    tags: list", "    labels: list", "VF622", "vllm.core.Config.tags"),
        ("    FULL = 1\n", "    HALF = 1\n", "VF622", "vllm.core.Mode.FULL"),
        ("    NONE = 0\n", "    ZERO = 0\n", "VF622", "vllm.core.Mode.NONE"),
        ("self.count = 0", "self.total = 0", "VF622", "vllm.core.Engine.count"),
        ("def ready(", "def is_ready(", "VF622", "vllm.core.Engine.ready"),
        (PREPARE, PREPARE.replace("p", "p_", 1), "VF622", "vllm.core.Engine.prepare"),
        # calls
        (MAKE, "def make(config, workers, *, fast=False)", "VF623", "vllm.core.make"),
        (MAKE, "def make(config)", "VF623", "vllm.core.make"),
        (MAKE, "def make(*, config=None, fast=False)", "VF623", "vllm.core.make"),
        ("    size: int\n", "    size: int\n    width: int\n", "VF623", "core.Config"),
        ("@dataclass\n", "@dataclass(kw_only=True)\n", "VF623", "core.Config"),
        (RUN, "def run(self, batch, factor=1)", "VF623", "vllm.core.Engine.run"),
        ("self, config: Config) -> None", "self, config, mode)", "VF623", "__init__"),
        (PREPARE, "    def prepare(self):\n", "VF623", "vllm.core.Engine.prepare"),
        ("def start(engine", "def start(a, engine", "VF623", "vllm.core.start"),
        # overrides
        (RUN, "def run(self, batch, scale=1, mask=None)", "VF624", "core.Engine.run"),
        (RUN, "def run(self, batch, scale=1, *, mask)", "VF624", "core.Engine.run"),
        (RUN, "async def run(self, batch, scale=1)", "VF624", "core.Engine.run"),
        (f"    {RUN}", f"    @property\n    {RUN}", "VF624", "core.Engine.run"),
        (RUN, "def go(self, batch, scale=1)", "VF624", "core.Engine.run"),
        ("    limit = 3\n", "", "VF624", "vllm.core.Engine.limit"),
        # abstract methods
        (PREPARE, f"    @abstractmethod\n{PREPARE}", "VF625", "vllm.ours.OurEngine"),
        (CREATE, ABSTRACT, "VF625", "OurEngine"),
        # dotted strings
        ("TABLE = ", "TABLES = ", "VF626", "vllm.core:TABLE"),
        ("class Engine(", "class Motor(", "VF626", "vllm.core.Engine"),
    ],
)  # fmt: skip
def test_use_that_breaks_is_found(
    before: str, after: str, code: str, target: str
) -> None:
    found = changed(before, after)
    hits = [f for f in found.findings if f.code == code and f.target.endswith(target)]
    assert hits, found.findings
    assert {f.severity for f in hits} == {BREAKS}
    assert all(place.startswith("vllm/ours.py:") for f in hits for place in f.places)
    assert found.findings[0].severity == BREAKS


@pytest.mark.parametrize(
    ("before", "after", "code", "target"),
    [
        ("fast: bool = False", "fast: bool = True", "VF631", "vllm.core.make"),
        (RUN, "def run(self, batch, scale=2)", "VF631", "vllm.core.Engine.run"),
        (MAKE, "def make(config, *, fast=False, slow=True)", "VF631", "vllm.core.make"),
        ("-> Engine:", '-> "Engine | None":', "VF631", "vllm.core.make"),
        ("def make(", "@cached\ndef make(", "VF631", "vllm.core.make"),
        ("LIMIT = 5", "LIMIT = 6", "VF632", "vllm.core.LIMIT"),
        ("    FULL = 1", "    FULL = 2", "VF632", "vllm.core.Mode.FULL"),
        ('"a", "b"', '"a"', "VF632", "vllm.core.Kind"),
        ("    size: int", "    size: float", "VF632", "vllm.core.Config.size"),
        ("limit = 3", "limit = 5", "VF632", "vllm.core.Engine.limit"),
        ("self.count = 0", "self.count = self.later = 0", "VF632", "Engine.later"),
        ("class Engine(ABC)", "class Engine(ABC, Mixin)", "VF633", "vllm.core.Engine"),
        ("@dataclass\n", "@dataclass\n@checked\n", "VF633", "api.Config"),
        (CREATE, f"    def own_helper(self): ...\n\n{CREATE}", "VF634", "own_helper"),
        (CREATE, f"    extra = 2\n\n{CREATE}", "VF634", "Engine.extra"),
    ],
)  # fmt: skip
def test_use_that_may_mean_something_else_is_for_review(
    before: str, after: str, code: str, target: str
) -> None:
    found = changed(before, after)
    hits = [f for f in found.findings if f.code == code and f.target.endswith(target)]
    assert hits, found.findings
    assert {f.severity for f in hits} == {REVIEW}
    assert all(f.old != f.new for f in hits)


@pytest.mark.parametrize(
    ("before", "after", "target"),
    [
        ("return Engine(config)", "return Engine(config or None)", "vllm.core.make"),
        ("engine.build()", "engine.run(1)", "vllm.core.start"),
        ("return self.config\n", "return None\n", "vllm.core.Engine.prepare"),
        ("        return True\n", "        return False\n", "vllm.core.Engine.ready"),
        ("self.count = 0", "self.count = 1", "vllm.core.Engine.__init__"),
        ("        return True\n", "        return False\n", "vllm.core.Engine"),
    ],
)
def test_code_that_changed_is_noted(before: str, after: str, target: str) -> None:
    found = changed(before, after)
    assert {f.severity for f in found.findings} == {NOTE}
    assert target in {f.target for f in found.findings}
    assert {f.code for f in found.findings} == {"VF636"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("LIMIT = 5", "# why\nLIMIT = (5)"),
        ("    return Engine(config)", '    """Doc."""\n    return Engine(config)'),
        ('TABLE = {"one": Engine}', 'TABLE = {"one": Engine, "two": 2}'),
        ("def start(", "def unused(a):\n    return a\n\n\ndef start("),
        ('    name: str = "x"\n', '    name: str = "x"\n    more: int = 0\n'),
    ],
)
def test_what_the_fork_does_not_rely_on_breaks_nothing(before: str, after: str) -> None:
    found = changed(before, after)
    assert not [f for f in found.findings if f.severity == BREAKS]
    if "more" not in after and "two" not in after:
        assert found.findings == ()


def test_definition_that_became_conditional_is_for_review() -> None:
    found = changed("LIMIT = 5", "if FLAG:\n    LIMIT = 5")
    (finding,) = found.findings
    assert (finding.code, finding.severity) == ("VF632", REVIEW)
    assert finding.new.startswith("if FLAG (body): ")


def test_name_that_moved_has_a_hint() -> None:
    body = CORE[CORE.index("def make") : CORE.index("def start")]
    new = {"vllm/core.py": CORE.replace(body, ""), "vllm/shop.py": body}
    new["vllm/api.py"] = API.replace(", make", "")
    found = next(f for f in compared(new).findings if f.code == "VF621")
    assert found.hint == "did it become make in vllm/shop.py:1 (similarity 1.00)?"


def test_reexport_from_another_module_is_no_finding() -> None:
    moved = {"vllm/core.py": "from vllm.heart import *\n", "vllm/heart.py": CORE}
    strings = [f for f in compared(moved).findings if f.severity == BREAKS]
    assert strings == []


def test_name_that_became_dynamic_cannot_be_told() -> None:
    core = CORE.replace("LIMIT = 5", "def __getattr__(name): ...")
    found = {(f.code, f.target) for f in compared({"vllm/core.py": core}).findings}
    assert ("VF635", "vllm.core.LIMIT") in found


def test_operation_that_is_gone_or_changed_is_found() -> None:
    gone = changed("torch.ops.ns.fuse(x)", "x", "vllm/ops.py")
    (finding,) = (f for f in gone.findings if f.code == "VF627")
    assert (finding.severity, finding.target) == (BREAKS, "torch.ops.ns.fuse")
    other = changed(
        "torch.ops.ns.fuse(x)", "torch.ops.ns.fuse(x, mask=1)", "vllm/ops.py"
    )
    (finding,) = other.findings
    assert (finding.code, finding.severity) == ("VF627", REVIEW)


def test_compiled_module_that_is_gone_is_found() -> None:
    one, two = sides(
        FILES,
        FILES,
        overlay={"vllm/ours.py": "import vllm._C\nfrom vllm import _C\n"},
        compiled=(frozenset({"vllm._C"}), frozenset()),
    )
    found = audit(one, two).findings
    assert {(f.code, f.target) for f in found} == {("VF621", "vllm._C")}


def test_attribute_of_a_class_with_foreign_bases_that_is_gone_is_found() -> None:
    layer = "import torch\n\n\nclass Layer(torch.nn.Module):\n    rank: int\n"
    ours = "from vllm.layer import Layer\n\n\ndef f(layer: Layer):\n"
    ours += "    return layer.rank, layer.weight\n"
    new = {"vllm/layer.py": layer.replace("rank", "tp_rank")}
    found = compared(new, ours=ours, old={"vllm/layer.py": layer})
    (finding,) = found.findings
    assert (finding.code, finding.target) == ("VF622", "vllm.layer.Layer.rank")
    assert found.unknown == 2


def test_problem_of_both_releases_is_not_reported_again() -> None:
    ours = "from vllm.core import make, gone\n\nmake(1, 2, 3)\nmake(None, slow=1)\n"
    assert compared({}, ours=ours).findings == ()
    mended = compared({"vllm/core.py": f"{CORE}\ngone = 1\n"}, ours=ours)
    assert (mended.findings, mended.mended) == ((), 1)


# Inserted statements

HOST = """from vllm.core import Engine


def host(engine: Engine, option):
    local = option
    return engine.run(local)


NAMES = ["one"]


class Registry:
    first = 1


def helper(engine):
    return engine
"""
EDITS = edit_file(
    "vllm/host.py",
    edit(Module(), AddImport("from vllm import ours as our_module"), id="import"),
    edit(
        Function("host"),
        PrependBody("if option:\n    return our_module.OurEngine(engine.config)"),
        id="prepend",
    ),
    edit(AssignedTo("NAMES"), ExtendLiteral("our_module.NAME"), id="literal"),
    edit(Class("Registry"), AddMember('second = "vllm.ours.OurEngine"'), id="member"),
    edit(Function("helper"), Decorate("our_module.wrap"), id="decorate"),
    edit(Module(), AppendBody("Registry = our_module.replace(Registry)"), id="rebind"),
)


def hosted(before: str, after: str, path: str = "vllm/host.py") -> Audit:
    files = {"vllm/host.py": HOST}
    source = (FILES | files)[path]
    assert before in source
    new = {path: source.replace(before, after, 1)}
    return compared(new, EDITS, old=files)


def test_inserted_statements_are_sound_on_the_same_release() -> None:
    assert hosted("option", "option").findings == ()


def test_inserted_statement_whose_name_is_gone_is_found() -> None:
    found = hosted(HOST, HOST.replace("option", "choice")).findings
    (finding,) = found
    assert (finding.code, finding.severity) == ("VF628", BREAKS)
    assert finding.places == ("prepend:1",)
    assert "nothing binds option" in finding.message


def test_attributes_in_inserted_statements_follow_upstream_annotations() -> None:
    found = hosted("self.config = config", "self.settings = config", "vllm/core.py")
    hits = {p for f in found.findings if f.code == "VF622" for p in f.places}
    assert "prepend:2" in hits


def test_what_an_edit_passes_has_its_upstream_type_in_our_function() -> None:
    ours = OURS + "\n\ndef hook(engine):\n    return engine.config.name\n"
    loaded = edit_file(
        "vllm/host.py",
        edit(Function("host"), PrependBody("from vllm.ours import hook\nhook(engine)")),
    )
    new = {"vllm/core.py": CORE.replace("    name: str", "    title: str")}
    found = compared(new, loaded, ours=ours, old={"vllm/host.py": HOST}).findings
    hits = [f for f in found if f.code == "VF622"]
    assert [f.target for f in hits] == ["vllm.core.Config.name"]


def test_name_that_another_edit_brings_is_bound() -> None:
    one, two = (e for e in EDITS.file.edits if e.id in ("import", "literal"))
    with_import = edit_file("vllm/host.py", one, two)
    alone = edit_file("vllm/host.py", two)
    files = {"vllm/host.py": HOST}
    for loaded, broken in ((with_import, 0), (alone, 1)):
        sound = HOST.replace("from vllm", "our_module = 1\nfrom vllm")
        if loaded is with_import:
            sound = HOST
        found = compared(files, loaded, old={"vllm/host.py": sound}).findings
        assert sum(f.code == "VF628" for f in found) == broken


def test_definition_that_an_edit_binds_anew_is_watched() -> None:
    found = hosted("    first = 1", "    first = 1\n\n    def more(self, a): ...")
    (finding,) = (f for f in found.findings if f.places == ("rebind",))
    assert (finding.code, finding.severity) == ("VF633", REVIEW)
    assert "def more(self, a)" in finding.new


def test_class_that_an_edit_stands_in_is_watched() -> None:
    found = hosted("class Registry:", "class Registry(Base):")
    hits = {f.code for f in found.findings if "member" in f.places}
    assert hits == {"VF633"}


def test_findings_of_the_same_kind_are_one_with_all_places() -> None:
    found = changed("LIMIT = 5", "LIMIT = 6")
    (finding,) = found.findings
    assert len(finding.places) == 2
