# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What the CUDA platform decides for models with sparse MLA (DSA)."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.v1.attention.backends.registry import AttentionBackendEnum

if TYPE_CHECKING:
    import torch

    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig

T = TypeVar("T")

# Columns that the release's index conversion gives to one program.
_TILE_COLUMNS = 128


def rank_triton_mla_sparse(
    backends: Sequence[AttentionBackendEnum],
    capability: "DeviceCapability",
    selector_config: "AttentionSelectorConfig",
) -> list[AttentionBackendEnum]:
    """The release's backends for a layer, best first, with TRITON_MLA_SPARSE added.

    It comes last, as the one that runs everywhere. On SM120 and SM121 it precedes the
    release's only sparse backend unless a quantized cache was asked for: that backend
    would quantize the cache of `auto` as well. Layers without sparse MLA get `backends`
    unchanged. The argument is shared between calls and never modified.
    """
    from vllm.v1.kv_cache_interface import is_quantized_kv_cache

    ranked = list(backends)
    if not (selector_config.use_mla and selector_config.use_sparse):
        return ranked
    place = len(ranked)
    rival = AttentionBackendEnum.FLASHINFER_MLA_SPARSE_SM120
    quantized = is_quantized_kv_cache(selector_config.kv_cache_dtype or "auto")
    if capability.major == 12 and not quantized and rival in ranked:
        place = ranked.index(rival)
    ranked.insert(place, AttentionBackendEnum["TRITON_MLA_SPARSE"])
    return ranked


def for_any_topk(convert: Callable[..., T]) -> Callable[..., T]:
    """Let an index conversion of the release take any number of indices per query.

    It works in tiles of 128 columns and refuses a remainder. Where 128 does not divide
    the number, the tile becomes the largest power of two that does.
    """

    @functools.wraps(convert)
    def call(
        req_id: "torch.Tensor",
        block_table: "torch.Tensor",
        token_indices: "torch.Tensor",
        *args: Any,
        **kwargs: Any,
    ) -> T:
        kwargs.setdefault("BLOCK_N", math.gcd(_TILE_COLUMNS, token_indices.shape[1]))
        return convert(req_id, block_table, token_indices, *args, **kwargs)

    return call
