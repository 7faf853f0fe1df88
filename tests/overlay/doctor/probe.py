# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What engines really take, by their log and their parameters.

`measure` starts them in a process of its own, one after another: what a process takes
beyond a model is seen only in a fresh one.
"""

import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[3]
_DONE = "PROBED "
_GIB = 1 << 30
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@dataclass(frozen=True)
class Measured:
    """`tokens`: capacity of the cache, `host` and `cache`: bytes of memory that the
    engine found and set aside for the cache, all as logged; `weights`: bytes of the
    parameters after loading, of the model and of what drafts for it."""

    tokens: int
    host: float
    cache: float
    weights: int


def measure(engines: Sequence[tuple[Path, dict[str, Any]]]) -> list[Measured]:
    """Start an engine for each file and options of `LLM`."""
    job = json.dumps([[str(path), options] for path, options in engines])
    done = subprocess.run(
        [sys.executable, "-m", "tests.overlay.doctor.probe", job],
        cwd=ROOT,
        env=os.environ | _ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    *logs, _ = re.split(f"^{_DONE}.*\n", done.stdout, flags=re.MULTILINE)
    weights = re.findall(rf"^{_DONE}(\d+)$", done.stdout, re.MULTILINE)
    return [_parse(log, int(nbytes)) for log, nbytes in zip(logs, weights, strict=True)]


def _parse(log: str, weights: int) -> Measured:
    tokens = re.search(r"CPU KV cache size: ([\d,]+) tokens", log)
    memory = re.search(r"set \(([\d.]+)/([\d.]+)\) GiB for KV cache", log)
    assert tokens and memory, log
    return Measured(
        tokens=int(tokens[1].replace(",", "")),
        host=float(memory[2]) * _GIB,
        cache=float(memory[1]) * _GIB,
        weights=weights,
    )


def _run(model: str, options: dict[str, Any]) -> int:
    """Start an engine and stop it; the bytes of its parameters."""
    from vllm import LLM
    from vllm.model_executor.model_loader import gguf_loader

    load = gguf_loader.GGUFModelLoader.load_weights
    weights: list[int] = []

    def weigh(loader: Any, module: Any, config: Any) -> None:
        load(loader, module, config)
        draft = config.hf_config.model_type != "glm_moe_dsa"
        # The draft's own embedding and head are replaced by the model's.
        weights.extend(
            parameter.nbytes
            for name, parameter in module.named_parameters()
            if not (draft and gguf_loader._is_shared(name))
        )

    with mock.patch.object(gguf_loader.GGUFModelLoader, "load_weights", weigh):
        llm = LLM(model, **options)
    llm.llm_engine.engine_core.shutdown()
    return sum(weights)


def _main() -> None:
    for model, options in json.loads(sys.argv[1]):
        print(f"{_DONE}{_run(model, options)}", flush=True)
        gc.collect()


if __name__ == "__main__":
    _main()
