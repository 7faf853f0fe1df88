# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Two ranks: layers on GGUF blocks, against whole matrices in float64.

The argument is a folder that the ranks share. It holds `file.pt`: module name ->
blocks. Experts are first cut by tensor parallelism, then spread whole. The ranks are
forks of one process, which imports vLLM for both.
"""

import os
import signal
import sys
from pathlib import Path

import torch

from tests.helpers.gguf_weights import file_experts, file_tensor, weights
from tests.helpers.limits import HANG_SECONDS
from tests.helpers.single_rank import rank_of
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.gguf.config import GGUFConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.transformers_utils.gguf.ggml_types import GGML_TYPES_BY_NAME

RANKS = 2
VOCAB, HIDDEN, INTERMEDIATE, EXPERTS = 100, 512, 512, 4
TYPES = {
    "embed_tokens": "Q6_K",
    "mlp.gate_proj": "Q4_K",
    "mlp.up_proj": "Q8_0",
    "mlp.down_proj": "Q5_K",
    "experts.gate_proj": "IQ4_XS",
    "experts.up_proj": "Q4_K",
    "experts.down_proj": "Q5_K",
}


def file_tensors() -> dict[str, torch.Tensor]:
    """Module name -> blocks, the experts' stacked."""
    sizes = {
        "embed_tokens": (VOCAB, HIDDEN),
        "gate_proj": (INTERMEDIATE, HIDDEN),
        "up_proj": (INTERMEDIATE, HIDDEN),
        "down_proj": (HIDDEN, INTERMEDIATE),
    }
    tensors = {}
    for seed, (name, kind) in enumerate(TYPES.items()):
        size = sizes[name.rpartition(".")[2]]
        tensors[name] = (
            file_experts(kind, EXPERTS, *size, seed)
            if name.startswith("experts")
            else file_tensor(kind, *size, seed)
        )
    return tensors


def make_layers(config: GGUFConfig) -> tuple[torch.nn.Module, ...]:
    table = VocabParallelEmbedding(
        VOCAB, HIDDEN, quant_config=config, prefix="embed_tokens"
    )
    gate_up = MergedColumnParallelLinear(
        HIDDEN,
        [INTERMEDIATE] * 2,
        bias=False,
        quant_config=config,
        prefix="mlp.gate_up_proj",
    )
    down = RowParallelLinear(
        INTERMEDIATE, HIDDEN, bias=False, quant_config=config, prefix="mlp.down_proj"
    )
    experts = FusedMoEFactory(
        num_experts=EXPERTS,
        top_k=2,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        params_dtype=torch.float32,
        renormalize=True,
        quant_config=config,
        prefix="experts",
    )
    return table, gate_up, down, experts


def load(layers: tuple[torch.nn.Module, ...], file: dict[str, torch.Tensor]) -> None:
    table, gate_up, down, experts = layers
    table.qweight.weight_loader(table.qweight, file["embed_tokens"])
    gate_up.qweight.weight_loader(gate_up.qweight, file["mlp.gate_proj"], 0)
    gate_up.qweight.weight_loader(gate_up.qweight, file["mlp.up_proj"], 1)
    down.qweight.weight_loader(down.qweight, file["mlp.down_proj"])
    routed = experts.routed_experts
    routed.w13_qweight.load_stacked(file["experts.gate_proj"], "w1")
    routed.w13_qweight.load_stacked(file["experts.up_proj"], "w3")
    routed.w2_qweight.load_stacked(file["experts.down_proj"], "w2")


def gated(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    return (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def routed_reference(
    x: torch.Tensor, logits: torch.Tensor, whole: dict[str, torch.Tensor]
) -> torch.Tensor:
    chosen, ids = logits.double().softmax(-1).topk(2)
    chosen = chosen / chosen.sum(-1, keepdim=True)
    names = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")
    rows = [
        sum(
            weight * gated(row, *(whole[name][expert] for name in names))
            for weight, expert in zip(chosen[token], ids[token], strict=True)
        )
        for token, row in enumerate(x.double())
    ]
    return torch.stack(rows)


def check_layers(
    layers: tuple[torch.nn.Module, ...],
    whole: dict[str, torch.Tensor],
    config: VllmConfig,
) -> None:
    table, gate_up, down, experts = layers
    ids = torch.tensor([0, 99, 49, 50, 51])
    torch.testing.assert_close(table(ids).double(), whole["embed_tokens"][ids])

    x = torch.randn(5, HIDDEN)
    gate, up = gate_up(x)[0].chunk(2, dim=-1)
    out, _ = down(torch.nn.functional.silu(gate) * up)
    names = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    expected = gated(x.double(), *(whole[name] for name in names))
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)

    logits = torch.randn(5, EXPERTS)
    with set_forward_context(None, config):
        out = experts(x, logits)
    expected = routed_reference(x, logits, whole)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def check_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    file = torch.load(folder / "file.pt")
    whole = {name: weights(TYPES[name], data) for name, data in file.items()}
    kinds = {name: GGML_TYPES_BY_NAME[kind] for name, kind in TYPES.items()}
    for expert_parallel in (False, True):
        store = f"file://{folder / f'store-{expert_parallel}'}"
        with rank_of(rank, RANKS, store, expert_parallel=expert_parallel) as config:
            layers = make_layers(GGUFConfig(kinds))
            load(layers, file)
            held = layers[-1].routed_experts.w2_qweight.shape[0]
            assert held == (EXPERTS // RANKS if expert_parallel else EXPERTS)
            check_layers(layers, whole, config)
            print(f"rank {rank} agrees, expert parallel: {expert_parallel}")


def start_rank(rank: int, folder: Path) -> None:
    if not os.fork():
        signal.alarm(HANG_SECONDS)
        check_rank(rank, folder)
        sys.exit()


if __name__ == "__main__":
    for rank in range(RANKS):
        start_rank(rank, Path(sys.argv[1]))
    if any([os.wait()[1] for _ in range(RANKS)]):
        sys.exit("a rank failed")
