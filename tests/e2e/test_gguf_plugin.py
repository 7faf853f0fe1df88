# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The fork beside vllm-gguf-plugin: each loads what is its own.

The published plugin is installed into a directory of its own, without its
requirements, and put on the path of one process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.gguf_contents import read_contents
from tests.helpers.gguf_writer import Tensor, Typed, write_gguf
from tests.helpers.limits import HANG_SECONDS
from tiny_glm_dsa import TinySpec, write_tiny_glm_dsa
from vllm import EngineArgs
from vllm.transformers_utils.gguf.errors import GGUFError

PLUGIN = "vllm-gguf-plugin==0.0.5"
# For each model: is the command line let pass, and who loads it?
PROBE = """
import json, sys
from vllm import EngineArgs
from vllm.config import LoadConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.transformers_utils.gguf.serving import check_command_line

answers = {}
for path in sys.argv[1:]:
    answer = answers[path] = {}
    try:
        check_command_line(["vllm", "serve", path])
    except SystemExit as stop:
        answer["exit"] = stop.code
        continue
    args = EngineArgs(model=path)
    config = args.create_model_config()
    answer["loader"] = type(
        get_model_loader(LoadConfig(load_format=args.load_format))
    ).__module__
    answer["model_type"] = config.hf_config.model_type
    answer["quantization"] = config.quantization
json.dump(answers, sys.stdout)
"""
LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 32,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama file and its configuration, which the plugin asks for."""
    directory = tmp_path_factory.mktemp("llama")
    (directory / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "tokenizer.ggml.tokens": Typed("[string]", [f"t{i}" for i in range(32)]),
    }
    tensors = [Tensor("token_embd.weight", (64, 32)), Tensor("output_norm.weight")]
    return write_gguf(directory / "llama.gguf", metadata, tensors)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GLM file beside a configuration that would suit the plugin."""
    directory = tmp_path_factory.mktemp("glm")
    (directory / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    return write_tiny_glm_dsa(directory / "glm.gguf", TinySpec(weight_type="Q8_0"))[0]


@pytest.fixture(scope="module")
def bad_glm(glm: Path) -> Path:
    contents = read_contents(glm, data=False)
    del contents.tensors["output_norm.weight"]
    path = glm.with_name("bad.gguf")
    return write_gguf(path, contents.metadata, list(contents.tensors.values()))


@pytest.fixture(scope="module")
def answers(
    tmp_path_factory: pytest.TempPathFactory, glm: Path, bad_glm: Path, llama: Path
) -> dict[str, dict[str, Any]]:
    target = tmp_path_factory.mktemp("plugin")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    install = [*pip, "--target", str(target), PLUGIN]
    subprocess.run(install, check=True, timeout=HANG_SECONDS)
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(target))))
    run = subprocess.run(
        [sys.executable, "-c", PROBE, *map(str, (glm, bad_glm, llama))],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=HANG_SECONDS,
    )
    found: dict[str, dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return found


def test_with_the_plugin_glm_stays_with_the_fork(
    answers: dict[str, dict[str, Any]], glm: Path
) -> None:
    assert answers[str(glm)] == {
        "loader": "vllm.model_executor.model_loader.gguf_loader",
        "model_type": "glm_moe_dsa",
        "quantization": None,
    }


def test_with_the_plugin_a_bad_glm_file_is_refused_by_the_fork(
    answers: dict[str, dict[str, Any]], bad_glm: Path
) -> None:
    assert answers[str(bad_glm)] == {"exit": 1}


def test_with_the_plugin_another_architecture_goes_to_the_plugin(
    answers: dict[str, dict[str, Any]], llama: Path
) -> None:
    assert answers[str(llama)] == {
        "loader": "vllm_gguf_plugin.loader",
        "model_type": "llama",
        "quantization": "gguf",
    }


def test_without_the_plugin_the_error_names_it(llama: Path) -> None:
    with pytest.raises(GGUFError, match="pip install vllm-gguf-plugin"):
        EngineArgs(model=str(llama))
