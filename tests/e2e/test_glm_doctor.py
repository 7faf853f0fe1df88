# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""`vllm glm-doctor` beside the engine: the same memory, by the engine's log."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import demo
from tests.overlay.doctor.probe import Measured, measure
from tiny_glm_dsa import TinySpec, write_tiny_glm_dsa
from vllm.transformers_utils.gguf.doctor.diagnosis import Diagnosis, diagnose
from vllm.transformers_utils.gguf.doctor.machine import GIB, Machine, host_memory
from vllm.transformers_utils.gguf.doctor.trial import Request

RUN_BYTES = 4 * GIB
CACHE_BYTES = 100_000_000
TOLERANCE = 0.03
# The part of the host that the first engine may take.
PART = RUN_BYTES / host_memory()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every type that llama.cpp writes, IndexShare, and an MTP block."""
    path = tmp_path_factory.mktemp("mixed") / "mixed.gguf"
    spec = TinySpec(weight_type="mixed", mtp=True, shared_indexers="absent")
    return write_tiny_glm_dsa(path, spec)[0]


@pytest.fixture(scope="module")
def measured(mixed: Path) -> list[Measured]:
    """Engines on the trained file in the memory they find, and on the mixed file."""
    written: dict[str, Any] = {
        "dtype": "float32",
        "quantization": "gguf_native",
        "max_model_len": 1000,
        "kv_cache_memory_bytes": CACHE_BYTES,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
    }
    return measure([(demo.MODEL, {"gpu_memory_utilization": PART}), (mixed, written)])


def examine(path: Path, found: Measured, request: Request) -> Diagnosis:
    """The diagnosis of the machine on which the engine ran."""
    machine = Machine("cpu", 1, int(found.host), None, "CPU", True)
    diagnosis = diagnose(path, machine, request)
    assert diagnosis.runs
    return diagnosis


def check(diagnosis: Diagnosis, found: Measured, tolerance: float) -> None:
    assert diagnosis.trial is not None
    assert diagnosis.trial.chosen is not None
    assert sum(stage.total for stage in diagnosis.trial.weights) == found.weights
    tokens = diagnosis.trial.chosen.tokens
    assert abs(tokens - found.tokens) <= tolerance * found.tokens


def test_the_engine_takes_what_it_finds_left(measured: list[Measured]) -> None:
    request = Request(utilization=PART)
    diagnosis = examine(demo.MODEL, measured[0], request)
    check(diagnosis, measured[0], TOLERANCE)
    trial = diagnosis.trial
    assert trial is not None
    rest = sum(trial.buffers.values()) + trial.overhead + trial.weights[0].total
    assert abs(trial.budget - rest - measured[0].cache) <= TOLERANCE * measured[0].cache


def test_blocks_float32_and_a_draft(mixed: Path, measured: list[Measured]) -> None:
    request = Request(
        dtype="float32",
        keep_blocks=True,
        length=1000,
        cache_memory=CACHE_BYTES,
        draft_tokens=1,
    )
    check(examine(mixed, measured[1], request), measured[1], 0)


def test_the_command_of_the_shell() -> None:
    done = subprocess.run(
        [*demo.vllm_command(), "glm-doctor", str(demo.MODEL), "--json"],
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["runs"]
    assert found["command"] == (
        f"vllm serve {demo.MODEL} --max-model-len 2048 "
        f"--kv-cache-memory-bytes {1 << 30}"
    )
    # As the engine's log says for this file and space; see docs/doctor.md.
    assert found["caches"][0]["tokens"] == 209_664
