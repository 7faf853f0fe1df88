# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The DSA indexer on the CPU: plain PyTorch, key cache in the dtype of the model.

The release's indexer quantizes queries and keys to FP8 with kernels that the CPU build
lacks. This one has the same parameters under the same names, so that checkpoints load
as they are, and leaves its choice in the same shared top-k buffer.
"""

from typing import Any

import torch
from torch import nn

from vllm.config import CacheConfig, VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    ReplicatedLinear,
)
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.mla.cpu_mla_sparse import (
    CPUMLASparseMetadata,
    CPUSparseIndexerBackend,
)
from vllm.v1.attention.ops.dsa_indexer import select_positions
from vllm.v1.attention.ops.sparse_mla import write_rows
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, SparseCacheRole


def indexer_for_platform(release_indexer: type[nn.Module]) -> type[nn.Module]:
    """`CPUIndexer` on the CPU, elsewhere the release's class unchanged."""
    return CPUIndexer if current_platform.is_cpu() else release_indexer


class CPUIndexerCache(nn.Module, AttentionLayerBase):
    """The paged key cache of one indexer, [num_blocks, block_size, head_dim]."""

    def __init__(
        self, head_dim: int, dtype: torch.dtype, prefix: str, cache_config: CacheConfig
    ) -> None:
        super().__init__()
        self.kv_cache = torch.tensor([])
        self.head_dim = head_dim
        self.dtype = dtype
        self.prefix = prefix
        self.cache_config = cache_config
        layers = get_current_vllm_config().compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"Two attention layers are named {prefix!r}.")
        layers[prefix] = self

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        self.kv_cache = kv_cache.squeeze(1)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return MLAAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=self.head_dim,
            dtype=self.dtype,
            cache_role=SparseCacheRole.INDEXER,
        )

    def get_attn_backend(self) -> type[AttentionBackend]:
        return CPUSparseIndexerBackend


class CPUIndexer(nn.Module):
    """Takes the place of `Indexer` in `deepseek_v2`; see there for the arguments."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        config: Any,
        hidden_size: int,
        q_lora_rank: int,
        quant_config: QuantizationConfig | None,
        cache_config: CacheConfig,
        topk_indices_buffer: torch.Tensor,
        prefix: str = "",
        is_inplace_rope: bool = False,
    ) -> None:
        super().__init__()
        self.topk_tokens: int = config.index_topk
        self.n_head: int = config.index_n_heads
        self.head_dim: int = config.index_head_dim
        self.rope_dim: int = config.qk_rope_head_dim
        self.wq_b = ReplicatedLinear(
            q_lora_rank,
            self.n_head * self.head_dim,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.wq_b",
        )
        self.wk_weights_proj = MergedColumnParallelLinear(
            hidden_size,
            [self.head_dim, self.n_head],
            bias=False,
            quant_config=None,
            disable_tp=True,
            prefix=f"{prefix}.wk_weights_proj",
        )
        self.k_norm = LayerNorm(self.head_dim, eps=1e-6, dtype=torch.float32)
        self.weight_scale = self.head_dim**-0.5 * self.n_head**-0.5
        self.topk_indices_buffer = topk_indices_buffer
        self.k_cache = CPUIndexerCache(
            head_dim=self.head_dim,
            dtype=torch.get_default_dtype(),
            prefix=f"{prefix}.k_cache",
            cache_config=cache_config,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        qr: torch.Tensor,
        positions: torch.Tensor,
        rotary_emb: nn.Module,
    ) -> torch.Tensor:
        """Write the top-k buffer for `hidden_states` [T, hidden] and return it.

        Args:
            qr: [T, q_lora_rank], the normalized low-rank query.
            positions: [T]
        """
        q = self.wq_b(qr)[0].view(-1, self.n_head, self.head_dim)
        k, weights = self.wk_weights_proj(hidden_states)[0].split(
            [self.head_dim, self.n_head], dim=-1
        )
        k = self.k_norm(k)
        q_pe, k_pe = rotary_emb(
            positions,
            q[..., : self.rope_dim].contiguous(),
            k[:, None, : self.rope_dim].contiguous(),
        )
        q = torch.cat([q_pe, q[..., self.rope_dim :]], dim=-1)
        k = torch.cat([k_pe.squeeze(1), k[:, self.rope_dim :]], dim=-1)

        metadata = get_forward_context().attn_metadata
        # Profiling and warm-up runs have no batch.
        if isinstance(metadata, dict):
            self._select(q, k, weights, metadata[self.k_cache.prefix])
        return self.topk_indices_buffer

    def _select(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        weights: torch.Tensor,
        metadata: CPUMLASparseMetadata,
    ) -> None:
        num_tokens = metadata.num_actual_tokens
        cache = self.k_cache.kv_cache
        write_rows(cache, metadata.slot_mapping, k[:num_tokens])
        weights = weights.float() * self.weight_scale
        self.topk_indices_buffer[:num_tokens] = -1
        starts = metadata.query_start_loc
        for request, seq_len in enumerate(metadata.seq_lens):
            start, stop = starts[request], starts[request + 1]
            if start == stop:
                continue
            width = min(self.topk_tokens, seq_len)
            self.topk_indices_buffer[start:stop, :width] = select_positions(
                q[start:stop],
                weights[start:stop],
                cache,
                metadata.block_table[request],
                first_position=seq_len - (stop - start),
                topk=width,
            )
