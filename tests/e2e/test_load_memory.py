# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Host memory while loading, measured in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.limits import HANG_SECONDS
from tiny_glm_dsa import TinySpec, write_tiny_glm_dsa

# Python's and torch's own growth during a load, whatever the model.
SLACK = 24 << 20

SCRIPT = """
import json, re, sys
from pathlib import Path
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    ensure_model_parallel_initialized, init_distributed_environment)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.gguf import file_blocks
from vllm.utils.torch_utils import set_default_torch_dtype

def memory(field):
    status = Path("/proc/self/status").read_text()
    return int(re.search(field + r":\\s+(\\d+) kB", status)[1]) << 10

def through_threads(self, span, target):
    if target.device not in self._transports:
        transport = file_blocks.Transport(
            self._file.paths, file_blocks.HostLane, threads=2, buffer_bytes=1 << 20)
        self._transports[target.device] = self._open.enter_context(transport)
    self._transports[target.device].order(span, target)

options = {}
if sys.argv[3] == "threads":
    file_blocks.BlockReader.read_into = through_threads
    options["quantization"] = "gguf_native"
config = EngineArgs(sys.argv[1], max_model_len=256, enforce_eager=True,
                    kv_cache_memory_bytes=1 << 26, **options).create_engine_config()
with set_current_vllm_config(config):
    init_distributed_environment(1, 0, "file://" + sys.argv[2], 0, "gloo")
    ensure_model_parallel_initialized(1, 1)
    loader = get_model_loader(config.load_config)
    with set_default_torch_dtype(config.model_config.dtype):
        model = loader.create_model(config, config.model_config)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    loader.load_weights(model, config.model_config)
    peak = memory("VmHWM") - before
sizes = [p.numel() * p.element_size() for p in model.parameters()]
print(json.dumps({"peak": peak, "model": sum(sizes)}))
"""


def load(folder: Path, way: str) -> tuple[dict[str, int], int]:
    """What the script found, and the number of weights of the largest tensor."""
    spec = TinySpec(
        weight_type="Q8_0", layers=3, hidden=1024, experts=32, expert_ff=1024
    )
    model = write_tiny_glm_dsa(folder / "tiny.gguf", spec)[0]
    output = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), str(folder / "store"), way],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env={**os.environ, "VLLM_CACHE_ROOT": str(folder / "cache")},
    )
    assert output.returncode == 0, output.stderr[-2000:]
    found = json.loads(output.stdout.splitlines()[-1])
    return found, spec.experts * spec.expert_ff * spec.hidden


def test_peak_is_the_model_and_little_more_than_one_tensor(tmp_path: Path) -> None:
    found, weights = load(tmp_path, "mapped")
    largest = 2 * weights
    assert found["model"] > 5 * largest, "else the bound would not be of the model"
    assert found["peak"] <= found["model"] + 1.3 * largest + SLACK, found


def test_peak_is_the_model_and_the_buffers_of_the_threads(tmp_path: Path) -> None:
    found, weights = load(tmp_path, "threads")
    # Two buffers for each of two threads, and two scratch buffers.
    buffers = 8 << 20
    assert found["peak"] <= found["model"] + buffers + SLACK, found
    # 34 bytes for 32 weights.
    largest = weights * 34 // 32
    assert largest > buffers + SLACK, "else the bound would allow for a whole tensor"
