# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""`vllm glm-doctor` in this process, on the CPU build."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.bad_files import BAD_FILES, sound_contents
from tests.helpers.gguf_contents import Contents
from tests.overlay.doctor.glm5 import write_glm5
from vllm import EngineArgs
from vllm.entrypoints.cli import glm_doctor
from vllm.transformers_utils.gguf.artifacts import prepare_model
from vllm.transformers_utils.gguf.errors import GGUFError
from vllm.utils.argparse_utils import FlexibleArgumentParser

PAGE = Path(__file__).parents[3] / "docs" / "doctor.md"
GPUS = ("--gpus", "8", "--gpu-memory", "96")
TOKENIZER = ("--tokenizer", "glm")

Doctor = Callable[..., tuple[int, str, str]]


@pytest.fixture
def doctor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Doctor:
    """Runs the command; its status, standard output and standard error."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            glm_doctor.run_early(["vllm", "glm-doctor", *arguments])
        out, err = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, out, err

    return run


@pytest.fixture(scope="module")
def glm5(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_glm5(tmp_path_factory.mktemp("glm5")))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Contents]:
    """A tiny file that can be served, and its keys and tensors."""
    directory = tmp_path_factory.mktemp("sound")
    return directory / "sound.gguf", sound_contents(directory)


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_gets_the_line_that_serving_gives(
    doctor: Doctor, name: str, tmp_path: Path, sound: tuple[Path, Contents]
) -> None:
    path = BAD_FILES[name].make(tmp_path, sound[1])
    with pytest.raises(GGUFError) as refusal:
        prepare_model(path, tmp_path / "cache")
    status, out, err = doctor(str(path))
    assert (status, out) == (1, "")
    assert err == f"vllm glm-doctor: error: {refusal.value}\n"
    for text in BAD_FILES[name].says:
        assert text in err


def test_a_bad_file_as_json(doctor: Doctor, tmp_path: Path) -> None:
    path = str(tmp_path / "absent.gguf")
    status, out, err = doctor(path, "--json")
    found = json.loads(out)
    assert (status, err) == (1, "")
    assert (found["path"], found["runs"], found["command"]) == (path, False, None)
    [finding] = found["findings"]
    assert finding["level"] == "error"
    assert "no such file" in finding["text"]


def test_another_tokenizer_makes_up_for_the_files(
    doctor: Doctor, tmp_path: Path, sound: tuple[Path, Contents]
) -> None:
    path = str(BAD_FILES["other-tokenizer"].make(tmp_path, sound[1]))
    status, out, _ = doctor(path, "--tokenizer", "elsewhere/glm")
    assert status == 0
    assert out.endswith("--tokenizer elsewhere/glm --max-model-len 2048\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--gpus", "8"), "--gpu-memory"),
        (("--mtp", "1"), "converted without"),
    ],
    ids=["memory-open", "no-mtp-block"],
)
def test_what_cannot_be_answered_is_told_in_one_line(
    doctor: Doctor,
    sound: tuple[Path, Contents],
    arguments: tuple[str, ...],
    says: str,
) -> None:
    status, out, err = doctor(str(sound[0]), *arguments)
    assert (status, out) == (1, "")
    [line] = err.splitlines()
    assert line.startswith("vllm glm-doctor: error: ")
    assert says in line


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--gpus", "0"),
        ("--gpu-memory", "much"),
        ("--capability", "sm_120"),
        ("--max-model-len", "-5"),
        ("--gpu-memory-utilization", "1.5"),
        ("--kv-cache-dtype", "int4"),
        ("--unknown",),
    ],
    ids=str,
)
def test_wrong_usage_ends_with_status_2(
    doctor: Doctor, sound: tuple[Path, Contents], arguments: tuple[str, ...]
) -> None:
    model = (str(sound[0]),) if arguments else ()
    status, out, err = doctor(*model, *arguments)
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith("vllm glm-doctor: error: ")


def documented() -> dict[str, set[str]]:
    """Field -> names in the description of it, as the page has them."""
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", text)) for name, text in rows}


def keys(value: Any) -> set[str]:
    """All keys of objects and of objects in their lists."""
    if isinstance(value, list):
        return set().union(*map(keys, value))
    if not isinstance(value, dict):
        return set()
    return set(value).union(*(keys(part) for part in value.values()))


def test_the_fields_are_those_of_the_page(doctor: Doctor, glm5: str) -> None:
    status, out, _ = doctor(glm5, "--json", *GPUS, *TOKENIZER, "--mtp", "1")
    found = json.loads(out)
    assert status == 0
    page = documented()
    assert set(found) == set(page)
    # Names of layers, buffers and backends are no fields.
    for open_object in ("buffers_bytes", "rejected"):
        found["memory"].pop(open_object, None)
    for stage in found["memory"]["stages"]:
        stage["parts_bytes"] = {}
    for row in found["caches"]:
        row["rejected"] = {}
    for name, value in found.items():
        assert keys(value) <= page[name], name
    assert keys(found["contents"]) == page["contents"]
    assert keys(found["degrees"]) == page["degrees"]
    assert keys(found["caches"]) == page["caches"]


def test_gpus_get_figures_but_no_backend_from_the_cpu_build(
    doctor: Doctor, glm5: str
) -> None:
    status, out, _ = doctor(glm5, *GPUS, *TOKENIZER, "--capability", "12.0")
    assert status == 0
    assert "machine   8 x GPU, 96.0 GiB each, compute capability 12.0" in out
    assert re.search(r"fp8_ds_mla +not told +fp8_ds_mla +53,940", out)
    assert "no GPU selector" in out.replace("\n    ", " ")
    assert "GLM-5.3" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--gpus", "16", "--gpu-memory", "96", "-tp", "16"), "Q5_K blocks of 256"),
        (("--gpus", "4", "--gpu-memory", "96"), "does not fit: each GPU needs"),
        (("--gpus", "6", "--gpu-memory", "140", "-tp", "6"), "64 attention heads"),
        ((*GPUS, "-tp", "16", "-ep"), "needs 16 GPUs, but there are 8"),
        ((*GPUS, "-tp", "4", "-pp", "2", "--mtp", "1"), "one pipeline stage, not 2"),
        ((*GPUS, "-tp", "8", "--max-model-len", "1M"), "the longest that does is"),
        ((*GPUS, "--max-model-len", "2M"), "more than the 1048576 of the file"),
        (("--kv-cache-dtype", "fp8"), "not supported by CPU_MLA_SPARSE"),
        (("-pp", "2"), "--pipeline-parallel-size 2 is not supported"),
        (("-tp", "2", "-ep"), "--enable-expert-parallel crashes"),
    ],
    ids=[
        *("cut", "memory", "uneven", "gpus", "drafts", "length"),
        *("context", "cache", "pp", "ep"),
    ],
)
def test_what_would_not_run_ends_with_status_1(
    doctor: Doctor, glm5: str, arguments: tuple[str, ...], says: str
) -> None:
    status, out, _ = doctor(glm5, *arguments, *TOKENIZER)
    assert status == 1
    assert out.endswith("\n\nThis would not run.\n")
    errors = [part for part in out.split("\n\n") if part.startswith("error: ")]
    assert says in re.sub(r"\s+", " ", errors[0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (GPUS, ["--tensor-parallel-size", "8"]),
        (("--gpus", "16", "--gpu-memory", "48"), ["--enable-expert-parallel"]),
        ((*GPUS, "--mtp", "3", "--dtype", "float16"), ["--speculative-config"]),
        ((*GPUS, "--max-model-len", "500k"), ["--kv-cache-dtype", "fp8_ds_mla"]),
        # Stages share the cache of one request.
        ((*GPUS, "--max-model-len", "1M"), ["--pipeline-parallel-size"]),
        (
            (*GPUS, "-tp", "4", "-pp", "2", "--gpu-memory-utilization", "0.95"),
            ["--pipeline-parallel-size", "2"],
        ),
    ],
    ids=["plain", "experts", "mtp", "length", "longest", "stages"],
)
def test_the_server_takes_the_printed_command(
    doctor: Doctor, glm5: str, arguments: tuple[str, ...], words: list[str]
) -> None:
    status, out, _ = doctor(glm5, *arguments, *TOKENIZER)
    assert status == 0, out
    command = shlex.split(out.splitlines()[-1])
    if "--pipeline-parallel-size" in words:
        # 39, where vLLM would begin the second stage, shares an indexer.
        assert command.pop(0) == "VLLM_PP_LAYER_PARTITION=38,40"
    assert command[:3] == ["vllm", "serve", glm5]
    for word in words:
        assert word in command
    assert "--enforce-eager" not in command
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args(command[3:])
    given = dict(zip(arguments, arguments[1:], strict=False))
    assert parsed.dtype == given.get("--dtype", "auto")
    assert parsed.max_model_len > 0


def test_the_machine_is_the_host_unless_told(
    doctor: Doctor, sound: tuple[Path, Contents], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, _ = doctor(str(sound[0]), "--json")
    found = json.loads(out)
    assert status == 0
    assert found["machine"]["kind"] == "cpu"
    assert found["machine"]["here"]
    assert found["indexer"]["path"] == "CPUIndexer"
    assert {row["backend"] for row in found["caches"]} == {"CPU_MLA_SPARSE"}
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    space = json.loads(doctor(str(sound[0]), "--json")[1])
    row = space["caches"][0]
    assert row["tokens"] == (1 << 30) // (row["token_bytes"] * 128) * 128


def test_only_the_report_goes_to_standard_output(
    doctor: Doctor, sound: tuple[Path, Contents]
) -> None:
    _, out, err = doctor(str(sound[0]))
    assert out.startswith("model ")
    assert err == ""


def test_other_commands_are_left_alone() -> None:
    glm_doctor.run_early(["vllm", "serve", "glm-doctor"])
    glm_doctor.run_early(["vllm"])


def test_the_command_line_lists_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.entrypoints.cli.main import main

    monkeypatch.setattr(sys, "argv", ["vllm", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert re.search(r"glm-doctor +Say whether a machine", capsys.readouterr().out)
