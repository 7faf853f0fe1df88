# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The model files of the engine's benchmark: names, types, sizes, spread of weights."""

import dataclasses
import io
import json
import math
from pathlib import Path
from unittest import mock

import gguf.quants
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from tokenizers import Tokenizer

import benchmarks.engine as bench
from benchmarks.engine_model import (
    MIXES,
    TINY,
    RandomBlocks,
    Shape,
    metadata,
    tensors,
    vocabulary,
    write_config,
    write_file,
)
from tests.helpers.gguf_writer import write_gguf
from tests.helpers.glm_header import glm_tensors
from vllm.transformers_utils.gguf.plan import make_plan
from vllm.transformers_utils.gguf.reader import open_gguf
from vllm.transformers_utils.gguf.tokenizer import tokenizer_files


def test_tensors_are_those_of_the_real_model() -> None:
    shape = Shape(layers=78, dense_layers=3, mtp=True)
    ours = {str(one.name): one for one in tensors(shape, MIXES["q4_k_xl"])}
    real = {str(one.name): one for one in glm_tensors()}
    assert {name: tuple(one.dims) for name, one in ours.items()} == {
        name: tuple(one.dims) for name, one in real.items()
    }
    other = {name for name in ours if ours[name].type != real[name].type}
    assert {real[name].type for name in other} == {"Q6_K"}, "a few experts are larger"
    assert len(other) == 4


def test_shared_layers_have_no_indexer() -> None:
    names = [str(one.name) for one in tensors(Shape(pattern="FSSF", mtp=True), {})]
    with_indexer = {name.split(".")[1] for name in names if "indexer" in name}
    assert with_indexer == {"0", "3", "4"}
    for pattern in ("FF", "SFFF", "FFXF"):
        with pytest.raises(ValueError, match=f"'{pattern}'; expected 4 of F"):
            Shape(pattern=pattern)


@pytest.mark.parametrize("mtp", [False, True])
def test_the_plan_accepts_the_file_at_full_size(tmp_path: Path, mtp: bool) -> None:
    """Only the header is written: the data is a hole of the size it would have."""
    shape = Shape(layers=4, mtp=mtp)
    table = tensors(shape, MIXES["mixed"])
    path = write_gguf(tmp_path / "full.gguf", metadata(shape), table)
    size = 26.0e9 if mtp else 19.7e9
    assert path.stat().st_size == pytest.approx(size, rel=0.01)
    with open_gguf(path) as file:
        plan = make_plan(file)
    config = plan.config
    assert (config.num_hidden_layers, config.num_nextn_predict_layers) == (4, int(mtp))
    assert (config.n_routed_experts, config.index_topk) == (256, 2048)
    assert all(config.indexer_full)
    types = {name: kind.name for name, kind in plan.block_types().items()}
    layer = "model.layers.3."
    assert types[f"{layer}mlp.experts.gate_proj"] == "Q4_K"
    assert types[f"{layer}mlp.experts.down_proj"] == "Q5_K"
    assert types[f"{layer}self_attn.kv_a_proj_with_mqa"] == "Q8_0"
    assert types["lm_head"] == "Q6_K"


def test_sizes_are_printed_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--sizes", "--layers", "2", "--types", "iq2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("ffn_gate_exps" in line and "IQ2_XXS" in line for line in lines)
    every = tensors(Shape(layers=2), MIXES["iq2"])
    total = sum(one.nbytes for one in every)
    assert lines[-1] == f"{len(every)} tensors, {total:,} bytes"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", MIXES)
def test_weights_keep_the_size_of_what_they_multiply(tmp_path: Path, name: str) -> None:
    path = tmp_path / "tiny.gguf"
    shape = dataclasses.replace(TINY, mtp=True)
    with mock.patch("benchmarks.engine_model.BLOCK_BUFFER_BYTES", 1 << 20):
        size = write_file(path, shape, MIXES[name])
    assert path.stat().st_size == size
    with open_gguf(path) as file:
        make_plan(file)
        for tensor in file.tensors.values():
            data = np.frombuffer(file.data(tensor), np.uint8)
            if tensor.type.name == "F32":
                values = data.view(np.float32).reshape(tensor.dims[::-1])
            else:
                rows = data.reshape(-1, tensor.type.row_bytes(tensor.dims[0]))
                kind = GGMLQuantizationType(tensor.type.id)
                values = gguf.quants.dequantize(rows, kind)
                assert len(np.unique(rows, axis=0)) == len(rows), tensor.name
            assert np.isfinite(values).all(), tensor.name
            check_spread(tensor.name, values)


def check_spread(name: str, values: np.ndarray) -> None:
    deviation, mean = values.std(), values.mean()
    if values.ndim == 1:
        bias = name.endswith(".bias")
        assert mean == pytest.approx(0.0 if bias else 1.0, abs=0.05), name
        assert deviation < (0.02 if bias else 0.2), name
        return
    columns = 512 if name.endswith("attn_k_b.weight") else values.shape[-1]
    wanted = 0.1 if name.startswith("token_embd") else 1 / math.sqrt(columns)
    # What the format and repeated blocks cost, or chance where there are few values.
    error = max(0.02, 4 / math.sqrt(values.size))
    assert deviation == pytest.approx(wanted, rel=error), name
    assert abs(mean) < error * wanted, name


def test_blocks_go_round_and_begin_elsewhere() -> None:
    blocks = RandomBlocks("Q4_K", buffer_bytes=144 * 12)
    assert len(blocks.blocks) == 11, "a prime"
    out = io.BytesIO()
    blocks.write(out, 144 * 30, seed=15)
    rows = np.frombuffer(out.getvalue(), np.uint8).reshape(30, 144)
    assert (rows == blocks.blocks[(np.arange(30) + 4) % 11]).all()
    with pytest.raises(ValueError, match="no random blocks of type MXFP4; known are"):
        RandomBlocks("MXFP4", 1 << 20)


def test_named_tokens_are_where_glm_has_them() -> None:
    keys = metadata(Shape())
    ids = {name: keys[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot")}
    assert ids == {"eos": 154820, "eot": 154827}
    assert keys["tokenizer.ggml.eom_token_id"] == 154829
    assert len(keys["tokenizer.ggml.tokens"].value) == 154_880
    with pytest.raises(ValueError, match="100 tokens; expected 316 to"):
        vocabulary(100)


def test_the_tokenizer_reads_words_of_four_letters() -> None:
    made = vocabulary(4096)
    files = tokenizer_files({"general.architecture": "glm-dsa"} | made.metadata())
    tokenizer = Tokenizer.from_str(files["tokenizer.json"])
    assert tokenizer.encode("abab é<|user|>").tokens[:2] == ["abab", "Ġ"]
    assert tokenizer.decode(tokenizer.encode("aazz, é!").ids) == "aazz, é!"


def test_the_configuration_is_that_of_the_file(tmp_path: Path) -> None:
    shape = dataclasses.replace(TINY, mtp=True, layers=4, pattern="FSSF")
    folder = write_config(tmp_path / "model", shape)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 4
    assert config["num_nextn_predict_layers"] == 1
    assert config["index_topk_pattern"] == "FSSF"
    assert (config["hidden_size"], config["n_routed_experts"]) == (256, 8)
    assert config["vocab_size"] == 1024
