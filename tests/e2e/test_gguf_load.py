# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The loader on a whole model, in a process of its own.

Parameters on the CPU are loaded from the memory map. The script loads them also as if
they were on another device, through threads, and then as a pipeline stage.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.limits import HANG_SECONDS
from tiny_glm_dsa import TinySpec, write_tiny_glm_dsa

SCRIPT = """
import json, sys
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    ensure_model_parallel_initialized, init_distributed_environment)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader, gguf_loader
from vllm.model_executor.model_loader.gguf import file_blocks
from vllm.model_executor.models import utils
from vllm.utils.torch_utils import set_default_torch_dtype

BlockReader, Transport = file_blocks.BlockReader, file_blocks.Transport
ordered, threads, read = [], [], []

class NotedTransport(Transport):
    def __init__(self, *args, **options):
        threads.append(options["threads"])
        super().__init__(*args, **options, buffer_bytes=10_000)

    def order(self, span, target):
        ordered.append(span.tensor)
        super().order(span, target)

def through_threads(self, span, target):
    self._shards.add(span.shard)
    self._transport(target.device).order(span, target)

class NotedReader(gguf_loader._WeightReader):
    def read(self, weight):
        read.append(weight.name)
        return super().read(weight)

config = EngineArgs(sys.argv[1], max_model_len=256, enforce_eager=True,
                    quantization="gguf_native", kv_cache_memory_bytes=1 << 26,
                    model_loader_extra_config={"num_threads": 3},
                    ).create_engine_config()
with set_current_vllm_config(config):
    init_distributed_environment(1, 0, "file://" + sys.argv[2], 0, "gloo")
    ensure_model_parallel_initialized(1, 1)
    loader = get_model_loader(config.load_config)
    with set_default_torch_dtype(config.model_config.dtype):
        model = loader.create_model(config, config.model_config)
    loader.load_weights(model, config.model_config)
    mapped = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data.zero_()
    file_blocks.Transport = NotedTransport
    BlockReader.read_into = through_threads
    gguf_loader._WeightReader = NotedReader
    loader.load_weights(model, config.model_config)
    found = dict(model.named_parameters())
    everything = list(read)
    read.clear()
    model.model.layers[1] = utils.PPMissingLayer()
    model.lm_head = utils.PPMissingLayer()
    # Which layers are missing is kept by vLLM, as it does not change.
    utils._model_to_pp_missing_layer_names.clear()
    loader.load_weights(model, config.model_config)
print(json.dumps({
    "blocks": sum(name.endswith("qweight") for name in mapped),
    "different": [n for n, p in mapped.items() if not torch.equal(p, found[n])],
    "in order": ordered,
    "threads": threads,
    "everything": everything,
    "stage": read,
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("load")
    spec = TinySpec(weight_type="mixed", layers=3, shards=2)
    model = write_tiny_glm_dsa(folder / "tiny.gguf", spec)[0]
    output = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), str(folder / "store")],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env={**os.environ, "VLLM_CACHE_ROOT": str(folder / "cache")},
    )
    assert output.returncode == 0, output.stderr[-2000:]
    assert "of GGUF blocks in " in output.stdout + output.stderr, "the rate is logged"
    return json.loads(output.stdout.splitlines()[-1])


def test_threads_load_the_same_bits_as_the_map(found: dict) -> None:
    assert found["blocks"] > 10
    assert found["different"] == []
    assert found["threads"] == [3, 3], "the option num_threads"


def test_tensors_are_read_in_the_order_of_the_file(found: dict) -> None:
    tensors = list(dict.fromkeys(found["in order"]))
    layers = [name.split(".")[1] for name in tensors if name.startswith("blk.")]
    assert len(tensors) > 20
    assert layers == sorted(layers)


def test_a_pipeline_stage_reads_nothing_of_other_stages(found: dict) -> None:
    absent = ("model.layers.1.", "lm_head.")
    expected = [name for name in found["everything"] if not name.startswith(absent)]
    assert found["stage"] == expected
    assert len(expected) < len(found["everything"])
