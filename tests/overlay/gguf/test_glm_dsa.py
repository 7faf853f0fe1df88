# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Metadata to configuration, and header to load plan."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from tests.helpers.edit_gguf import edit_gguf
from tests.helpers.gguf_writer import Tensor, Typed
from tests.helpers.glm_header import write_glm_shards
from tiny_glm_dsa import TinySpec, write_tiny_glm_dsa
from vllm.transformers_utils.gguf.errors import GGUFError
from vllm.transformers_utils.gguf.glm_dsa import GlmDsaConfig, hf_config, read_config
from vllm.transformers_utils.gguf.plan import LoadPlan, make_plan
from vllm.transformers_utils.gguf.reader import open_gguf

SMALL: dict[str, Any] = {
    "hidden": 64,
    "heads": 2,
    "q_lora": 64,
    "kv_lora": 64,
    "nope": 32,
    "rope": 32,
    "value": 32,
    "dense_ff": 64,
    "expert_ff": 32,
    "experts": 4,
    "index_heads": 2,
    "index_dim": 32,
}
FULL = "FFSSFS"
REAL_PATTERN = "FFF" + "SSSF" * 18 + "SSS"


def write(directory: Path, **fields: Any) -> Path:
    spec = TinySpec(**{**SMALL, **fields})
    return write_tiny_glm_dsa(directory / "tiny.gguf", spec)[0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiny"), mtp=True)


def config_of(path: Path) -> GlmDsaConfig:
    with open_gguf(path) as file:
        return read_config(file)


def plan_of(path: Path) -> LoadPlan:
    with open_gguf(path) as file:
        return make_plan(file)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_glm_shards(tmp_path_factory.mktemp("real"))


def test_real_header_gives_the_published_configuration(
    real: list[Path], tmp_path: Path
) -> None:
    # The data of the header is a hole: norms of zeros, which tell nothing.
    fields = hf_config(config_of(real[3]))
    expected = {
        "num_hidden_layers": 78,
        "num_nextn_predict_layers": 1,
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_router_dtype": "float32",
        "first_k_dense_replace": 3,
        "index_topk": 2048,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "indexer_rope_interleave": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
        "max_position_embeddings": 1048576,
        "vocab_size": 154880,
        "eos_token_id": [154820, 154827, 154829],
        "dtype": "bfloat16",
        "index_topk_pattern": REAL_PATTERN,
    }
    assert {key: fields[key] for key in expected} == expected


def test_transformers_reads_the_configuration_back(tiny: Path, tmp_path: Path) -> None:
    fields = hf_config(config_of(tiny))
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = AutoConfig.from_pretrained(tmp_path)
    for key, value in fields.items():
        if key not in ("dtype", "rope_parameters"):
            assert getattr(config, key) == value, key
    assert config.rope_parameters["rope_theta"] == 1e6


def test_real_plan_covers_every_tensor_in_file_order(real: list[Path]) -> None:
    plan = plan_of(real[0])
    taken = {s.name for w in (*plan.main, *plan.mtp) for s in w.sources}
    surplus = 57 * 5
    assert len(taken) == 1809 - surplus
    for weights in (plan.main, plan.mtp):
        places = [(w.sources[0].shard, w.sources[0].offset) for w in weights]
        assert places == sorted(places)
    assert all(".78." in weight.name for weight in plan.mtp)
    assert not any(".78." in weight.name for weight in plan.main)
    types = plan.block_types()
    assert types["model.layers.10.mlp.experts.gate_proj"].name == "Q4_K"
    assert types["model.layers.10.mlp.experts.down_proj"].name == "Q5_K"
    assert "model.layers.10.self_attn.kv_b_proj" not in types
    assert "model.layers.10.mlp.gate" not in types


def test_float_files_keep_no_blocks(tmp_path: Path) -> None:
    assert plan_of(write(tmp_path, weight_type="BF16")).block_types() == {}


@pytest.mark.parametrize(
    ("style", "pattern"),
    [
        ("none", None),
        ("key", FULL),
        ("key-int", FULL),
        ("key-str", FULL),
        ("key-surplus", FULL),
        ("absent", FULL),
        ("duplicates", FULL),
    ],
)
def test_indexer_sharing_is_found(
    style: str, pattern: str | None, tmp_path: Path
) -> None:
    path = write(tmp_path, shared_indexers=style, layers=6)
    fields = hf_config(config_of(path))
    assert fields.get("index_topk_pattern") == pattern


def test_long_context_without_other_signs_means_the_sharing_of_glm_5_2(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, layers=78, experts=2, context=1048576)
    assert hf_config(config_of(path))["index_topk_pattern"] == REAL_PATTERN
    short = edit_gguf(
        path, tmp_path / "short.gguf", keys={"glm-dsa.context_length": 202752}
    )
    assert "index_topk_pattern" not in hf_config(config_of(short))


def test_equal_norms_without_training_do_not_mean_sharing(
    tiny: Path, tmp_path: Path
) -> None:
    ones = np.ones(SMALL["index_dim"], np.float32).tobytes()
    norms = {
        name: Tensor(name, (SMALL["index_dim"],), "F32", ones)
        for layer in range(4)
        for name in (f"blk.{layer}.indexer.k_norm.{p}" for p in ("weight", "bias"))
    }
    path = edit_gguf(tiny, tmp_path / "untrained.gguf", tensors=norms)
    assert all(config_of(path).indexer_full)


def test_first_layer_without_indexer_is_refused(tiny: Path, tmp_path: Path) -> None:
    types = Typed("[bool]", [False, True, True, True])
    path = edit_gguf(
        tiny,
        tmp_path / "bad.gguf",
        keys={"glm-dsa.attention.indexer.types": types},
    )
    with pytest.raises(GGUFError, match="layer 0 has no indexer"):
        config_of(path)


def test_absent_gating_function_means_sigmoid(tmp_path: Path) -> None:
    config = config_of(write(tmp_path, gating_func=False))
    assert config.scoring_func == "sigmoid"


def test_file_without_mtp_block(tiny: Path, tmp_path: Path) -> None:
    dropped = {f"blk.4.{name}": None for name in _names_of_block(tiny, 4)}
    kept_key = edit_gguf(tiny, tmp_path / "a.gguf", tensors=dropped)
    assert config_of(kept_key).num_nextn_predict_layers == 0
    assert plan_of(kept_key).mtp == ()
    plain = write(tmp_path, mtp=False)
    assert config_of(plain).num_hidden_layers == config_of(tiny).num_hidden_layers


def _names_of_block(path: Path, block: int) -> list[str]:
    prefix = f"blk.{block}."
    with open_gguf(path) as file:
        return [n.removeprefix(prefix) for n in file.tensors if n.startswith(prefix)]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", None, "block_count.* missing"),
        ("block_count", 0, "block_count is 0"),
        ("nextn_predict_layers", 5, "nextn_predict_layers is 5"),
        ("attention.key_length_mla", 32, "key_length_mla is 32"),
        ("attention.q_lora_rank", "x", "q_lora_rank.* 'x'"),
        ("rope.freq_base", float("nan"), "freq_base is nan"),
        ("rope.scaling.type", "yarn", "rope.scaling.type is 'yarn'"),
        ("expert_gating_func", 3, "expert_gating_func is 3"),
        ("expert_used_count", 9, "expert_used_count is 9"),
        ("expert_weights_norm", 1, "expert_weights_norm.* 1"),
        ("expert_weights_norm", None, "expert_weights_norm.* missing"),
        ("leading_dense_block_count", 9, "leading_dense_block_count is 9"),
        ("vocab_size", 100, "vocabulary has different sizes"),
        ("attention.indexer.types", Typed("[bool]", [True]), "indexer.types"),
        ("attention.indexer.types", Typed("[i32]", [1, 2, 1, 1]), "indexer.types"),
    ],
)
def test_bad_key_is_named(
    key: str, value: Any, message: str, tiny: Path, tmp_path: Path
) -> None:
    path = edit_gguf(tiny, tmp_path / "bad.gguf", keys={f"glm-dsa.{key}": value})
    with pytest.raises(GGUFError, match=message):
        config_of(path)


def test_file_without_end_token_is_refused(tiny: Path, tmp_path: Path) -> None:
    keys = {f"tokenizer.ggml.{name}_token_id": None for name in ("eos", "eot", "eom")}
    with pytest.raises(GGUFError, match="no generation would end"):
        config_of(edit_gguf(tiny, tmp_path / "bad.gguf", keys=keys))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("blk.1.attn_q_a.weight", None, r"blk.1.attn_q_a.weight is missing"),
        ("blk.2.indexer.k_norm.bias", None, r"indexer.k_norm.bias is missing"),
        ("blk.4.nextn.eh_proj.weight", None, r"nextn.eh_proj.weight is missing"),
        (
            "blk.1.attn_k_b.weight",
            Tensor("blk.1.attn_k_b.weight", (64, 32, 2), "F32"),
            r"attn_k_b.weight has dims \[64, 32, 2\], expected \[32, 64, 2\]",
        ),
        (
            "blk.1.attn_norm.weight",
            Tensor("blk.1.attn_norm.weight", (64,), "F64"),
            "attn_norm.weight has type F64",
        ),
        ("blk.1.attn_q.bias", Tensor("blk.1.attn_q.bias", (64,)), "attn_q.bias"),
        ("blk.9.attn_norm.weight", Tensor("blk.9.attn_norm.weight", (64,)), "blk.9"),
    ],
)
def test_bad_tensor_is_named(
    name: str, tensor: Tensor | None, message: str, tiny: Path, tmp_path: Path
) -> None:
    path = edit_gguf(tiny, tmp_path / "bad.gguf", tensors={name: tensor})
    with pytest.raises(GGUFError, match=message):
        plan_of(path)


def test_other_architecture_names_the_plugin(tiny: Path, tmp_path: Path) -> None:
    path = edit_gguf(
        tiny, tmp_path / "llama.gguf", keys={"general.architecture": "llama"}
    )
    with pytest.raises(GGUFError, match="'llama'.*vllm-gguf-plugin"):
        plan_of(path)
