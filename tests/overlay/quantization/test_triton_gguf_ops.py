# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""vLLM's layers of GGUF blocks as a GPU computes them, and their operators.

Interpreted kernels take CPU tensors. In a process of its own, the operators' CUDA
implementations are registered for these, and layers of the release run on them.
"""

import functools
import importlib
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.helpers import real_triton
from tests.helpers.gguf_weights import weights
from tests.overlay.quantization.triton_gguf_cases import (
    FLOAT32,
    MoE,
    check,
    kind_of,
    random_blocks,
    routing,
    values,
)
from vllm.model_executor.layers.quantization.gguf import layout
from vllm.model_executor.layers.quantization.gguf.config import GGUFConfig

GGUF = "vllm.model_executor.layers.quantization.gguf"
OPERATORS = ("gguf_dequantize", "gguf_linear", "gguf_rows", "gguf_experts")


def on_kernels(test):
    """Run the test where operators on CPU tensors are interpreted Triton kernels."""
    return real_triton._elsewhere(test, _process)


@functools.cache
def _process() -> ProcessPoolExecutor:
    return real_triton._process("1", _start, str(real_triton.ROOT))


def _start(root: str) -> None:
    sys.path.insert(0, root)
    utils = importlib.import_module("vllm.triton_utils")
    utils.triton = importlib.import_module("triton")
    utils.tl = importlib.import_module("triton.language")
    for module, name in (
        ("blocks", "_dequantize"),
        ("layout", "_linear"),
        ("embedding", "_rows"),
        ("moe", "_experts"),
    ):
        found = importlib.import_module(f"{GGUF}.{module}")
        operator = getattr(found, name)
        operator.register_kernel("cpu")(getattr(found, f"{name}_on_gpu"))


def refuse_the_host(module) -> None:
    def fail(*args):
        raise AssertionError("blocks were dequantized on the host")

    module._on_host = fail


@on_kernels
@pytest.mark.parametrize("tokens", [1, 3, 65])
@pytest.mark.parametrize(
    ("gate", "up"), [("Q8_0", "Q8_0"), ("Q4_K", "Q8_0"), ("F16", "IQ4_XS")]
)
def test_fused_layers(gate, up, tokens):
    from tests.helpers.single_rank import single_rank
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear
    from vllm.model_executor.layers.quantization.gguf import blocks as module

    refuse_the_host(module)
    types = {"m.gate_proj": kind_of(gate), "m.up_proj": kind_of(up)}
    with single_rank():
        layer = MergedColumnParallelLinear(
            512,
            [24, 24],
            bias=False,
            quant_config=GGUFConfig(types),
            prefix="m.gate_up_proj",
        )
        parts = [random_blocks(gate, 24, 512, 1), random_blocks(up, 24, 512, 2)]
        for shard_id, part in enumerate(parts):
            layer.qweight.weight_loader(layer.qweight, part, shard_id)
        x = values(tokens, 512)
        out = layer(x.unsqueeze(0))[0].squeeze(0)
    both = torch.cat([weights(gate, parts[0]), weights(up, parts[1])])
    check(out, x.double() @ both.t(), FLOAT32)


@on_kernels
def test_embedding_and_head():
    from tests.helpers.single_rank import single_rank
    from vllm.model_executor.layers.quantization.gguf import blocks as module
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    refuse_the_host(module)
    with single_rank():
        layer = ParallelLMHead(
            100, 512, quant_config=GGUFConfig({"h": kind_of("Q4_K")}), prefix="h"
        )
    table = random_blocks("Q4_K", 100, 512)
    layer.qweight.weight_loader(layer.qweight, table)
    ids = torch.tensor([[0, 99, 7], [7, 7, 50]])
    rows = layer.quant_method.embedding(layer, ids)
    assert torch.equal(rows.double(), weights("Q4_K", table)[ids])
    x = values(2, 512)
    logits = layer.quant_method.apply(layer, x)
    check(logits[:, :100], x.double() @ weights("Q4_K", table).t(), FLOAT32)
    assert not logits[:, 100:].any()


@on_kernels
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_experts(tokens):
    from vllm.model_executor.layers.quantization.gguf import blocks as module

    refuse_the_host(module)
    types = ("Q8_0", "MXFP4", "Q8_0")
    moe, x = MoE(types, 3, 64, 96), values(tokens, 96)
    router, ids = routing(tokens, 2, [0, -1, 2])
    stacks = moe.stacks()
    importlib.import_module(f"{GGUF}.moe")
    out = torch.ops.vllm_glm_dsa.gguf_experts(
        x, stacks.w13, stacks.w2, router, ids, [kind_of(n).id for n in types], 64, 3
    )
    assert out.shape == x.shape
    if tokens:
        check(out, moe.reference(x, router, ids), FLOAT32)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_have_an_implementation_for_cuda(name):
    for module in ("blocks", "layout", "embedding", "moe"):
        importlib.import_module(f"{GGUF}.{module}")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has(f"vllm_glm_dsa::{name}", "CUDA")


def shards_and_blocks() -> tuple[tuple[layout.BlockShard, ...], torch.Tensor]:
    kinds = [kind_of("Q8_0"), kind_of("Q8_0"), kind_of("Q4_K")]
    shards = layout.lay_out(kinds, [5, 6, 7], 256, "m")
    tables = [random_blocks(s.kind.name, s.rows, 256) for s in shards]
    return shards, torch.cat([table.flatten() for table in tables])


def test_products_can_be_traced_with_any_number_of_tokens():
    shards, blocks = shards_and_blocks()

    def multiply(x: torch.Tensor) -> torch.Tensor:
        return layout.linear_of_shards(x * 2, shards, blocks) + 1

    counter = CompileCounter()
    compiled = torch.compile(multiply, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (2, 3, 70):
        x = values(tokens, 256)
        assert torch.equal(compiled(x), multiply(x))
    assert counter.frame_count == 1


def test_operators_keep_their_contract():
    """Shapes and dtypes of the stand-ins for tracing, nothing aliased or changed."""
    shards, blocks = shards_and_blocks()
    ids, counts = [s.kind.id for s in shards], [s.rows for s in shards]
    table = shards[2].view(blocks)
    moe = MoE(("Q8_0", "Q4_K", "Q8_0"), 2, 32, 256)
    stacks, (router, chosen) = moe.stacks(), routing(3, 2, [0, 1])
    types = [kind_of(name).id for name in moe.types]
    operators = torch.ops.vllm_glm_dsa
    for dtype in (torch.float32, torch.bfloat16):
        x = values(3, 256, dtype=dtype)
        experts = (x, stacks.w13, stacks.w2, router, chosen, types, 32, 2)
        rows = (table, torch.tensor([1, 0, 6]), 12, 256, dtype)
        torch.library.opcheck(operators.gguf_linear, (x, blocks, ids, counts))
        torch.library.opcheck(operators.gguf_dequantize, (table, 12, 256, dtype))
        torch.library.opcheck(operators.gguf_rows, rows)
        torch.library.opcheck(operators.gguf_experts, experts)
