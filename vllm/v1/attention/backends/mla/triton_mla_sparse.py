# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""TRITON_MLA_SPARSE: sparse MLA for every NVIDIA GPU from compute capability 8.0 on.

All tokens, of prompts and of generation, take the way that vLLM calls decode: the query
is absorbed into the latent space and attends to the cache rows that the indexer chose.
The base class turns chosen positions into row numbers, with DCP, index groups and
HiSparse; here is what the kernel needs besides. Docs: docs/design/sparse_mla.md.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.config.cache import CacheDType
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionLayer,
    MultipleOf,
    max_decode_query_len,
)
from vllm.v1.attention.backends.mla.sparse_mla_options import refuse_options
from vllm.v1.attention.backends.mla.sparse_utils import (
    align_blocks_to_rows,
    flat_kv_row_view,
)
from vllm.v1.attention.backends.mla.triton_mla_sparse_warmup import register_warmup
from vllm.v1.attention.ops.metadata import compute_token_to_req_indices
from vllm.v1.attention.ops.sparse_mla.triton_sparse_mla import (
    LATENT_DIM,
    MAX_HEADS,
    ROPE_DIM,
    triton_sparse_mla,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MLAAttentionSpec

# Longest query that still counts as decode. Both kinds of tokens run the same kernel;
# for decode alone layers that share an indexer convert its indices once.
DECODE_QUERY_LEN = 128
# Cache dtypes that store values as they are, and the dtype of activations they need.
PLAIN_CACHE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class TritonMLASparseBackend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "bfloat16",
        "float16",
        "fp8",
        "fp8_e4m3",
        "fp8_ds_mla",
    ]

    @staticmethod
    def get_name() -> str:
        return "TRITON_MLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type["TritonMLASparseImpl"]:
        return TritonMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type["TritonMLASparseMetadataBuilder"]:
        return TritonMLASparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [MultipleOf(64)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        # The latent row, with and without a rotated part of 64 values.
        return [LATENT_DIM + ROPE_DIM, LATENT_DIM]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return align_blocks_to_rows(spec)

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability >= DeviceCapability(8, 0)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: CacheDType | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        """Why this combination cannot run, or None."""
        needed = PLAIN_CACHE_DTYPES.get(kv_cache_dtype or "auto", dtype)
        if needed != dtype:
            return (
                f"a {kv_cache_dtype} KV cache needs {kv_cache_dtype} activations, not "
                f"{str(dtype).removeprefix('torch.')}: leave --kv-cache-dtype at auto, "
                "or ask for an fp8 one"
            )
        vllm_config = get_current_vllm_config_or_none()
        return None if vllm_config is None else _model_reason(vllm_config)


def _model_reason(vllm_config: VllmConfig) -> str | None:
    """Why this model, or the way it is split, cannot run; None if it can."""
    parallel = vllm_config.parallel_config
    dcp_size = parallel.decode_context_parallel_size
    if parallel.prefill_context_parallel_size > 1 and dcp_size > 1:
        return "prefill and decode context parallelism cannot be combined"
    if vllm_config.model_config is None:
        return None
    config = vllm_config.model_config.hf_text_config
    if getattr(config, "index_topk", None) is None:
        return "the model has no index_topk"
    rank = getattr(config, "kv_lora_rank", None)
    if rank != LATENT_DIM:
        return f"kv_lora_rank {rank} is not {LATENT_DIM}"
    # Decode context parallelism gathers the heads of all its ranks.
    heads = dcp_size * vllm_config.model_config.get_num_attention_heads(parallel)
    if heads > MAX_HEADS:
        return f"{heads} query heads per rank are more than {MAX_HEADS}"
    return None


@dataclass(kw_only=True)
class TritonMLASparseMetadata(SparseMLACommonMetadata):
    """One batch. The kernel itself needs nothing beyond the base class."""


class TritonMLASparseMetadataBuilder(
    SparseMLACommonMetadataBuilder[TritonMLASparseMetadata]
):
    """Metadata of decode batches, which CUDA graphs may replay.

    The kernel works token by token: of a request it knows the entry of
    `req_id_per_token`, which the device computes from the device's query lengths.
    """

    metadata_cls = TritonMLASparseMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def get_varlen_cudagraph_max_query_len(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> int | None:
        return max_decode_query_len(vllm_config)

    def __init__(
        self,
        kv_cache_spec: MLAAttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(
            DECODE_QUERY_LEN,
            supports_spec_as_decode=True,
            supports_dcp_with_varlen=True,
        )
        self.supports_draft_decode_metadata_update = (
            self.dcp_world_size == 1
            and self.pcp_world_size == 1
            and vllm_config.attention_config.hisparse_config is None
        )
        register_warmup(vllm_config, kv_cache_spec, device, self.dcp_world_size)

    def update_draft_decode_metadata(self, metadata: TritonMLASparseMetadata) -> None:
        """Refresh the map from tokens to requests in place, safe to capture."""
        tokens = metadata.num_decode_tokens
        if tokens:
            compute_token_to_req_indices(
                metadata.query_start_loc, metadata.req_id_per_token, tokens, tokens
            )


class TritonMLASparseImpl(SparseMLACommonImpl[TritonMLASparseMetadata]):
    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    # Which positions a query may see is in its list of indices alone.
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True
    supports_quant_query_input: bool = False
    group_conversion_decode_only: ClassVar[bool] = True

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
        **mla_args: Any,
    ) -> None:
        refuse_options(
            "TRITON_MLA_SPARSE",
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            attn_type=attn_type,
        )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        self.per_tensor_fp8 = kv_cache_dtype in ("fp8", "fp8_e4m3")
        # The dense way for short prompts needs FlashAttention kernels for the model's
        # head sizes, and has no fp16 or rope-free form for fp8_ds_mla. HiSparse never
        # takes it, but builds what it stages prompts with only where it could.
        config = get_current_vllm_config_or_none()
        self.supports_dense_mha_prefill = (
            config is not None and config.attention_config.hisparse_config is not None
        )

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
        """Store latents [T, 512] and rotated keys [T, 1, rope] as cache rows.

        The release's operation copies the 16-bit rotated keys of an fp8_ds_mla row bit
        by bit; by the format they are bfloat16.
        """
        if kv_cache_dtype == "fp8_ds_mla":
            kv_c_normed, k_pe = kv_c_normed.bfloat16(), k_pe.bfloat16()
        super().do_kv_cache_update(
            kv_c_normed,
            k_pe,
            kv_cache,
            slot_mapping,
            kv_cache_dtype,
            k_scale,
            skip_scale,
        )

    def _forward_mqa_kernel(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        valid_counts: torch.Tensor,
        *,
        layer: AttentionLayer,
        block_size: int,
        is_decode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to cache rows.

        Args:
            q: [T, heads, 512 + rope], or its two parts.
            kv_cache: [blocks, block size, width], blocks any whole number of rows
                apart: values as q, float8_e4m3fn, or uint8 rows of fp8_ds_mla.
            topk_indices: [T, K] int32 numbers of rows, counted from the first block.
            valid_counts: [T] int32, how many leading entries of a row to use.

        Returns:
            [T, heads, 512] as q, and the natural logarithm of the softmax
            denominator, [T, heads] float32; 0 and -inf without any row.
        """
        rows, _ = flat_kv_row_view(kv_cache, kv_cache.shape[1])
        return triton_sparse_mla(
            q,
            rows,
            topk_indices,
            valid_counts,
            scale=self.scale,
            kv_scale=layer._k_scale if self.per_tensor_fp8 else None,
        )
