# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""`examples/requantize.py` on a small file with rows of 192 and of 128 values."""

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from requantize import requantize
from tests.helpers.gguf_contents import read_contents
from tests.helpers.llamacpp_reference import LlamaCpp
from tests.helpers.metrics import agreement
from tiny_glm_dsa import TinySpec, write_tiny_glm_dsa

PROMPTS = [[7, 30, 90], list(range(100, 140))]
# expert_ff of 128: rows of ffn_down of the experts, as in the trained model.
SMALL = {
    "layers": 2,
    "shared_indexers": "key",
    "indexer_pattern": "FS",
    "mtp": True,
    "heads": 2,
    "index_heads": 4,
    "experts": 2,
    "expert_ff": 128,
}
# Weight type -> type of k_b (rows of 192), ffn_down_exps (rows of 128), ffn_gate_exps.
TYPES = {
    "F32": ("F32", "F32", "F32"),
    "F16": ("F16", "F16", "F16"),
    "BF16": ("BF16", "BF16", "BF16"),
    "Q8_0": ("Q8_0", "Q8_0", "Q8_0"),
    "Q6_K": ("Q8_0", "Q8_0", "Q6_K"),
    "Q5_K": ("Q5_1", "Q5_1", "Q5_K"),
    "Q4_K": ("Q5_0", "Q5_0", "Q4_K"),
    "Q4_0": ("Q4_0", "Q4_0", "Q4_0"),
    "Q3_K": ("Q4_0", "Q4_0", "Q3_K"),
    "Q2_K": ("Q4_0", "Q4_0", "Q2_K"),
    "IQ4_XS": ("IQ4_NL", "IQ4_NL", "IQ4_XS"),
    "IQ3_XXS": ("IQ4_NL", "IQ4_NL", "IQ3_XXS"),
    "MXFP4": ("MXFP4", "MXFP4", "MXFP4"),
    "mixed": ("Q5_0", "IQ4_NL", "IQ3_XXS"),
}
# KL of the type from F32, in nats: of random weights, so far above a trained model's.
FAR = {"Q2_K": 2.0, "IQ3_XXS": 2.0}


def small(path: Path, weight_type: str) -> Path:
    return write_tiny_glm_dsa(path, TinySpec(weight_type=weight_type, **SMALL))[0]


@pytest.fixture(scope="module")
def f32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small(tmp_path_factory.mktemp("f32") / "f32.gguf", "F32")


@pytest.fixture(scope="module")
def truth(f32: Path) -> np.ndarray:
    return LlamaCpp(f32).next_logprobs(PROMPTS)


def types_of(path: Path) -> dict[str, str]:
    return {t.name: t.tensor_type.name for t in GGUFReader(path).tensors}


@pytest.mark.parametrize("weight_type", TYPES)
def test_the_file_is_the_one_written_in_that_type(
    weight_type: str, f32: Path, truth: np.ndarray, tmp_path: Path
) -> None:
    target = tmp_path / "out.gguf"
    requantize(f32, target, weight_type)
    expected = read_contents(small(tmp_path / "written.gguf", weight_type)).tensors
    assert read_contents(target).tensors == expected
    types = types_of(target)
    k_b, down, gate = TYPES[weight_type]
    assert types["blk.1.attn_k_b.weight"] == k_b
    assert types["blk.1.ffn_down_exps.weight"] == down
    assert types["blk.1.ffn_gate_exps.weight"] == gate
    assert types["blk.1.ffn_gate_inp.weight"] == "F32"
    assert types["blk.0.indexer.proj.weight"] == "F32"
    found = agreement(truth, LlamaCpp(target).next_logprobs(PROMPTS))
    assert found.mean_kl < FAR.get(weight_type, 0.5), found


def test_values_survive_the_way_through_float32(tmp_path: Path) -> None:
    source = small(tmp_path / "q8.gguf", "Q8_0")
    requantize(source, tmp_path / "f32.gguf", "F32")
    requantize(tmp_path / "f32.gguf", tmp_path / "again.gguf", "Q8_0")
    assert set(types_of(tmp_path / "f32.gguf").values()) == {"F32"}
    wide = {t.name: t.data for t in GGUFReader(tmp_path / "f32.gguf").tensors}
    for tensor in GGUFReader(source).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(wide[tensor.name], values), tensor.name
    again = read_contents(tmp_path / "again.gguf").tensors
    assert again == read_contents(source).tensors


def test_keys_keep_order_and_kind_and_the_file_type_is_told(
    f32: Path, tmp_path: Path
) -> None:
    before = read_contents(f32).metadata
    requantize(f32, tmp_path / "q4.gguf", "Q4_K")
    after = read_contents(tmp_path / "q4.gguf").metadata
    told = after.pop("general.file_type")
    assert told.value == gguf.LlamaFileType.MOSTLY_Q4_K_S
    assert list(after.items()) == list(before.items())
    requantize(tmp_path / "q4.gguf", tmp_path / "f16.gguf", "F16")
    last = read_contents(tmp_path / "f16.gguf").metadata
    assert last["general.file_type"].value == gguf.LlamaFileType.MOSTLY_F16
    requantize(tmp_path / "q4.gguf", tmp_path / "mixed.gguf", "mixed")
    mixed = read_contents(tmp_path / "mixed.gguf").metadata
    assert "general.file_type" not in mixed, "there is no name for this mixture"


def test_what_cannot_be_done_is_refused(f32: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'Q9_9' is unknown; use one of F32"):
        requantize(f32, tmp_path / "out.gguf", "Q9_9")
    with pytest.raises(ValueError, match="is the source itself"):
        requantize(f32, f32, "Q8_0")
    shards = write_tiny_glm_dsa(tmp_path / "tiny.gguf", TinySpec(shards=2, **SMALL))
    with pytest.raises(ValueError, match="one of 2 shards; join them"):
        requantize(shards[0], tmp_path / "out.gguf", "Q8_0")
    writer = GGUFWriter(tmp_path / "llama.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="holds 'llama', expected 'glm-dsa'"):
        requantize(tmp_path / "llama.gguf", tmp_path / "out.gguf", "Q8_0")
    assert not (tmp_path / "out.gguf").exists()


def test_the_command_says_what_it_wrote_and_what_is_wrong(
    f32: Path, tmp_path: Path
) -> None:
    script = Path(sys.modules[requantize.__module__].__file__ or "")
    target = tmp_path / "q8.gguf"
    done = run(script, f32, target, "--type", "Q8_0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{target}  ")
    done = run(script, f32, f32, "--type", "Q8_0")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
