# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Metadata of TRITON_MLA_SPARSE, and what it compiles before requests come."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.helpers.cuda_tree import device, in_cuda_tree

BLOCK = 64


def builder(drafts=0, topk_width=None, dcp_size=1, warmup=False):
    """A metadata builder for a model with 8 heads, as the runner makes it."""
    from vllm.v1.attention.backends.mla.triton_mla_sparse import TritonMLASparseBackend
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.uint8,
        cache_dtype_str="fp8_ds_mla",
        state_content_bytes=656,
        topk_buffer_width=topk_width,
    )
    config = runner_config(drafts, dcp_size, warmup)
    builder_cls = TritonMLASparseBackend.get_builder_cls()
    return builder_cls(spec, ["layer"], config, torch.device("cpu"))


def runner_config(drafts, dcp_size, warmup):
    text = SimpleNamespace(
        index_topk=64,
        q_lora_rank=256,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
    )
    model = SimpleNamespace(
        hf_text_config=text,
        max_model_len=512,
        dtype=torch.float16,
        model_arch_config=SimpleNamespace(total_num_attention_heads=8),
        get_num_attention_heads=lambda parallel: 8,
    )
    speculative = SimpleNamespace(
        num_speculative_tokens=drafts, parallel_drafting=False
    )
    return SimpleNamespace(
        model_config=model,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512, max_num_seqs=8),
        cache_config=SimpleNamespace(block_size=BLOCK, cache_dtype="fp8_ds_mla"),
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=1,
            decode_context_parallel_size=dcp_size,
            cp_kv_cache_interleave_size=1,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=speculative if drafts else None,
        kernel_config=SimpleNamespace(enable_jit_warmup=warmup),
        compilation_config=SimpleNamespace(
            static_forward_context={"layer": SimpleNamespace(prefill_backend=None)}
        ),
    )


def common_metadata(lengths):
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
    count, tokens = len(lengths), int(starts[-1])
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=torch.full((count,), 300, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.full((count,), 300, dtype=torch.int32),
        num_reqs=count,
        num_actual_tokens=tokens,
        max_query_len=max(lengths),
        max_seq_len=300,
        block_table_tensor=torch.zeros(count, 5, dtype=torch.int32),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
    )


@pytest.mark.parametrize("drafts", [0, 1, 3, 5, 200])
@in_cuda_tree
def test_verified_drafts_are_decoded_in_graphs(drafts):
    from vllm.v1.attention.backend import AttentionCGSupport

    made = builder(drafts)
    support = made.get_cudagraph_support(made.vllm_config, made.kv_cache_spec)
    assert support == AttentionCGSupport.UNIFORM_BATCH
    assert made.reorder_batch_threshold == max(128, 1 + drafts)
    limit = made.get_varlen_cudagraph_max_query_len(
        made.vllm_config, made.kv_cache_spec
    )
    assert limit == 1 + drafts
    metadata = made.build(0, common_metadata([1 + drafts] * 2))
    assert metadata.num_decodes == 2
    assert metadata.num_decode_tokens == metadata.num_actual_tokens == 2 + 2 * drafts


@in_cuda_tree
def test_threshold_of_decodes_holds_under_context_parallelism():
    assert builder(3, dcp_size=2).reorder_batch_threshold == 128


@in_cuda_tree
def test_draft_metadata_is_refreshed_in_place():
    made = builder(3)
    assert made.supports_draft_decode_metadata_update
    metadata = made.build(0, common_metadata([4, 4]))
    assert metadata.req_id_per_token.tolist() == [0] * 4 + [1] * 4
    place = metadata.req_id_per_token.data_ptr()
    metadata.query_start_loc.copy_(torch.tensor([0, 1, 8]))
    made.update_draft_decode_metadata(metadata)
    assert metadata.req_id_per_token.tolist() == [0] + [1] * 7
    assert metadata.req_id_per_token.data_ptr() == place


@in_cuda_tree
def test_every_configuration_of_the_table_is_compiled_at_startup():
    from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
    from vllm.v1.attention.backends.mla import triton_mla_sparse_warmup as warmup
    from vllm.v1.attention.ops.sparse_mla.tuning import CacheFormat, choose_config

    with device((12, 0)), mock.patch("tqdm.tqdm"):
        chosen = {
            choose_config((12, 0), 8, tokens, 128, CacheFormat.FP8_DS_MLA, 100)
            for tokens in range(1, 513)
        }
        registry = JitWarmupRegistry(None)
        with registry.activate():
            builder(topk_width=128, warmup=True)
            builder(topk_width=128, warmup=True)
        with (
            mock.patch.object(warmup, "triton_sparse_mla") as kernel,
            mock.patch("vllm.distributed.is_global_first_rank", lambda: False),
        ):
            registry.warmup()
    calls = [call.kwargs["config"] for call in kernel.call_args_list]
    assert len(calls) == len(chosen) and set(calls) == chosen
    (latent, rope), rows, indices, counts = kernel.call_args.args
    assert latent.shape == (16, 8, 512) and rope.shape == (16, 8, 64)
    assert rows.shape[1] == 656 and indices.shape == (16, 128)
    assert int(indices.max()) < len(rows) and counts.tolist() == [128] * 16


@in_cuda_tree
def test_nothing_is_compiled_at_startup_if_not_wanted():
    from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry

    registry = JitWarmupRegistry(None)
    with registry.activate():
        builder()
    assert len(registry) == 0


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("dcp_size", [1, 2])
@in_cuda_tree
def test_what_is_compiled_at_startup_runs(cache_dtype, dcp_size):
    from vllm.v1.attention.backends.mla import triton_mla_sparse_warmup as warmup
    from vllm.v1.attention.ops.sparse_mla.tuning import KernelConfig

    warmup.KERNEL.compile(
        warmup.WarmupKey(
            heads=2,
            topk=64,
            rope=64,
            dtype=torch.float16,
            cache_dtype=cache_dtype,
            device=torch.device("cpu"),
            packed_query=dcp_size > 1,
            config=KernelConfig(16, 64, 4, 1),
        )
    )
