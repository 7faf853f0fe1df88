# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""How a model is spread over ranks: tensor, pipeline and expert parallelism."""

from dataclasses import dataclass

from vllm.transformers_utils.gguf.glm_dsa import GlmDsaConfig

# vLLM makes vocabularies a multiple of this before it cuts them.
VOCAB_PADDING = 64


@dataclass(frozen=True, slots=True)
class Split:
    """Degrees of parallelism.

    `layers` has the number of hidden layers of each pipeline stage. With `experts`,
    whole routed experts are spread over the tensor-parallel ranks.
    """

    tensor: int
    pipeline: int
    experts: bool
    layers: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline

    @property
    def name(self) -> str:
        parts = [f"TP {self.tensor}"]
        if self.pipeline > 1:
            parts.append(f"PP {self.pipeline}")
        if self.experts:
            parts.append("EP")
        return ", ".join(parts)

    def stage_of(self, layer: int) -> int:
        """The stage of a hidden layer; that of all layers behind them is the last."""
        end = 0
        for stage, count in enumerate(self.layers):
            end += count
            if layer < end:
                return stage
        return self.pipeline - 1

    def first_layer(self, stage: int) -> int:
        return sum(self.layers[:stage])


def padded_vocab(config: GlmDsaConfig) -> int:
    """Rows of embedding and head as vLLM allocates them, over all ranks."""
    return -(-config.vocab_size // VOCAB_PADDING) * VOCAB_PADDING


def local_experts(config: GlmDsaConfig, split: Split) -> int:
    """Routed experts of one layer on the rank that has most of them."""
    if not split.experts:
        return config.n_routed_experts
    return -(-config.n_routed_experts // split.tensor)


def uneven_parts(config: GlmDsaConfig, degree: int, *, experts: bool) -> list[str]:
    """What cannot be cut into `degree` equal parts, which vLLM needs."""
    sizes = {
        "attention heads": config.num_attention_heads,
        "rows of the padded vocabulary": padded_vocab(config),
        "columns of the dense feed-forward": config.intermediate_size,
        "columns of the shared experts": (
            config.moe_intermediate_size * config.n_shared_experts
        ),
    }
    if not experts:
        sizes["columns of the routed experts"] = config.moe_intermediate_size
    return [f"{size} {what}" for what, size in sizes.items() if size % degree]


def aligned_layers(config: GlmDsaConfig, stages: int) -> tuple[int, ...] | None:
    """Layers of each stage, about equal, so that every stage begins at an indexer.

    None if there are not enough such layers.
    """
    hidden = config.num_hidden_layers
    starts = [0]
    for stage in range(1, stages):
        target = hidden * stage / stages
        possible = [
            layer
            for layer in range(starts[-1] + 1, hidden)
            if config.indexer_full[layer]
        ]
        if not possible:
            return None
        starts.append(min(possible, key=lambda layer: abs(layer - target)))
    ends = [*starts[1:], hidden]
    return tuple(end - start for start, end in zip(starts, ends, strict=True))
