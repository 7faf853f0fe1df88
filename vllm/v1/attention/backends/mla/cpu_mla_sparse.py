# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""CPU_MLA_SPARSE: sparse MLA on the CPU in plain PyTorch.

All tokens, of prompts and of generation, take the way that vLLM calls decode: the
query is absorbed into the latent space and attends to the positions that the indexer
left in the shared top-k buffer. Correct and bounded in memory; not tuned for speed.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vllm.config import VllmConfig
from vllm.config.cache import CacheDType
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SharedTopkIndicesBuffer,
)
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MLAAttentionImpl,
    MultipleOf,
)
from vllm.v1.attention.backends.mla.sparse_mla_options import refuse_options
from vllm.v1.attention.ops.sparse_mla import sparse_mla, write_rows
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec


@dataclass
class CPUMLASparseMetadata(AttentionMetadata):
    """One batch, for the attention layers and the indexers alike."""

    num_actual_tokens: int
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: list[int]
    seq_lens: list[int]
    req_id_per_token: torch.Tensor
    # The shared MLA layer splits tokens by these: everything is "decode".
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0


class CPUMLASparseMetadataBuilder(AttentionMetadataBuilder[CPUMLASparseMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUMLASparseMetadata:
        batch = common_attn_metadata
        num_reqs, num_tokens = batch.num_reqs, batch.num_actual_tokens
        starts = batch.query_start_loc_cpu[: num_reqs + 1]
        return CPUMLASparseMetadata(
            num_actual_tokens=num_tokens,
            slot_mapping=batch.slot_mapping[:num_tokens],
            block_table=batch.block_table_tensor[:num_reqs],
            query_start_loc=starts.tolist(),
            seq_lens=batch.seq_lens[:num_reqs].tolist(),
            req_id_per_token=torch.repeat_interleave(
                torch.arange(num_reqs), starts.diff().long(), output_size=num_tokens
            ),
            num_decodes=num_reqs,
            num_decode_tokens=num_tokens,
        )


class CPUMLASparseBackend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float32,
        torch.bfloat16,
        torch.float16,
    ]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "float16",
        "bfloat16",
    ]

    @staticmethod
    def get_name() -> str:
        return "CPU_MLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type["CPUMLASparseImpl"]:
        return CPUMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[CPUMLASparseMetadataBuilder]:
        return CPUMLASparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True


class CPUSparseIndexerBackend(CPUMLASparseBackend):
    """Of the indexer's key cache, which only needs the metadata and block sizes."""

    @staticmethod
    def get_name() -> str:
        return "CPU_SPARSE_INDEXER"


class CPUMLASparseImpl(MLAAttentionImpl[CPUMLASparseMetadata], SharedTopkIndicesBuffer):
    is_sparse: ClassVar[bool] = True
    supports_dense_mha_prefill: bool = False
    supports_pcp: bool = False
    can_return_lse_for_decode: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        *,
        kv_lora_rank: int,
        topk_indices_buffer: torch.Tensor | None = None,
        indexer: object | None = None,
        **mla_args: Any,
    ) -> None:
        refuse_options(
            "CPU_MLA_SPARSE",
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            attn_type=attn_type,
        )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank = kv_lora_rank
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)

    def record_logical_topk_ready(self) -> None:
        """Nothing to do: there is one stream of work on the CPU."""

    def forward_mha(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("CPU_MLA_SPARSE has no dense prefill path.")

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Store latents [T, kv_lora_rank] and rotated keys [T, 1, rope] as rows."""
        if kv_cache.numel() == 0:
            return
        rows = torch.cat([kv_c_normed, k_pe.squeeze(1)], dim=-1)
        write_rows(kv_cache, slot_mapping, rows[: slot_mapping.numel()])

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: CPUMLASparseMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to the rows that the top-k buffer names, request-local and -1 padded.

        Returns:
            [T, heads, kv_lora_rank] in the dtype of q, and the softmax LSE [T, heads].
        """
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        assert self.topk_indices_buffer is not None
        longest = max(attn_metadata.seq_lens)
        return sparse_mla(
            q,
            kv_c_and_k_pe_cache,
            self.topk_indices_buffer[: q.shape[0], :longest],
            attn_metadata.req_id_per_token,
            attn_metadata.block_table,
            scale=self.scale,
            kv_lora_rank=self.kv_lora_rank,
        )
