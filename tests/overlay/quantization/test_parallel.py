# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.limits import HANG_SECONDS
from tests.overlay.quantization import two_ranks
from vllm.model_executor.layers.quantization.gguf.parallel import (
    check_cut,
    check_tensor_parallel,
)
from vllm.transformers_utils.gguf.ggml_types import GGML_TYPES_BY_NAME

GLM5 = SimpleNamespace(
    num_attention_heads=64,
    v_head_dim=256,
    intermediate_size=12288,
    moe_intermediate_size=2048,
    n_shared_experts=1,
)
K_QUANTS = {
    "model.layers.0.self_attn.o_proj": "Q5_K",
    "model.layers.0.mlp.down_proj": "Q6_K",
    "model.layers.3.mlp.experts.gate_proj": "IQ2_XS",
    "model.layers.3.mlp.experts.down_proj": "IQ3_XXS",
    "model.layers.3.mlp.shared_experts.down_proj": "Q6_K",
    "lm_head": "Q4_K",
}


def check(types: dict[str, str], degree: int, **degrees: int) -> None:
    check_tensor_parallel(
        {name: GGML_TYPES_BY_NAME[kind] for name, kind in types.items()},
        GLM5,
        degree=degree,
        expert_degree=degrees.get("experts", degree),
        shared_expert_degree=degrees.get("shared", degree),
    )


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_glm5_with_256_weight_blocks_can_be_cut_up_to_eight(degree):
    check(K_QUANTS, degree)


def test_the_error_names_layer_type_and_the_sizes_that_work():
    message = (
        r"model\.layers\.3\.mlp\.experts\.down_proj: rows of 2048 weights are 8 IQ3_XXS"
        r" blocks.* 16 parts .*Tensor-parallel sizes that work: 1, 2, 4, 8\."
    )
    with pytest.raises(ValueError, match=message):
        check(K_QUANTS, 16)


def test_whole_experts_on_each_rank_lift_the_limit():
    check(K_QUANTS, 16, experts=1, shared=1)
    with pytest.raises(ValueError, match="shared_experts.down_proj"):
        check(K_QUANTS, 16, experts=1)


@pytest.mark.parametrize("degree", [16, 32, 64])
def test_small_blocks_can_be_cut_further(degree):
    check({name: "Q8_0" for name in K_QUANTS if "layers.0" not in name}, degree)


@pytest.mark.parametrize("name", ["self_attn.o_proj", "mlp.down_proj"])
def test_the_rows_of_every_cut_matrix_are_checked(name):
    with pytest.raises(ValueError, match=f"model.layers.0.{name}"):
        check({f"model.layers.0.{name}": "Q4_K"}, 96)


def test_one_matrix_alone():
    check_cut("x", GGML_TYPES_BY_NAME["Q4_K"], 1024, 4)
    with pytest.raises(ValueError, match=r"^x: .*work: 1, 2, 4\."):
        check_cut("x", GGML_TYPES_BY_NAME["Q4_K"], 1024, 3)


def test_two_ranks_compute_what_whole_matrices_say(tmp_path):
    """Every kind of layer over gloo, experts cut and spread, against gguf-py."""
    torch.save(two_ranks.file_tensors(), tmp_path / "file.pt")
    environment = {
        **os.environ,
        # The engine sets it for its workers; shared memory is named after it.
        "VLLM_DIST_IDENT": f"{os.getpid()}-{tmp_path.name}",
        # vLLM compiles the embedding's masks, for seconds, and they are not ours.
        "TORCHDYNAMO_DISABLE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", two_ranks.__name__, str(tmp_path)],
        env=environment,
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    for rank in range(two_ranks.RANKS):
        for spread in (False, True):
            assert f"rank {rank} agrees, expert parallel: {spread}" in done.stdout
