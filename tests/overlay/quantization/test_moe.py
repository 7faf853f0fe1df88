# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project

import pytest
import torch

from tests.helpers.gguf_weights import file_experts, weights
from vllm.config import (
    ParallelConfig,
    VllmConfig,
    get_current_vllm_config,
    set_current_vllm_config,
)
from vllm.model_executor.layers.fused_moe import (
    RoutedExperts,
    fused_moe_make_expert_params_mapping,
)
from vllm.model_executor.layers.fused_moe import config as moe_config
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.quantization.gguf.config import GGUFConfig
from vllm.transformers_utils.gguf.ggml_types import GGML_TYPES_BY_NAME

pytestmark = pytest.mark.usefixtures("vllm_layers")

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 2, 256, 512
PREFIX = "model.layers.3.mlp.experts"
TYPES = ("Q4_K", "Q8_0", "Q6_K")
SHARDS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def make_experts(types: tuple[str, str, str] = TYPES, **options) -> RoutedExperts:
    names = ("gate_proj", "up_proj", "down_proj")
    kinds = {
        f"{PREFIX}.{name}": GGML_TYPES_BY_NAME[kind]
        for name, kind in zip(names, types, strict=True)
    }
    # vLLM refuses two layers of one name in a model; each test's is the only one.
    get_current_vllm_config().compilation_config.static_forward_context.clear()
    runner = FusedMoEFactory(
        num_experts=EXPERTS,
        top_k=options.pop("top_k", TOP_K),
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        params_dtype=torch.float32,
        quant_config=GGUFConfig(kinds),
        prefix=PREFIX,
        tp_size=options.pop("tp_size", 1),
        dp_size=1,
        pcp_size=1,
        **options,
    )
    return runner.routed_experts


def stacked(types: tuple[str, str, str] = TYPES) -> dict[str, torch.Tensor]:
    """The file's tensors: gate and up [E, I, row bytes], down [E, H, row bytes]."""
    gate, up, down = types
    return {
        "w1": file_experts(gate, EXPERTS, INTERMEDIATE, HIDDEN, 1),
        "w3": file_experts(up, EXPERTS, INTERMEDIATE, HIDDEN, 2),
        "w2": file_experts(down, EXPERTS, HIDDEN, INTERMEDIATE, 3),
    }


def parameter_of(layer: RoutedExperts, shard_id: str) -> torch.nn.Parameter:
    return layer.w2_qweight if shard_id == "w2" else layer.w13_qweight


def load(layer: RoutedExperts, tensors: dict[str, torch.Tensor]) -> None:
    for shard_id, tensor in tensors.items():
        parameter_of(layer, shard_id).load_stacked(tensor, shard_id)


def reference(
    x: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    types: tuple[str, str, str] = TYPES,
) -> torch.Tensor:
    """Each token on its own, in float64, on gguf-py's weights."""
    gate, up, down = (
        weights(kind, tensors[shard_id])
        for kind, shard_id in zip(types, SHARDS, strict=True)
    )
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for weight, expert in zip(topk_weights[token], topk_ids[token], strict=True):
            hidden = torch.nn.functional.silu(gate[expert] @ row) * (up[expert] @ row)
            out[token] += weight.double() * (down[expert] @ hidden)
    return out


def routing(tokens: int, top_k: int = TOP_K) -> tuple[torch.Tensor, torch.Tensor]:
    """Router weights that do not sum to 1, and ids that leave out expert 2."""
    generator = torch.Generator().manual_seed(7)
    topk_weights = torch.rand(tokens, top_k, generator=generator) * 2.5
    choices = torch.tensor([0, 1, 3])
    ids = [
        choices[torch.randperm(3, generator=generator)[:top_k]] for _ in range(tokens)
    ]
    return topk_weights, torch.stack(ids).int() if ids else torch.empty(0, top_k).int()


def run(layer: RoutedExperts, x: torch.Tensor, *route: torch.Tensor) -> torch.Tensor:
    return layer.forward_modular(x, *route)


@pytest.mark.parametrize(
    "types",
    [
        TYPES,
        ("IQ1_M", "IQ2_XXS", "IQ3_XXS"),
        ("MXFP4", "MXFP4", "MXFP4"),
        ("BF16", "Q5_K", "F32"),
    ],
    ids="-".join,
)
def test_gate_up_and_down_may_differ_in_type(types):
    layer, tensors = make_experts(types), stacked(types)
    load(layer, tensors)
    x = torch.randn(9, HIDDEN)
    route = routing(9)
    expected = reference(x, tensors, *route, types)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(
        run(layer, x, *route).double(), expected, rtol=1e-4, atol=1e-5
    )


def test_no_tokens():
    layer = make_experts()
    load(layer, stacked())
    assert run(layer, torch.empty(0, HIDDEN), *routing(0)).shape == (0, HIDDEN)


def test_bfloat16_is_summed_in_float32():
    layer, tensors = make_experts(), stacked()
    load(layer, tensors)
    x = torch.randn(9, HIDDEN).bfloat16()
    route = routing(9)
    out = run(layer, x, *route)
    assert out.dtype == torch.bfloat16
    expected = reference(x, tensors, *route)
    torch.testing.assert_close(
        out.double(), expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item()
    )


def test_router_weights_on_the_input_are_not_applied_again():
    layer = make_experts(top_k=1, apply_router_weight_on_input=True)
    tensors = stacked()
    load(layer, tensors)
    x = torch.randn(5, HIDDEN)
    topk_weights, topk_ids = routing(5, 1)
    expected = reference(
        x * topk_weights, tensors, torch.ones_like(topk_weights), topk_ids
    )
    out = run(layer, x, topk_weights, topk_ids)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_an_expert_is_one_row_gate_then_up():
    layer, tensors = make_experts(), stacked()
    load(layer, tensors)
    for expert in range(EXPERTS):
        row = torch.cat(
            [tensors["w1"][expert].flatten(), tensors["w3"][expert].flatten()]
        )
        assert torch.equal(layer.w13_qweight[expert], row)
        assert torch.equal(layer.w2_qweight[expert], tensors["w2"][expert].flatten())


def test_the_names_of_the_release_lead_to_the_parameters():
    """As load_weights does: checkpoint name -> parameter, shard and expert."""
    layer, tensors = make_experts(), stacked()
    holder = torch.nn.Module()
    holder.experts = torch.nn.Module()
    holder.experts.routed_experts = layer
    parameters = dict(holder.named_parameters())
    mapping = fused_moe_make_expert_params_mapping(
        holder, "gate_proj", "down_proj", "up_proj", EXPERTS
    )
    for shard_id, projection in SHARDS.items():
        for expert in range(EXPERTS):
            name = f"experts.{expert}.{projection}.qweight"
            (entry,) = [entry for entry in mapping if entry[1] in name]
            target = name.replace(entry[1], entry[0])
            param = parameters[target]
            loaded = param.weight_loader(
                param,
                tensors[shard_id][expert],
                target,
                shard_id=entry[3],
                expert_id=entry[2],
                return_success=True,
            )
            assert loaded is True
    whole = make_experts()
    load(whole, tensors)
    assert torch.equal(layer.w13_qweight, whole.w13_qweight)
    assert torch.equal(layer.w2_qweight, whole.w2_qweight)


def test_the_layers_own_load_weights_works():
    layer, tensors = make_experts(), stacked()
    named = [
        (f"{expert}.{projection}.qweight", tensors[shard_id][expert])
        for shard_id, projection in SHARDS.items()
        for expert in range(EXPERTS)
    ]
    assert set(layer.load_weights(named)) == {"w13_qweight", "w2_qweight"}
    assert torch.equal(layer.w2_qweight, tensors["w2"].flatten(1))


@pytest.mark.parametrize("size", [1, 2])
def test_tensor_parallel_parts_sum_to_the_whole(monkeypatch, size):
    tensors, x, route = stacked(), torch.randn(6, HIDDEN), routing(6)
    total = torch.zeros(6, HIDDEN, dtype=torch.float64)
    for rank in range(size):
        monkeypatch.setattr(
            moe_config, "get_tensor_model_parallel_rank", lambda rank=rank: rank
        )
        layer = make_experts(tp_size=size)
        assert layer.gguf_experts.w1.rows == INTERMEDIATE // size
        load(layer, tensors)
        total += run(layer, x, *route).double()
    expected = reference(x, tensors, *route)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


def test_a_down_projection_that_would_be_cut_is_an_error(monkeypatch):
    monkeypatch.setattr(moe_config, "get_tensor_model_parallel_rank", lambda: 0)
    message = rf"{PREFIX}.down_proj: .*2 Q6_K blocks.*work: 1, 2\..*expert-parallel"
    with pytest.raises(ValueError, match=message):
        make_experts(tp_size=4)


def test_expert_parallel_ranks_hold_whole_experts(monkeypatch):
    tensors, x, route = stacked(), torch.randn(6, HIDDEN), routing(6)
    parallel = ParallelConfig(enable_expert_parallel=True)
    total = torch.zeros(6, HIDDEN, dtype=torch.float64)
    with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
        for rank in range(2):
            monkeypatch.setattr(
                moe_config, "get_tensor_model_parallel_rank", lambda rank=rank: rank
            )
            layer = make_experts(tp_size=2)
            assert layer.w2_qweight.shape[0] == EXPERTS // 2
            load(layer, tensors)
            own = slice(rank * 2, rank * 2 + 2)
            assert torch.equal(layer.w2_qweight, tensors["w2"][own].flatten(1))
            total += run(layer, x, *route).double()
    expected = reference(x, tensors, *route)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


def test_an_expert_of_another_rank_is_reported_as_not_loaded(monkeypatch):
    monkeypatch.setattr(moe_config, "get_tensor_model_parallel_rank", lambda: 1)
    parallel = ParallelConfig(enable_expert_parallel=True)
    with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
        layer = make_experts(tp_size=2)
    blocks, param = stacked()["w2"][0], layer.w2_qweight
    options = {"shard_id": "w2", "expert_id": 0}
    assert (
        param.weight_loader(param, blocks, "", **options, return_success=True) is False
    )
    assert param.weight_loader(param, blocks, "", **options) is None


def test_a_stacked_tensor_of_another_size_is_refused():
    layer = make_experts()
    with pytest.raises(ValueError, match=f"{PREFIX} w1: expected the blocks of 4"):
        layer.w13_qweight.load_stacked(stacked()["w1"][:3], "w1")
    with pytest.raises(ValueError, match=f"{PREFIX}.0 w2: expected the Q6_K blocks"):
        layer.w2_qweight.load_stacked(stacked()["w1"], "w2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "gelu"}, "activation gelu"),
        ({"swiglu_limit": 7.0}, "a SwiGLU limit"),
        ({"has_bias": True}, "expert biases"),
    ],
    ids=["activation", "limit", "bias"],
)
def test_experts_of_other_models_are_refused(options, message):
    with pytest.raises(NotImplementedError, match=message):
        make_experts(**options)
