# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project

import copy
import pickle
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from transformers import PreTrainedConfig

from tiny_glm_dsa import TinySpec, write_tiny_glm_dsa
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import linear as vllm_linear
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.quantization.gguf import config as config_module
from vllm.model_executor.layers.quantization.gguf.config import GGUFConfig
from vllm.model_executor.layers.quantization.gguf.linear import GGUFLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.transformers_utils.gguf.artifacts import load_plan, prepare_model
from vllm.transformers_utils.gguf.errors import GGUFError
from vllm.transformers_utils.gguf.ggml_types import GGML_TYPES_BY_NAME

pytestmark = pytest.mark.usefixtures("vllm_layers")


def config(**types: str) -> GGUFConfig:
    """Types by module name, with `__` for each dot."""
    return GGUFConfig(
        {
            name.replace("__", "."): GGML_TYPES_BY_NAME[kind]
            for name, kind in types.items()
        }
    )


def fused_qkv_a(quant_config: GGUFConfig) -> vllm_linear.LinearBase:
    return vllm_linear.MergedColumnParallelLinear(
        256,
        [64, 32],
        bias=False,
        quant_config=quant_config,
        prefix="m.fused_qkv_a_proj",
        disable_tp=True,
    )


def test_the_method_is_known_by_name():
    assert "gguf_native" in quantization.QUANTIZATION_METHODS
    assert "gguf_native" in get_args(quantization.QuantizationMethods)
    assert quantization.get_quantization_config("gguf_native") is GGUFConfig
    assert quantization.get_quantization_config("fp8") is not GGUFConfig


@pytest.mark.parametrize(
    "quant_config",
    [config(), config(m__q_a_proj="BF16"), config(m__q_a_proj="F32", other="Q4_K")],
    ids=["absent", "float", "other-module"],
)
def test_layers_without_quantized_modules_are_the_releases_own(quant_config):
    layer = fused_qkv_a(quant_config)
    assert type(layer.quant_method) is vllm_linear.UnquantizedLinearMethod
    assert layer.weight.shape == (96, 256)


def test_one_quantized_module_makes_the_fused_layer_keep_blocks():
    layer = fused_qkv_a(config(m__q_a_proj="BF16", m__kv_a_proj_with_mqa="Q8_0"))
    assert isinstance(layer.quant_method, GGUFLinearMethod)
    assert [shard.kind.name for shard in layer.gguf_shards] == ["BF16", "Q8_0"]


def test_a_module_of_unknown_type_beside_a_quantized_one_is_an_error():
    message = r"m\.fused_qkv_a_proj fuses .* m\.kv_a_proj_with_mqa has none"
    with pytest.raises(ValueError, match=message):
        fused_qkv_a(config(m__q_a_proj="Q4_K"))


def test_the_models_own_packing_is_used():
    quant_config = config(m__left="Q4_K", m__right="Q8_0")
    quant_config.packed_modules_mapping = {"both": ["left", "right"]}
    layer = vllm_linear.MergedColumnParallelLinear(
        256, [32, 32], bias=False, quant_config=quant_config, prefix="m.both"
    )
    assert [shard.kind.name for shard in layer.gguf_shards] == ["Q4_K", "Q8_0"]


def test_fused_query_key_value_is_refused():
    quant_config = config(m__qkv_proj="Q4_K")
    with pytest.raises(NotImplementedError, match="m.qkv_proj"):
        vllm_linear.QKVParallelLinear(
            256, 64, 4, bias=False, quant_config=quant_config, prefix="m.qkv_proj"
        )


@pytest.mark.parametrize("layer_class", [VocabParallelEmbedding, ParallelLMHead])
def test_float_vocabularies_are_the_releases_own(layer_class):
    layer = layer_class(64, 256, quant_config=config(lm_head="F16"), prefix="lm_head")
    assert type(layer.quant_method) is UnquantizedEmbeddingMethod


def test_attention_gets_no_method():
    attention = Attention.__new__(Attention)
    assert config(m__attn="Q4_K").get_quant_method(attention, "m.attn") is None


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("m.q_a_proj", True),
        ("m.kv_a_proj_with_mqa", True),
        ("m.o_proj", False),
        ("m.experts.gate_proj", True),
        ("m.experts.up_proj", True),
        ("m.experts.down_proj", True),
        ("m.shared_experts.gate_proj", False),
        ("lm_head", True),
        ("kv_b_proj", False),
    ],
)
def test_the_loader_can_ask_which_modules_keep_blocks(module, expected):
    quant_config = config(
        m__q_a_proj="Q4_K",
        m__kv_a_proj_with_mqa="F32",
        m__o_proj="F16",
        m__experts__gate_proj="BF16",
        m__experts__up_proj="F32",
        m__experts__down_proj="Q2_K",
        m__shared_experts__gate_proj="BF16",
        m__shared_experts__up_proj="BF16",
        lm_head="Q6_K",
    )
    assert quant_config.keeps_blocks(module) is expected


def glm_config(**values: int) -> PreTrainedConfig:
    sizes = {
        "num_attention_heads": 4,
        "v_head_dim": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 512,
        "n_shared_experts": 1,
    }
    return PreTrainedConfig(**(sizes | values))


def test_types_come_from_the_file_that_the_model_directory_names(tmp_path):
    spec = TinySpec(weight_type="Q8_0")
    gguf_file = write_tiny_glm_dsa(tmp_path / "tiny.gguf", spec)[0]
    directory = prepare_model(gguf_file, tmp_path / "cache").directory
    model = SimpleNamespace(
        quantization="gguf_native",
        model=str(directory),
        hf_config=glm_config(),
        dtype=torch.bfloat16,
        revision=None,
        hf_overrides={},
        quantization_config=None,
    )
    load = SimpleNamespace(download_dir=None)
    found = VllmConfig.get_quantization_config(model, load)
    assert isinstance(found, GGUFConfig)
    assert found.types == load_plan(directory).block_types()
    assert {kind.name for kind in found.types.values()} == {"Q8_0"}


def test_a_model_that_is_no_gguf_file_is_refused(tmp_path):
    with pytest.raises(GGUFError, match=str(tmp_path)):
        GGUFConfig().maybe_update_config(str(tmp_path), hf_config=glm_config())


def test_without_a_model_config_there_is_no_file():
    with pytest.raises(ValueError, match="some/model: .*needs the model's config"):
        GGUFConfig().maybe_update_config("some/model")


@pytest.mark.parametrize(
    "transport", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))]
)
def test_workers_receive_the_types(transport):
    original = config(m__q_a_proj="Q4_K", m__kv_a_proj_with_mqa="Q8_0")
    assert transport(original).types == original.types


def filled(monkeypatch: pytest.MonkeyPatch, **types: str) -> GGUFConfig:
    quant_config = GGUFConfig()
    plan = SimpleNamespace(block_types=lambda: config(**types).types)
    monkeypatch.setattr(config_module, "load_plan", lambda _: plan)
    quant_config.maybe_update_config("m", hf_config=glm_config())
    return quant_config


def make_any_layer(quant_config: GGUFConfig, **parallel: object) -> None:
    """A layer that no cut affects, in a process of the given parallelism."""
    vllm_config = VllmConfig()
    vllm_config.parallel_config = ParallelConfig(**parallel)
    with set_current_vllm_config(vllm_config):
        vllm_linear.ReplicatedLinear(
            256, 32, bias=False, quant_config=quant_config, prefix="m.q_a_proj"
        )


def test_a_cut_in_any_layer_is_found_when_the_first_layer_is_made(monkeypatch):
    quant_config = filled(monkeypatch, m__mlp__experts__down_proj="Q4_K")
    message = r"m\.mlp\.experts\.down_proj: .*4 parts.*work: 1, 2\."
    with pytest.raises(ValueError, match=message):
        make_any_layer(quant_config, tensor_parallel_size=4)


def test_expert_parallelism_does_not_cut(monkeypatch):
    quant_config = filled(monkeypatch, m__mlp__experts__down_proj="Q4_K")
    make_any_layer(quant_config, tensor_parallel_size=4, enable_expert_parallel=True)
