# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Token embedding and LM head on raw GGUF blocks."""

from functools import partial
from typing import Any

import torch
from torch.nn import Parameter

from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.gguf.blocks import dequantize
from vllm.model_executor.layers.quantization.gguf.layout import (
    BlockShard,
    lay_out,
    linear,
    load_shard,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.transformers_utils.gguf.ggml_types import GGMLType


class GGUFEmbeddingMethod(QuantizeMethodBase):
    """A vocabulary table whose weight is the blocks of one GGUF tensor.

    The parameter `qweight`, uint8 [bytes], holds this rank's rows. Rows beyond the
    vocabulary, which the layer adds to make it divisible, are zero bytes; they
    dequantize to zeros in every type.
    """

    def __init__(self, prefix: str, kind: GGMLType) -> None:
        self.prefix = prefix
        self.kind = kind

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        if layer.num_added_embeddings:
            raise NotImplementedError(
                f"{self.prefix}: {layer.num_added_embeddings} added tokens were asked "
                "for; a GGUF vocabulary cannot be extended. Remove them (LoRA with "
                "extra vocabulary is not supported)."
            )
        shards = lay_out([self.kind], output_partition_sizes, input_size, self.prefix)
        size = shards[0].nbytes
        qweight = Parameter(torch.empty(size, dtype=torch.uint8), requires_grad=False)
        layer.register_parameter("qweight", qweight)
        layer.gguf_shards = shards
        set_weight_attrs(qweight, {"weight_loader": partial(_load, layer, self.prefix)})

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        (shard,) = layer.gguf_shards
        rows = shard.view(layer.qweight).index_select(0, input_.reshape(-1))
        values = dequantize(rows, shard.kind, shard.columns, layer.params_dtype)
        return values.view(*input_.shape, shard.columns)

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        (shard,) = layer.gguf_shards
        out = linear(x, shard, shard.view(layer.qweight))
        return out if bias is None else out + bias

    def tie_weights(
        self, layer: torch.nn.Module, embed_tokens: torch.nn.Module
    ) -> torch.nn.Module:
        """Make `layer`, an LM head, use the bytes of `embed_tokens`."""
        if not isinstance(embed_tokens.quant_method, GGUFEmbeddingMethod):
            raise ValueError(
                f"{self.prefix} holds {self.kind.name} blocks, but the embedding it is "
                "to share its weights with does not hold GGUF blocks."
            )
        layer.qweight = embed_tokens.qweight
        layer.gguf_shards = embed_tokens.gguf_shards
        return layer


def _load(
    layer: torch.nn.Module,
    prefix: str,
    param: Parameter,
    loaded_weight: torch.Tensor,
) -> None:
    shard: BlockShard
    (shard,) = layer.gguf_shards
    if loaded_weight.dim() != 2 or loaded_weight.shape[0] != layer.org_vocab_size:
        raise ValueError(
            f"{prefix}: expected {layer.org_vocab_size} rows of blocks, one for each "
            f"token; found a tensor of shape {list(loaded_weight.shape)}."
        )
    start = layer.shard_indices.org_vocab_start_index
    count = layer.shard_indices.org_vocab_end_index - start
    (part,) = lay_out([shard.kind], [count], shard.columns, prefix)
    table = shard.view(param.data)
    table[count:].zero_()
    load_shard(
        table[:count],
        part,
        loaded_weight.narrow(0, start, count),
        row_parts=1,
        column_parts=1,
        rank=0,
        what=prefix,
    )
