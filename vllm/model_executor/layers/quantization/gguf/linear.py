# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Linear layers on raw GGUF blocks, and what they share with the vocabulary's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter

from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.gguf.layout import (
    Blocks,
    BlockShard,
    lay_out,
    linear_of_shards,
    load_shard,
)
from vllm.model_executor.layers.quantization.gguf.parallel import check_cut
from vllm.model_executor.utils import set_weight_attrs
from vllm.transformers_utils.gguf.ggml_types import GGMLType


def register_blocks(
    layer: torch.nn.Module,
    shards: tuple[BlockShard, ...],
    weight_loader: Callable[..., None],
) -> None:
    """Give `layer` its parameter `qweight`, uint8 [bytes], and `gguf_shards`."""
    size = sum(shard.nbytes for shard in shards)
    qweight = Parameter(torch.empty(size, dtype=torch.uint8), requires_grad=False)
    layer.register_parameter("qweight", qweight)
    layer.gguf_shards = shards
    set_weight_attrs(qweight, {"weight_loader": weight_loader})


def apply_blocks(
    layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`x` [..., columns] times the matrices of `layer`, in x's dtype."""
    out = linear_of_shards(x, layer.gguf_shards, layer.qweight)
    return out if bias is None else out + bias


class GGUFLinearMethod(LinearMethodBase):
    """A linear layer whose weight is the blocks of one or more GGUF tensors.

    The layer gets a parameter `qweight`, uint8 [bytes], and `gguf_shards`, where in
    it each matrix is. `kinds` has one type for each output partition of the layer.
    """

    def __init__(self, prefix: str, kinds: tuple[GGMLType, ...]) -> None:
        self.prefix = prefix
        self.kinds = kinds

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
        if len(self.kinds) != len(output_partition_sizes):
            raise ValueError(
                f"{self.prefix}: the layer has {len(output_partition_sizes)} output "
                f"partitions, but {len(self.kinds)} GGUF tensors make it up."
            )
        row_parts = output_size // sum(output_partition_sizes)
        column_parts = input_size // input_size_per_partition
        for kind in self.kinds:
            check_cut(self.prefix, kind, input_size, column_parts)
        shards = lay_out(
            self.kinds, output_partition_sizes, input_size_per_partition, self.prefix
        )
        load = partial(_load, layer, self.prefix, row_parts, column_parts)
        register_blocks(layer, shards, load)

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return apply_blocks(layer, x, bias)


def _load(
    layer: torch.nn.Module,
    prefix: str,
    row_parts: int,
    column_parts: int,
    param: Parameter,
    loaded_weight: Blocks,
    loaded_shard_id: int | None = None,
) -> None:
    shards: tuple[BlockShard, ...] = layer.gguf_shards
    if loaded_shard_id is None and len(shards) > 1:
        raise ValueError(
            f"{prefix} is made of {len(shards)} GGUF tensors; load each with its "
            f"shard id, 0 to {len(shards) - 1}."
        )
    shard = shards[loaded_shard_id or 0]
    load_shard(
        shard.view(param.data),
        shard,
        loaded_weight,
        row_parts=row_parts,
        column_parts=column_parts,
        rank=layer.tp_rank,
        what=prefix,
    )
