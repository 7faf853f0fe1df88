# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Compiles what TRITON_MLA_SPARSE may launch before requests come.

The release's own warm-up and the capture of CUDA graphs only meet small batches. A long
prompt may take another configuration of the table, and would wait for its compilation.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm.model_executor.warmup.jit_warmup import VllmJitKernel
from vllm.platforms import current_platform
from vllm.v1.attention.ops.sparse_mla.triton_sparse_mla import (
    DS_MLA_ROW_BYTES,
    LATENT_DIM,
    triton_sparse_mla,
)
from vllm.v1.attention.ops.sparse_mla.tuning import (
    CacheFormat,
    KernelConfig,
    choose_config,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

# Any count compiles the same code; this one keeps the tensors small.
TOKENS = 16
ROWS = 64


@dataclass(frozen=True)
class WarmupKey:
    """One compilation: the shapes and dtypes of a call, and its configuration."""

    heads: int
    topk: int
    rope: int
    dtype: torch.dtype
    cache_dtype: str
    device: torch.device
    packed_query: bool
    config: KernelConfig


class SparseMLAWarmup(VllmJitKernel[WarmupKey]):
    """The kernel's entry in the release's registry of compilations at startup."""

    CompileKey = WarmupKey

    def get_warmup_keys(self, keys: tuple[WarmupKey, ...]) -> list[WarmupKey]:
        return list(keys)

    def compile(self, compile_key: WarmupKey) -> None:
        """Run the kernel once on rows of zeros."""
        key, zeros = compile_key, torch.zeros
        if key.packed_query:
            q: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = zeros(
                TOKENS,
                key.heads,
                LATENT_DIM + key.rope,
                dtype=key.dtype,
                device=key.device,
            )
        else:
            latent = zeros(
                key.heads, TOKENS, LATENT_DIM, dtype=key.dtype, device=key.device
            )
            rope = zeros(
                TOKENS, key.heads, key.rope, dtype=key.dtype, device=key.device
            )
            q = latent.transpose(0, 1), rope
        width, row_dtype = _row_format(key)
        index = torch.arange(key.topk, dtype=torch.int32, device=key.device) % ROWS
        triton_sparse_mla(
            q,
            zeros(ROWS, width, dtype=row_dtype, device=key.device),
            index.expand(TOKENS, -1).contiguous(),
            torch.full((TOKENS,), key.topk, dtype=torch.int32, device=key.device),
            scale=1.0,
            kv_scale=(
                torch.ones((), device=key.device) if _is_fp8(key.cache_dtype) else None
            ),
            config=key.config,
        )


KERNEL = SparseMLAWarmup()


def register_warmup(
    vllm_config: "VllmConfig",
    spec: "MLAAttentionSpec",
    device: torch.device,
    dcp_size: int,
) -> None:
    """Ask for the compilation of all that layers with this cache may launch."""
    if vllm_config.kernel_config.enable_jit_warmup:
        KERNEL.register_warmup(keys=warmup_keys(vllm_config, spec, device, dcp_size))


def warmup_keys(
    vllm_config: "VllmConfig",
    spec: "MLAAttentionSpec",
    device: torch.device,
    dcp_size: int,
) -> tuple[WarmupKey, ...]:
    """One key for each configuration that some number of tokens of a batch chooses."""
    model = vllm_config.model_config
    topk = spec.topk_buffer_width or model.hf_text_config.index_topk
    heads = dcp_size * model.get_num_attention_heads(vllm_config.parallel_config)
    cache_dtype = spec.cache_dtype_str or "auto"
    capability = current_platform.get_device_capability()
    assert capability is not None and isinstance(model.dtype, torch.dtype)
    num_sms = current_platform.num_compute_units()
    configs = {
        choose_config(
            capability,
            heads,
            tokens,
            topk,
            _cache_format(cache_dtype),
            num_sms,
        ): None
        for tokens in _token_counts(vllm_config.scheduler_config.max_num_batched_tokens)
    }
    return tuple(
        WarmupKey(
            heads=heads,
            topk=topk,
            rope=spec.head_size - LATENT_DIM,
            dtype=model.dtype,
            cache_dtype=cache_dtype,
            device=device,
            packed_query=dcp_size > 1,
            config=config,
        )
        for config in configs
    )


def _token_counts(largest: int) -> list[int]:
    """All small counts, then ever larger steps: every class of tokens is met."""
    counts = list(range(1, min(largest, 256) + 1))
    counts += [2**n for n in range(9, largest.bit_length())]
    return [*counts, largest]


def _is_fp8(cache_dtype: str) -> bool:
    return cache_dtype in ("fp8", "fp8_e4m3")


def _cache_format(cache_dtype: str) -> CacheFormat:
    if cache_dtype == "fp8_ds_mla":
        return CacheFormat.FP8_DS_MLA
    return CacheFormat.FP8 if _is_fp8(cache_dtype) else CacheFormat.MODEL


def _row_format(key: WarmupKey) -> tuple[int, torch.dtype]:
    if key.cache_dtype == "fp8_ds_mla":
        return DS_MLA_ROW_BYTES, torch.uint8
    dtype = torch.float8_e4m3fn if _is_fp8(key.cache_dtype) else key.dtype
    return LATENT_DIM + key.rope, dtype
