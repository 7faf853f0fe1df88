# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project

from collections.abc import Callable

import pytest
import torch

from tests.helpers.ggml_quantize import ALL_TYPES
from tests.helpers.gguf_weights import file_tensor, weights
from vllm.model_executor.layers import linear as vllm_linear
from vllm.model_executor.layers.quantization.gguf import layout
from vllm.model_executor.layers.quantization.gguf.config import GGUFConfig
from vllm.transformers_utils.gguf.ggml_types import GGML_TYPES_BY_NAME

pytestmark = pytest.mark.usefixtures("vllm_layers")

HIDDEN = 512
LayerFactory = Callable[..., vllm_linear.LinearBase]


def config(**types: str) -> GGUFConfig:
    return GGUFConfig(
        {f"m.{name}": GGML_TYPES_BY_NAME[kind] for name, kind in types.items()}
    )


def on_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    for name, value in (("rank", rank), ("world_size", size)):
        monkeypatch.setattr(
            vllm_linear, f"get_tensor_model_parallel_{name}", lambda value=value: value
        )


def gate_up(gate: str, up: str, rows: int = 64) -> vllm_linear.LinearBase:
    return vllm_linear.MergedColumnParallelLinear(
        HIDDEN,
        [rows, rows],
        bias=False,
        quant_config=config(gate_proj=gate, up_proj=up),
        prefix="m.gate_up_proj",
    )


def row_parallel(kind: str, columns: int) -> vllm_linear.LinearBase:
    return vllm_linear.RowParallelLinear(
        columns,
        48,
        bias=False,
        quant_config=config(down_proj=kind),
        prefix="m.down_proj",
    )


@pytest.mark.parametrize("name", ALL_TYPES)
def test_product_with_the_blocks_of_every_type(name):
    layer = vllm_linear.ReplicatedLinear(
        HIDDEN, 40, bias=False, quant_config=config(q_a_proj=name), prefix="m.q_a_proj"
    )
    if name in ("F32", "F16", "BF16"):
        assert not hasattr(layer, "qweight")
        return
    blocks = file_tensor(name, 40, HIDDEN)
    layer.qweight.weight_loader(layer.qweight, blocks)
    x = torch.randn(3, HIDDEN)
    out, _ = layer(x)
    expected = x.double() @ weights(name, blocks).t()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_product_in_half_precision_rounds_weights_once(dtype):
    layer = row_parallel("Q6_K", HIDDEN)
    blocks = file_tensor("Q6_K", 48, HIDDEN)
    layer.qweight.weight_loader(layer.qweight, blocks)
    x = torch.randn(2, 5, HIDDEN).to(dtype)
    out, _ = layer(x)
    rounded = weights("Q6_K", blocks).to(dtype)
    assert out.shape == (2, 5, 48)
    torch.testing.assert_close(out, torch.nn.functional.linear(x, rounded))


def test_bias_is_added():
    layer = vllm_linear.ReplicatedLinear(
        HIDDEN, 16, quant_config=config(q_a_proj="Q8_0"), prefix="m.q_a_proj"
    )
    blocks = file_tensor("Q8_0", 16, HIDDEN)
    layer.qweight.weight_loader(layer.qweight, blocks)
    layer.bias.data.fill_(3.0)
    out, _ = layer(torch.zeros(1, HIDDEN))
    assert torch.equal(out, torch.full((1, 16), 3.0))


def test_large_matrices_are_dequantized_in_parts(monkeypatch):
    monkeypatch.setattr(layout, "_CHUNK_WEIGHTS", 7 * HIDDEN)
    layer = row_parallel("Q4_K", HIDDEN)
    blocks = file_tensor("Q4_K", 48, HIDDEN)
    layer.qweight.weight_loader(layer.qweight, blocks)
    x = torch.randn(3, HIDDEN)
    expected = x.double() @ weights("Q4_K", blocks).t()
    torch.testing.assert_close(layer(x)[0].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("gate", "up"), [("Q5_K", "Q8_0"), ("Q4_K", "BF16"), ("F32", "IQ4_XS")]
)
def test_fused_projections_may_differ_in_type(gate, up):
    layer = gate_up(gate, up)
    blocks = [file_tensor(gate, 64, HIDDEN, 1), file_tensor(up, 64, HIDDEN, 2)]
    for shard_id in (1, 0):
        layer.qweight.weight_loader(layer.qweight, blocks[shard_id], shard_id)
    assert torch.equal(layer.qweight, torch.cat([b.flatten() for b in blocks]))
    x = torch.randn(3, HIDDEN)
    both = torch.cat([weights(gate, blocks[0]), weights(up, blocks[1])])
    expected = x.double() @ both.t()
    torch.testing.assert_close(layer(x)[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_shards_of_unequal_rows_lie_back_to_back():
    layer = vllm_linear.MergedColumnParallelLinear(
        HIDDEN,
        [96, 20],
        bias=False,
        quant_config=config(q_a_proj="Q5_K", kv_a_proj_with_mqa="Q8_0"),
        prefix="m.fused_qkv_a_proj",
        disable_tp=True,
    )
    first, second = layer.gguf_shards
    assert (first.offset, first.row_bytes, first.rows) == (0, 352, 96)
    assert (second.offset, second.row_bytes, second.rows) == (96 * 352, 544, 20)
    assert layer.qweight.shape == (96 * 352 + 20 * 544,)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_parallel_parts_make_up_the_whole(monkeypatch, size):
    blocks = [file_tensor("Q4_K", 64, HIDDEN, 1), file_tensor("Q8_0", 64, HIDDEN, 2)]
    parts: list[list[torch.Tensor]] = [[], []]
    for rank in range(size):
        on_rank(monkeypatch, rank, size)
        layer = gate_up("Q4_K", "Q8_0")
        for i, shard in enumerate(layer.gguf_shards):
            layer.qweight.weight_loader(layer.qweight, blocks[i], i)
            parts[i].append(shard.view(layer.qweight.data))
    for i in range(2):
        assert torch.equal(torch.cat(parts[i]), blocks[i])


@pytest.mark.parametrize(("name", "columns"), [("Q4_K", 1024), ("Q8_0", 128)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_parallel_parts_make_up_the_whole(monkeypatch, name, columns, size):
    blocks = file_tensor(name, 48, columns)
    x = torch.randn(3, columns)
    total = torch.zeros(3, 48)
    parts = []
    for rank in range(size):
        on_rank(monkeypatch, rank, size)
        layer = row_parallel(name, columns)
        layer.reduce_results = False
        layer.qweight.weight_loader(layer.qweight, blocks)
        parts.append(layer.gguf_shards[0].view(layer.qweight.data))
        total += layer(x.chunk(size, dim=-1)[rank])[0]
    assert torch.equal(torch.cat(parts, dim=-1), blocks)
    expected = x.double() @ weights(name, blocks).t()
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


def test_replicated_layers_are_whole_on_every_rank(monkeypatch):
    on_rank(monkeypatch, 1, 2)
    layer = vllm_linear.ReplicatedLinear(
        HIDDEN, 40, bias=False, quant_config=config(wq_b="Q6_K"), prefix="m.wq_b"
    )
    blocks = file_tensor("Q6_K", 40, HIDDEN)
    layer.qweight.weight_loader(layer.qweight, blocks)
    assert torch.equal(layer.qweight, blocks.flatten())


def test_a_block_that_would_be_cut_is_an_error_before_loading(monkeypatch):
    on_rank(monkeypatch, 0, 4)
    message = r"m.down_proj: .*2 Q4_K blocks of 256 .*4 parts.*work: 1, 2\."
    with pytest.raises(ValueError, match=message):
        row_parallel("Q4_K", 512)


@pytest.mark.parametrize(
    "loaded",
    [
        torch.zeros(48, 288, dtype=torch.int8),
        torch.zeros(47, 288, dtype=torch.uint8),
        torch.zeros(48, 287, dtype=torch.uint8),
    ],
    ids=["dtype", "rows", "bytes"],
)
def test_tensors_that_do_not_fit_are_refused(loaded):
    layer = row_parallel("Q4_K", HIDDEN)
    with pytest.raises(ValueError, match=r"m.down_proj: expected.*\[48, 288\]; found"):
        layer.qweight.weight_loader(layer.qweight, loaded)


def test_a_fused_layer_needs_a_shard_id():
    layer = gate_up("Q4_K", "Q8_0")
    with pytest.raises(ValueError, match="m.gate_up_proj is made of 2 GGUF tensors"):
        layer.qweight.weight_loader(layer.qweight, file_tensor("Q4_K", 64, HIDDEN))
