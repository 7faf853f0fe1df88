# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""`vllm serve` refuses a file that it cannot serve: at once, in one line, status 1."""

import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

import demo
from tests.helpers.bad_files import BAD_FILES, sound_contents
from vllm import EngineArgs
from vllm.transformers_utils.gguf.errors import GGUFError

LIMIT_SECONDS = 10
WORKERS = 2


@dataclass(frozen=True)
class Run:
    """How one `vllm` command ended."""

    status: int
    stdout: str
    stderr: str
    seconds: float
    limit: float


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
def runs(bad_files: Mapping[str, Path]) -> Iterator[Mapping[str, Future[Run]]]:
    """All commands, a few at a time."""
    with ThreadPoolExecutor(WORKERS) as pool:
        yield {name: pool.submit(serve, str(path)) for name, path in bad_files.items()}
        pool.shutdown(cancel_futures=True)


def serve(*arguments: str) -> Run:
    started = time.monotonic()
    done = subprocess.run(
        [*demo.vllm_command(), "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    seconds = time.monotonic() - started
    # On a machine busy with other work every process takes its share longer.
    share = os.getloadavg()[0] / (os.cpu_count() or 1)
    limit = LIMIT_SECONDS * max(1.0, share)
    return Run(done.returncode, done.stdout, done.stderr, seconds, limit)


def check_refusal(run: Run, path: Path, says: tuple[str, ...]) -> None:
    assert run.status == 1, run.stderr
    assert run.stdout == ""
    [line] = run.stderr.splitlines()
    assert line.startswith("vllm serve: error: ")
    assert str(path if path.is_dir() else path.parent) in line
    for text in says:
        assert text in line
    assert run.seconds < run.limit


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_in_one_line(
    name: str, runs: Mapping[str, Future[Run]], bad_files: Mapping[str, Path]
) -> None:
    check_refusal(runs[name].result(), bad_files[name], BAD_FILES[name].says)


@pytest.mark.parametrize("name", BAD_FILES)
def test_the_engine_arguments_raise_the_same(
    name: str, bad_files: Mapping[str, Path]
) -> None:
    with pytest.raises(GGUFError) as error:
        EngineArgs(model=str(bad_files[name]))
    for text in (str(bad_files[name].parent), *BAD_FILES[name].says):
        assert text in str(error.value)


def test_a_model_after_other_options_is_refused_in_one_line(
    bad_files: Mapping[str, Path],
) -> None:
    path = bad_files["version-1"]
    run = serve("--port", "1", str(path))
    assert run.status == 1
    assert run.stderr.splitlines()[-1].startswith("vllm serve: error: ")
    assert "Traceback" not in run.stderr
    assert "GGUF version 1" in run.stderr


def test_an_option_against_the_file_is_refused_in_one_line(
    bad_files: Mapping[str, Path],
) -> None:
    sound = bad_files["version-1"].parents[1] / "sound.gguf"
    run = serve(str(sound), "--quantization", "fp8")
    assert run.status == 1
    assert "--quantization fp8" in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr
