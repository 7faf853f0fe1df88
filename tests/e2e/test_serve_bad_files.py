# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""`vllm serve` refuses a file that it cannot serve: at once, in one line, status 1.

"At once" is a matter of CPU time, which does not depend on what else the machine does.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.helpers.bad_files import BAD_FILES, sound_contents
from tests.helpers.vllm_command import Run, fork_vllm, run_vllm
from vllm import EngineArgs
from vllm.transformers_utils.gguf.errors import GGUFError

# To import vLLM takes 5 s, to import the server as well 10, an engine more than 20.
COMMAND_CPU_SECONDS = 15
# After vLLM was imported; it takes 0.2 s.
CHECK_CPU_SECONDS = 2
# One of each way to the error: a file, a directory, a shard, another architecture.
COMMANDS = ("not-a-gguf", "directory", "missing-shard", "other-architecture")


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("bad")
    sound = sound_contents(root)
    paths = {}
    for name, bad in BAD_FILES.items():
        directory = root / name
        directory.mkdir()
        paths[name] = bad.make(directory, sound)
    return paths


@pytest.fixture(scope="module")
def runs(
    bad_files: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Run]:
    """What happens to each bad file, and to the two commands below."""
    commands = {name: ("serve", str(path)) for name, path in bad_files.items()}
    bad = bad_files["version-1"]
    commands["other options first"] = ("serve", "--port", "1", str(bad))
    sound = bad.parents[1] / "sound.gguf"
    commands["option"] = ("serve", str(sound), "--quantization", "fp8")
    ended = fork_vllm(tmp_path_factory.mktemp("runs"), list(commands.values()))
    return dict(zip(commands, ended, strict=True))


def check_refusal(run: Run, path: Path, says: tuple[str, ...]) -> None:
    assert run.status == 1, run.stderr
    assert run.stdout == ""
    [line] = run.stderr.splitlines()
    assert line.startswith("vllm serve: error: ")
    assert str(path if path.is_dir() else path.parent) in line
    for text in says:
        assert text in line


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_in_one_line(
    name: str, runs: Mapping[str, Run], bad_files: Mapping[str, Path]
) -> None:
    check_refusal(runs[name], bad_files[name], BAD_FILES[name].says)
    assert runs[name].cpu < CHECK_CPU_SECONDS


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_says_nothing_else(
    name: str, bad_files: Mapping[str, Path]
) -> None:
    run = run_vllm("serve", str(bad_files[name]))
    check_refusal(run, bad_files[name], BAD_FILES[name].says)
    assert run.cpu < COMMAND_CPU_SECONDS


@pytest.mark.parametrize("name", BAD_FILES)
def test_the_engine_arguments_raise_the_same(
    name: str, bad_files: Mapping[str, Path]
) -> None:
    with pytest.raises(GGUFError) as error:
        EngineArgs(model=str(bad_files[name]))
    for text in (str(bad_files[name].parent), *BAD_FILES[name].says):
        assert text in str(error.value)


def test_a_model_after_other_options_is_refused_in_one_line(
    runs: Mapping[str, Run],
) -> None:
    run = runs["other options first"]
    assert run.status == 1
    assert run.stderr.splitlines()[-1].startswith("vllm serve: error: ")
    assert "Traceback" not in run.stderr
    assert "GGUF version 1" in run.stderr


def test_an_option_against_the_file_is_refused_in_one_line(
    runs: Mapping[str, Run],
) -> None:
    run = runs["option"]
    assert run.status == 1
    assert "--quantization fp8" in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr
