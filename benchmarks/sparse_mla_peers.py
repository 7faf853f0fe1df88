# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Calls of the sparse MLA kernels that the release ships, for `sparse_mla.py`.

Each function gives a call that takes the number of an index set and returns the output
[T, heads, 512]. What the release prepares once for all layers of a step, and the
padding of heads that FlashMLA asks for, stay outside the call.
"""

from collections.abc import Callable

import torch

from benchmarks.sparse_mla_timing import Call, Workload
from tests.overlay.sparse_mla.cases import LATENT

FLASHMLA_HEADS = 64
PAGE = 64


def _padded_query(workload: Workload) -> torch.Tensor:
    q = workload.inputs.joined_q
    tokens, heads, width = q.shape
    if heads % FLASHMLA_HEADS == 0:
        return q
    padded = q.new_zeros(tokens, FLASHMLA_HEADS, width)
    padded[:, :heads] = q
    return padded


def flashmla_prefill(workload: Workload) -> Call:
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_sparse_fwd

    q, heads = _padded_query(workload), workload.case.heads
    rows = workload.inputs.rows.unsqueeze(1)
    sets = [indices.unsqueeze(1) for indices in workload.index_sets]
    scale = workload.inputs.scale
    return lambda i: flash_mla_sparse_fwd(q, rows, sets[i], scale)[0][:, :heads]


def flashmla_decode(workload: Workload) -> Call:
    import vllm.third_party.flashmla.flash_mla_interface as flashmla

    q = _padded_query(workload).unsqueeze(1)
    heads = workload.case.heads
    cache = workload.inputs.rows.view(-1, PAGE, 1, workload.inputs.rows.shape[1])
    cache = cache.view(torch.float8_e4m3fn)
    sets = [indices.unsqueeze(1) for indices in workload.index_sets]
    schedule, _ = flashmla.get_mla_metadata()

    def call(i: int) -> torch.Tensor:
        out, _ = flashmla.flash_mla_with_kvcache(
            q=q,
            k_cache=cache,
            block_table=None,
            cache_seqlens=None,
            head_dim_v=LATENT,
            tile_scheduler_metadata=schedule,
            softmax_scale=workload.inputs.scale,
            is_fp8_kvcache=True,
            indices=sets[i],
        )
        return out[:, 0, :heads]

    return call


def fa3_page_1(workload: Workload) -> Call:
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    q, tokens = workload.inputs.joined_q, workload.case.tokens
    rows = workload.inputs.rows.view(-1, 1, 1, workload.inputs.rows.shape[1])
    device, topk = q.device, workload.case.topk
    starts = torch.arange(tokens + 1, dtype=torch.int32, device=device)
    used = torch.full((tokens,), topk, dtype=torch.int32, device=device)
    return lambda i: flash_attn_varlen_func(
        q=q[..., LATENT:],
        k=rows[..., LATENT:],
        v=rows[..., :LATENT],
        q_v=q[..., :LATENT],
        max_seqlen_q=1,
        cu_seqlens_q=starts,
        max_seqlen_k=topk,
        seqused_k=used,
        block_table=workload.index_sets[i],
        softmax_scale=workload.inputs.scale,
        causal=True,
        fa_version=3,
    )


def release_triton(workload: Workload) -> Call:
    from vllm.v1.attention.ops.xpu_mla_sparse import triton_bf16_mla_sparse_interface

    q, scale = workload.inputs.joined_q, workload.inputs.scale
    rows = workload.inputs.rows.unsqueeze(1)
    sets = [indices.unsqueeze(1) for indices in workload.index_sets]
    return lambda i: triton_bf16_mla_sparse_interface(q, rows, sets[i], scale)[0]


PEERS: dict[str, dict[str, Callable[[Workload], Call]]] = {
    "model": {
        "flashmla": flashmla_prefill,
        "fa3": fa3_page_1,
        "release": release_triton,
    },
    "fp8": {},
    "fp8_ds_mla": {"flashmla": flashmla_decode},
}
