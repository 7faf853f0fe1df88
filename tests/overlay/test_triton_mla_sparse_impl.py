# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""TRITON_MLA_SPARSE from the release's index buffer and cache to its output.

The kernel and the release's Triton kernels are interpreted. Activations are float16:
the interpreter is wrong for bfloat16.
"""

import functools
import sys
import types
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.helpers.cuda_tree import device, in_cuda_tree
from tests.overlay.sparse_mla import cases

BLOCK, HEADS, SCALE = 64, 3, 0.05
# Rows between the starts of two blocks: other layers' rows lie between them.
STRIDE = 80
FORMATS = {"auto": "model", "fp8": "fp8", "fp8_ds_mla": "fp8_ds_mla"}


@functools.cache
def default_config():
    from vllm.config import VllmConfig

    return VllmConfig()


def make_impl(cache_dtype="auto", rope=64, *, config=None, **mla_args):
    """The implementation of one layer, as the model's attention layer makes it."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import sparse_mla_attention
    from vllm.v1.attention.backends.mla.triton_mla_sparse import TritonMLASparseImpl

    with (
        set_current_vllm_config(config or default_config()),
        mock.patch.object(
            sparse_mla_attention, "get_tensor_model_parallel_world_size", lambda: 1
        ),
    ):
        return TritonMLASparseImpl(
            num_heads=HEADS,
            head_size=512 + rope,
            scale=SCALE,
            num_kv_heads=1,
            alibi_slopes=None,
            sliding_window=None,
            kv_cache_dtype=cache_dtype,
            logits_soft_cap=None,
            attn_type="decoder",
            kv_sharing_target_layer_name=None,
            q_lora_rank=256,
            kv_lora_rank=512,
            qk_nope_head_dim=192,
            qk_rope_head_dim=rope,
            qk_head_dim=192 + rope,
            v_head_dim=256,
            kv_b_proj=torch.nn.Linear(1, 1),
            **mla_args,
        )


def pack(values, cache_format, scale):
    """Cache rows of `values`; plain ones in float16."""
    if cache_format == "model":
        return values.half()
    if cache_format == "fp8":
        return cases.pack_fp8(values, float(scale))
    amax = values[:, :512].unflatten(1, (4, -1)).abs().amax(-1)
    return cases.pack_fp8_ds_mla(values, amax / 300)


def paged(rows, cache_format):
    """What the layer hands over: a strided view of rows, float8 for plain fp8."""
    cache = rows.view(-1, STRIDE, rows.shape[1])[:, :BLOCK]
    return cache.view(torch.float8_e4m3fn) if cache_format == "fp8" else cache


class Batch:
    """Three requests in a paged cache; tokens, indices and what they select.

    Tokens 0 to 2 verify drafts of request 0; token 3 selects nothing.
    """

    def __init__(self, topk=64, rope=64, cache_format="model", length=300):
        generator = torch.Generator().manual_seed(topk)
        self.requests = torch.tensor([0, 0, 0, 1, 1, 2], dtype=torch.int32)
        blocks = -(-length // BLOCK)
        order = torch.randperm(3 * blocks + 2, generator=generator)
        self.table = order[: 3 * blocks].view(3, blocks).int()
        self.format, self.rope, self.length = cache_format, rope, length
        self.values = torch.randn(len(order) * STRIDE, 512 + rope, generator=generator)
        self.scale = torch.tensor(0.02)
        self.rows = pack(self.values, cache_format, self.scale)
        tokens = len(self.requests)
        shape = (tokens, topk)
        self.indices = torch.full((tokens + 2, topk), -1, dtype=torch.int32)
        chosen = torch.randint(-20, length, shape, generator=generator).clamp(min=-1)
        self.indices[:tokens] = chosen
        self.indices[3] = -1
        shape = (tokens, HEADS, 512 + rope)
        self.q = torch.randn(shape, generator=generator).half()
        self.layer = SimpleNamespace(_k_scale=self.scale)

    def split_query(self):
        """As the model makes it: latents head by head in memory, the rest apart."""
        latent = self.q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
        return latent, self.q[..., 512:].contiguous()

    def metadata(self, decode_tokens=0):
        return SimpleNamespace(
            num_decode_tokens=decode_tokens,
            block_size=BLOCK,
            req_id_per_token=self.requests,
            block_table=self.table,
            cp_kv_cache_interleave_size=1,
        )

    def chosen_rows(self):
        """Numbers of the rows that the indices mean, -1 where they mean none."""
        from vllm.v1.attention.ops.sparse_mla import locate_rows

        slots = locate_rows(
            self.indices[: len(self.q)], self.requests.long(), self.table, BLOCK
        )
        rows = torch.where(slots < 0, -1, slots // BLOCK * STRIDE + slots % BLOCK)
        return rows.int()

    def expected(self):
        """Output and lse in float64, of what the cache holds."""
        return cases.attention(
            cases.Inputs(
                q=self.q,
                rows=self.rows,
                indices=self.chosen_rows(),
                counts=None,
                scale=SCALE,
                kv_scale=self.scale,
                cache=self.format,
                rope=self.rope,
            )
        )


def check(got, want):
    (out, lse), (want_out, want_lse) = got, want
    assert out.dtype == torch.float16 and lse.dtype == torch.float32
    assert out.is_contiguous() and out.shape == want_out.shape
    error = (out - want_out).norm(dim=(1, 2)) / want_out.norm(dim=(1, 2)).clamp(min=1)
    assert float(error.max()) < cases.QUANTIZED_BOUND
    empty = want_lse.isinf()
    assert torch.equal(lse.isneginf(), empty) and not out[empty].any()
    assert float((lse - want_lse)[~empty].abs().max()) < cases.LSE_BOUND


@pytest.mark.parametrize("rope", [64, 0])
@pytest.mark.parametrize("cache_dtype", FORMATS)
@in_cuda_tree
def test_output_is_attention_over_the_chosen_rows(cache_dtype, rope):
    batch = Batch(rope=rope, cache_format=FORMATS[cache_dtype])
    impl = make_impl(cache_dtype, rope, topk_indices_buffer=batch.indices)
    cache = paged(batch.rows, batch.format)
    for q in (batch.q, batch.split_query()):
        got = impl.forward_mqa(q, cache, batch.metadata(), batch.layer)
        check(got, batch.expected())


@in_cuda_tree
def test_a_plain_cache_ignores_the_scale_of_fp8():
    batch = Batch()
    impl = make_impl("float16", topk_indices_buffer=batch.indices)
    batch.layer._k_scale = torch.tensor(float("nan"))
    cache = paged(batch.rows, "model")
    got = impl.forward_mqa(batch.q, cache, batch.metadata(), batch.layer)
    check(got, batch.expected())


@pytest.mark.parametrize("topk", [1, 7, 100, 2176])
@in_cuda_tree
def test_any_topk_runs(topk):
    batch = Batch(topk, length=2300 if topk > 300 else 300)
    impl = make_impl(topk_indices_buffer=batch.indices)
    cache = paged(batch.rows, "model")
    got = impl.forward_mqa(batch.split_query(), cache, batch.metadata(), batch.layer)
    check(got, batch.expected())


@pytest.mark.parametrize("topk", [1, 7, 64, 96, 2048, 2176, 4160])
@in_cuda_tree
def test_any_number_of_indices_is_converted(topk):
    from vllm.v1.attention.backends.mla import sparse_utils

    batch = Batch(topk, length=4200 if topk > 300 else 300)
    tokens = 2 if topk > 4096 else len(batch.q)
    want = batch.chosen_rows()[:tokens]
    options = {
        "BLOCK_SIZE": BLOCK,
        "BLOCK_STRIDE_ROWS": STRIDE,
        "NUM_TOPK_TOKENS": topk,
    }
    args = batch.requests[:tokens], batch.table, batch.indices[:tokens]
    convert = sparse_utils.triton_convert_req_index_to_global_index
    assert torch.equal(convert(*args, **options), want)
    buffers = {"out": torch.zeros_like(want), "valid_counts_out": want[:, 0].clone()}
    got, counts = convert(*args, **options, **buffers, return_valid_counts=True)
    assert got is buffers["out"] and counts is buffers["valid_counts_out"]
    check_compacted(got, counts, want)
    options |= {"dcp_size": 2, "dcp_rank": 1}
    convert = sparse_utils.triton_filter_and_convert_dcp_index
    got, counts = convert(*args, **options, return_valid_counts=True)
    batch.indices = torch.where(batch.indices % 2 == 1, batch.indices // 2, -1)
    check_compacted(got, counts, batch.chosen_rows()[:tokens])


def check_compacted(got, counts, want):
    """The same rows at the front, in any order, and -1 behind them."""
    assert torch.equal(counts, (want >= 0).sum(1).int())
    for indices, count, expected in zip(got, counts, want, strict=True):
        assert torch.equal(
            indices[:count].sort().values, expected[expected >= 0].sort().values
        )
        assert (indices[count:] == -1).all()


class Stream:
    """A stand-in for streams, which the CPU does not have."""

    def wait_stream(self, other):
        pass

    wait_event = record = wait_stream

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


@pytest.mark.parametrize("decode", [True, False])
@in_cuda_tree
def test_layers_that_share_an_indexer_convert_its_indices_once(decode):
    from vllm.model_executor.layers.attention import sparse_mla_attention
    from vllm.v1.attention.backends.mla import index_group

    batch = Batch()
    with mock.patch.multiple(
        index_group, _create_side_stream=lambda device: Stream(), _create_event=Stream
    ):
        group = index_group.SparseMLAIndexGroupBuilder(batch.indices)
        layers = [
            make_impl(
                topk_indices_buffer=batch.indices,
                index_group_builder=group,
                indexer=SimpleNamespace(topk_indices_buffer=batch.indices)
                if leads
                else None,
            )
            for leads in (True, False)
        ]
    convert = index_group.triton_convert_req_index_to_global_index
    metadata = batch.metadata(len(batch.q) if decode else 0)
    name = "triton_convert_req_index_to_global_index"
    with (
        mock.patch.object(index_group, "current_stream", Stream),
        mock.patch.object(index_group, name, side_effect=convert) as shared,
        mock.patch.object(sparse_mla_attention, name, side_effect=convert) as own,
    ):
        for impl in layers:
            cache = paged(batch.rows, "model")
            got = impl.forward_mqa(batch.q, cache, metadata, batch.layer)
            check(got, batch.expected())
    assert (shared.call_count, own.call_count) == ((1, 0) if decode else (0, 2))


@pytest.mark.parametrize("interleave", [1, 16])
@in_cuda_tree
def test_ranks_of_context_parallelism_combine_to_the_whole(interleave):
    batch = Batch()
    # Token 4 sees nothing of what the second rank holds.
    batch.indices[4] = torch.where(batch.indices[4] // interleave % 2 == 0, 4, -1)
    want_out, want_lse = batch.expected()
    outs, lses = [], []
    for rank in range(2):
        impl = make_impl(topk_indices_buffer=batch.indices)
        impl.dcp_world_size, impl.dcp_rank = 2, rank
        metadata = batch.metadata()
        metadata.cp_kv_cache_interleave_size = interleave
        cache = paged(own_rows(batch, rank, interleave), "model")
        out, lse = impl.forward_mqa(batch.q, cache, metadata, batch.layer)
        assert not out.isnan().any()
        outs.append(out.double())
        lses.append(lse.double())
    assert lses[1][3:5].isneginf().all() and not outs[1][3:5].any()
    lse = torch.stack(lses).logsumexp(0)
    weights = [(part - lse).exp().nan_to_num(0.0).unsqueeze(-1) for part in lses]
    out = sum(part * weight for part, weight in zip(outs, weights, strict=True))
    check((out.half(), lse.float()), (want_out, want_lse))


def own_rows(batch, rank, interleave):
    """The cache of one of two ranks; NaN where it holds no position."""
    rows = torch.full_like(batch.rows, float("nan"))
    positions = torch.arange(batch.length)
    positions = positions[positions // interleave % 2 == rank]
    local = positions // (2 * interleave) * interleave + positions % interleave
    for blocks in batch.table.long():
        source = blocks[positions // BLOCK] * STRIDE + positions % BLOCK
        target = blocks[local // BLOCK] * STRIDE + local % BLOCK
        rows[target] = batch.rows[source]
    return rows


@in_cuda_tree
def test_the_implementation_states_what_it_can():
    impl = make_impl(topk_indices_buffer=Batch().indices)
    assert impl.can_return_lse_for_decode and impl.lse_base_on_e
    assert impl.supports_dcp and impl.supports_pcp
    assert impl.supports_mtp_with_cp_non_trivial_interleave_size
    assert not impl.supports_quant_query_input
    assert not impl.supports_dense_mha_prefill


@in_cuda_tree
def test_hisparse_gets_the_metadata_that_stages_prompts():
    config = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=object()),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        compilation_config=default_config().compilation_config,
    )
    from vllm.v1.attention.backends.mla import triton_mla_sparse

    with mock.patch.object(
        triton_mla_sparse, "get_current_vllm_config_or_none", lambda: config
    ):
        assert make_impl().supports_dense_mha_prefill


@pytest.mark.parametrize(
    "option",
    [
        "alibi_slopes",
        "sliding_window",
        "logits_soft_cap",
        "kv_sharing_target_layer_name",
        "attn_type",
    ],
)
@in_cuda_tree
def test_options_without_support_are_refused_by_name(option):
    from vllm.v1.attention.backends.mla.triton_mla_sparse import TritonMLASparseImpl

    options = {
        "alibi_slopes": None,
        "sliding_window": None,
        "logits_soft_cap": None,
        "kv_sharing_target_layer_name": None,
        "attn_type": "decoder",
        option: "encoder",
    }
    refusal = f"TRITON_MLA_SPARSE does not support {option}='encoder'"
    with pytest.raises(NotImplementedError, match=refusal):
        TritonMLASparseImpl(HEADS, 576, SCALE, 1, kv_cache_dtype="auto", **options)


@pytest.mark.parametrize("cache_dtype", FORMATS)
@in_cuda_tree
def test_rotated_keys_of_fp8_ds_mla_are_written_as_bfloat16(cache_dtype):
    impl = make_impl(cache_dtype)
    latents, rotated = torch.ones(2, 512).half(), torch.ones(2, 1, 64).half()
    with mock.patch("vllm._custom_ops.concat_and_cache_mla") as write:
        impl.do_kv_cache_update(
            latents,
            rotated,
            torch.zeros(1, 64, 656),
            torch.zeros(2, dtype=torch.int64),
            cache_dtype,
            torch.tensor(1.0),
        )
    dtype = torch.bfloat16 if cache_dtype == "fp8_ds_mla" else torch.float16
    assert [part.dtype for part in write.call_args.args[:2]] == [dtype] * 2


def writer_kernels():
    """The release's cache writer. The model's package needs compiled operations."""
    import vllm
    from vllm.v1.attention.ops.dsa_fused import dispatch

    dispatch._triton_compiles_fp8.cache_clear()
    package = "vllm.models.deepseek_v32"
    if package not in sys.modules:
        module = types.ModuleType(package)
        module.__path__ = [f"{vllm.__path__[0]}/models/deepseek_v32"]
        sys.modules[package] = module
    from vllm.models.deepseek_v32.common import kernels

    return kernels


# For SM89 the release's kernel runs, whose fp8 numbers the interpreter does not round:
# an error of one step of e4m3. Below, the fork's own.
@pytest.mark.parametrize(("capability", "bound"), [((8, 0), 0.04), ((8, 9), 0.125)])
@pytest.mark.parametrize("cache_dtype", FORMATS)
@in_cuda_tree
def test_the_model_writes_the_rows_that_the_kernel_reads(
    cache_dtype, capability, bound
):
    generator = torch.Generator().manual_seed(0)
    latents, rotated, q = (
        torch.randn(4, width, generator=generator).half() for width in (512, 64, 128)
    )
    weight = (1 + torch.rand(512, generator=generator)).half()
    angles = torch.randn(300, 64, generator=generator)
    positions, slots = torch.tensor([0, 5, 17, 299]), torch.tensor([3, 71, -1, 191])
    scale = torch.tensor(0.03)
    rows = pack(torch.zeros(3 * STRIDE, 576), FORMATS[cache_dtype], scale).zero_()
    with device(capability):
        writer_kernels().fused_norm_rope(
            positions,
            q,
            torch.ones(128).half(),
            1e-6,
            latents,
            weight,
            1e-6,
            rotated,
            angles,
            *(None, None, None, 1e-6, None),
            torch.zeros(4, 64, dtype=torch.int32),
            slot_mapping=slots,
            mla_kv_cache=rows.view(3, STRIDE, -1)[:, :BLOCK],
            mla_kv_cache_dtype=cache_dtype,
            mla_k_scale=scale,
            has_indexer=False,
        )
    written = rows[[3, STRIDE + 7, 2 * STRIDE + 63]]
    got = cases.unpack(written, FORMATS[cache_dtype], scale, 64)
    wanted = torch.nn.functional.rms_norm(latents.double(), (512,), weight.double())
    cos, sin = angles[positions].double().chunk(2, -1)
    even, odd = rotated.double()[:, ::2], rotated.double()[:, 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
    for part, want in ((got[:, :512], wanted), (got[:, 512:], turned.flatten(1))):
        want = want[[0, 1, 3]]
        assert float((part - want).norm() / want.norm()) < bound
    # Nothing but those three rows was touched.
    assert int(rows.view(torch.uint8).any(-1).sum()) == 3
