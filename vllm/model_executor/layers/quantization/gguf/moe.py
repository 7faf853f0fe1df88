# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Routed experts on raw GGUF blocks.

Each parameter has one row of bytes for each local expert, so that an expert is one
contiguous piece and can be moved alone. In `w13_qweight` a row holds the gate matrix,
then the up matrix; their types may differ. With equal types the two are one matrix of
twice the rows, as vLLM's kernels for other formats have it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn import Parameter

from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEQuantConfig,
)
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import (
    FusedMoEMethodBase,
)
from vllm.model_executor.layers.quantization.gguf.layout import (
    Blocks,
    BlockShard,
    lay_out,
    linear,
    load_shard,
)
from vllm.model_executor.layers.quantization.gguf.parallel import check_cut
from vllm.model_executor.utils import set_weight_attrs
from vllm.transformers_utils.gguf.ggml_types import GGMLType, ggml_type

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


@dataclass(frozen=True)
class ExpertTypes:
    """ggml types of one layer's stacked expert tensors."""

    gate: GGMLType
    up: GGMLType
    down: GGMLType


@dataclass(frozen=True)
class ExpertLayout:
    """The matrices of one local expert.

    `w1` (gate) and `w3` (up), [intermediate, hidden], lie in a row of `w13_qweight`;
    `w2` (down), [hidden, intermediate], lies in a row of `w2_qweight`.
    """

    w1: BlockShard
    w3: BlockShard
    w2: BlockShard


def expert_layout(
    types: ExpertTypes, hidden: int, intermediate: int, what: str
) -> ExpertLayout:
    """The layout of experts of `intermediate` (on this rank) by `hidden` weights."""
    w1, w3 = lay_out([types.gate, types.up], [intermediate] * 2, hidden, what)
    (w2,) = lay_out([types.down], [hidden], intermediate, what)
    return ExpertLayout(w1, w3, w2)


class GGUFMoEMethod(FusedMoEMethodBase):
    """Routed experts whose weights are blocks of stacked GGUF tensors.

    The layer gets `w13_qweight` and `w2_qweight`, uint8 [local experts, bytes], and
    `gguf_experts`, where in a row each matrix is.
    """

    def __init__(self, prefix: str, types: ExpertTypes, moe: FusedMoEConfig) -> None:
        super().__init__(moe)
        self.prefix = prefix
        self.types = types

    def create_weights(
        self,
        layer: "RoutedExperts",
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self._check_supported(layer, hidden_size)
        check_cut(
            f"{self.prefix}.down_proj",
            self.types.down,
            self.moe.intermediate_size,
            self.moe.tp_size,
        )
        layout = expert_layout(
            self.types, hidden_size, intermediate_size_per_partition, self.prefix
        )
        layer.gguf_experts = layout
        sizes = {
            "w13_qweight": layout.w1.nbytes + layout.w3.nbytes,
            "w2_qweight": layout.w2.nbytes,
        }
        for name, size in sizes.items():
            data = torch.empty(num_experts, size, dtype=torch.uint8)
            param = Parameter(data, requires_grad=False)
            layer.register_parameter(name, param)
            set_weight_attrs(
                param,
                {
                    "weight_loader": partial(_load_expert, layer, self.prefix),
                    "load_stacked": partial(_load_stacked, layer, self.prefix, param),
                },
            )

    def _check_supported(self, layer: "RoutedExperts", hidden_size: int) -> None:
        problems = {
            f"activation {layer.activation.value}": layer.activation
            != MoEActivation.SILU,
            "a SwiGLU limit": layer.swiglu_limit is not None,
            "expert biases": self.moe.has_bias,
            "a padded hidden size": hidden_size != self.moe.hidden_dim_unpadded,
        }
        for problem, present in problems.items():
            if present:
                raise NotImplementedError(
                    f"{self.prefix}: experts with {problem} cannot be computed from "
                    "GGUF blocks."
                )

    def get_fused_moe_quant_config(
        self, layer: "RoutedExperts"
    ) -> FusedMoEQuantConfig | None:
        return None

    def apply(
        self,
        layer: "RoutedExperts",
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # The runner computes shared experts and the scale of the routed output: this
        # method has no modular kernel that could overlap with them.
        local_ids = topk_ids.long()
        if layer.expert_map is not None:
            mapped = layer.expert_map.long()[local_ids.clamp_min(0)]
            local_ids = torch.where(local_ids < 0, -1, mapped)
        if layer.apply_router_weight_on_input:
            if topk_weights.shape[-1] != 1:
                raise ValueError(
                    f"{self.prefix}: router weights can be applied to the input only "
                    f"with one expert per token, not {topk_weights.shape[-1]}."
                )
            x = x * topk_weights.to(x.dtype)
            topk_weights = torch.ones_like(topk_weights)
        types = self.types
        return torch.ops.vllm_glm_dsa.gguf_experts(
            x,
            layer.w13_qweight,
            layer.w2_qweight,
            topk_weights.float(),
            local_ids,
            [types.gate.id, types.up.id, types.down.id],
            layer.gguf_experts.w2.columns,
            self.moe.num_logical_experts,
        )


@torch.library.custom_op("vllm_glm_dsa::gguf_experts", mutates_args=())
def _experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    local_ids: torch.Tensor,
    type_ids: Sequence[int],
    intermediate: int,
    chosen_from: int,
) -> torch.Tensor:
    """Sum of the chosen local experts of each token, router weights applied.

    x: [tokens, hidden]. w13, w2: uint8 [local experts, bytes]. topk_weights: float32
    and local_ids: int64 [tokens, top-k]; an id of -1 is an expert of another rank.
    type_ids: gate, up, down. chosen_from: number of experts on all ranks. Returns
    [tokens, hidden] in x's dtype, summed in float32. An operator of its own, since the
    loop depends on the data.
    """
    return _expert_by_expert(
        x, w13, w2, topk_weights, local_ids, type_ids, intermediate
    )


@_experts.register_kernel("cuda")
def _experts_on_gpu(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    local_ids: torch.Tensor,
    type_ids: Sequence[int],
    intermediate: int,
    chosen_from: int,
) -> torch.Tensor:
    from vllm.model_executor.layers.quantization.gguf import cuda_moe, triton_moe

    kinds = [ggml_type(type_id) for type_id in type_ids]
    experts = triton_moe.Experts(w13, w2, *kinds, intermediate, chosen_from)
    if cuda_moe.takes_experts(x, experts, local_ids):
        return cuda_moe.cuda_experts(x, experts, topk_weights, local_ids)
    if triton_moe.is_aligned(experts, x.shape[1]):
        return triton_moe.triton_experts(x, experts, topk_weights, local_ids)
    return _expert_by_expert(
        x, w13, w2, topk_weights, local_ids, type_ids, intermediate
    )


def _expert_by_expert(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    local_ids: torch.Tensor,
    type_ids: Sequence[int],
    intermediate: int,
) -> torch.Tensor:
    """The reference of `_experts`."""
    gate, up, down = (ggml_type(type_id) for type_id in type_ids)
    layout = expert_layout(
        ExpertTypes(gate, up, down), x.shape[-1], intermediate, "experts"
    )
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in local_ids.unique().tolist():
        if expert < 0:
            continue
        tokens, slots = torch.where(local_ids == expert)
        rows = x[tokens]
        hidden = F.silu(linear(rows, layout.w1, layout.w1.view(w13[expert])))
        hidden = hidden * linear(rows, layout.w3, layout.w3.view(w13[expert]))
        values = linear(hidden, layout.w2, layout.w2.view(w2[expert])).float()
        out.index_add_(0, tokens, values * topk_weights[tokens, slots].unsqueeze(-1))
    return out.to(x.dtype)


@_experts.register_fake
def _(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    local_ids: torch.Tensor,
    type_ids: Sequence[int],
    intermediate: int,
    chosen_from: int,
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _load_expert(
    layer: "RoutedExperts",
    prefix: str,
    param: Parameter,
    loaded_weight: Blocks,
    weight_name: str,
    shard_id: str,
    expert_id: int,
    return_success: bool = False,
) -> bool | None:
    """Load one expert's matrix of the file, uint8 [rows, row bytes].

    `expert_id` counts all experts; one of another rank is skipped.
    """
    local_id = layer._map_global_expert_id_to_local_expert_id(expert_id)
    if local_id != -1:
        shard: BlockShard = getattr(layer.gguf_experts, shard_id)
        parts = layer.moe_config.tp_size
        load_shard(
            shard.view(param.data[local_id]),
            shard,
            loaded_weight,
            row_parts=1 if shard_id == "w2" else parts,
            column_parts=parts if shard_id == "w2" else 1,
            rank=layer.moe_config.tp_rank,
            what=f"{prefix}.{expert_id} {shard_id}",
        )
    return local_id != -1 if return_success else None


def _load_stacked(
    layer: "RoutedExperts",
    prefix: str,
    param: Parameter,
    stacked: torch.Tensor,
    shard_id: str,
) -> None:
    """Load a whole stacked tensor of the file, uint8 [experts, rows, row bytes]."""
    experts = layer.moe_config.num_logical_experts
    if stacked.dim() != 3 or stacked.shape[0] != experts:
        raise ValueError(
            f"{prefix} {shard_id}: expected the blocks of {experts} experts, found a "
            f"tensor of shape {list(stacked.shape)}."
        )
    for expert_id in range(experts):
        _load_expert(
            layer, prefix, param, stacked[expert_id], prefix, shard_id, expert_id
        )
