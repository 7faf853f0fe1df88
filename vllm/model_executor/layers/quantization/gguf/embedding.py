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
    Blocks,
    BlockShard,
    lay_out,
    load_shard,
)
from vllm.model_executor.layers.quantization.gguf.linear import (
    apply_blocks,
    register_blocks,
)
from vllm.transformers_utils.gguf.ggml_types import GGMLType, ggml_type


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
        register_blocks(layer, shards, partial(_load, layer, self.prefix))

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        (shard,) = layer.gguf_shards
        values = torch.ops.vllm_glm_dsa.gguf_rows(
            shard.view(layer.qweight),
            input_.reshape(-1),
            shard.kind.id,
            shard.columns,
            layer.params_dtype,
        )
        return values.view(*input_.shape, shard.columns)

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return apply_blocks(layer, x, bias)

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


@torch.library.custom_op("vllm_glm_dsa::gguf_rows", mutates_args=())
def _rows(
    blocks: torch.Tensor,
    row_ids: torch.Tensor,
    type_id: int,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The rows `row_ids` [n] of `blocks`, uint8 [rows, row bytes], as [n, columns]."""
    rows = blocks.index_select(0, row_ids)
    return dequantize(rows, ggml_type(type_id), columns, dtype)


@_rows.register_kernel("cuda")
def _rows_on_gpu(
    blocks: torch.Tensor,
    row_ids: torch.Tensor,
    type_id: int,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    from vllm.model_executor.layers.quantization.gguf import triton_dequantize

    return triton_dequantize.triton_dequantize(
        blocks, ggml_type(type_id), columns, dtype, row_ids=row_ids.contiguous()
    )


@_rows.register_fake
def _(
    blocks: torch.Tensor,
    row_ids: torch.Tensor,
    type_id: int,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return blocks.new_empty((row_ids.shape[0], columns), dtype=dtype)


def _load(
    layer: torch.nn.Module,
    prefix: str,
    param: Parameter,
    loaded_weight: Blocks,
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
