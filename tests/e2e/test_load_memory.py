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
from vllm.utils.torch_utils import set_default_torch_dtype

def memory(field):
    status = Path("/proc/self/status").read_text()
    return int(re.search(field + r":\\s+(\\d+) kB", status)[1]) << 10

config = EngineArgs(sys.argv[1], max_model_len=256, enforce_eager=True,
                    kv_cache_memory_bytes=1 << 26).create_engine_config()
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


def test_peak_is_the_model_and_little_more_than_one_tensor(tmp_path: Path) -> None:
    spec = TinySpec(
        weight_type="Q8_0", layers=3, hidden=1024, experts=32, expert_ff=1024
    )
    model = write_tiny_glm_dsa(tmp_path / "tiny.gguf", spec)[0]
    largest = spec.experts * spec.expert_ff * spec.hidden * 2
    output = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env={**os.environ, "VLLM_CACHE_ROOT": str(tmp_path / "cache")},
    )
    assert output.returncode == 0, output.stderr[-2000:]
    found = json.loads(output.stdout.splitlines()[-1])
    assert found["model"] > 5 * largest, "else the bound would not be of the model"
    assert found["peak"] <= found["model"] + 1.3 * largest + SLACK, found
