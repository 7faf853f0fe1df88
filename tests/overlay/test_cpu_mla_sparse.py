# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The CPU sparse MLA operations against their references, and what selects them."""

from types import SimpleNamespace

import pytest
import torch

from vllm.v1.attention.ops.dsa_indexer import (
    index_logits_reference,
    select_positions,
    select_positions_reference,
    torch_indexer,
)
from vllm.v1.attention.ops.sparse_mla import (
    gather_rows,
    locate_rows,
    sparse_mla,
    sparse_mla_reference,
    torch_sparse_mla,
    write_rows,
)

NAN = float("nan")
# Sums of up to 600 products in float32; inputs of 16 bits are the same on both sides.
OUT_BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, bound: float):
    assert got.shape == want.shape, name
    assert not got.isnan().any(), f"{name}: NaN"
    got, want = got.double(), want.double()
    same_infinity = (got == want) & got.isinf()
    error = (got - want).abs().masked_fill(same_infinity, 0.0)
    worst = int(error.argmax())
    assert error.max() <= bound, (
        f"{name}: {error.max():.3g} > {bound:.3g} at flat index {worst}"
    )


def paged(
    lengths: list[int],
    block_size: int,
    width: int,
    dtype: torch.dtype,
    *,
    shared_blocks: int = 0,
    strided: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache with shuffled pages and NaN in every unused row, and its block table.

    The first `shared_blocks` pages of all requests are the same ones.
    """
    per_request = [-(-length // block_size) for length in lengths]
    total = sum(per_request) + 3
    order = torch.randperm(total).tolist()
    shape = (total, 2 if strided else 1, block_size, width)
    cache = torch.full(shape, NAN, dtype=dtype)[:, 0]
    table = torch.zeros(len(lengths), max(per_request) + 2, dtype=torch.int32)
    common = [order.pop() for _ in range(shared_blocks)]
    for request, (length, blocks) in enumerate(zip(lengths, per_request, strict=True)):
        pages = common + [order.pop() for _ in range(blocks - shared_blocks)]
        table[request, :blocks] = torch.tensor(pages, dtype=torch.int32)
        positions = torch.arange(length)
        slots = table[request].long()[positions // block_size] * block_size
        write_rows(cache, slots + positions % block_size, torch.randn(length, width))
    return cache, table


@pytest.mark.parametrize("dtype", OUT_BOUND, ids=str)
@pytest.mark.parametrize(
    ("block_size", "rope", "tile_bytes"),
    [
        pytest.param(1, 64, 1 << 26, id="block-1"),
        pytest.param(7, 64, 1 << 26, id="block-7"),
        pytest.param(128, 64, 1 << 26, id="block-128"),
        pytest.param(16, 0, 1 << 26, id="no-rope"),
        pytest.param(16, 64, 40_000, id="split-queries-and-rows"),
        pytest.param(16, 64, 1, id="one-row-at-a-time"),
    ],
)
def test_sparse_mla_equals_reference(dtype, block_size, rope, tile_bytes):
    torch.manual_seed(0)
    heads, latent, topk = 3, 32, 24
    lengths = [40, 3, 131]
    shared = 2 if block_size == 1 else 0
    cache, table = paged(
        lengths, block_size, latent + rope, dtype, shared_blocks=shared, strided=True
    )
    request_ids = torch.tensor([0, 0, 1, 2, 2, 2, 2])
    positions = torch.full((len(request_ids), topk), -1, dtype=torch.int32)
    for t, request in enumerate(request_ids.tolist()):
        count = min(lengths[request], topk)
        where = torch.randperm(topk)[:count]
        positions[t, where] = torch.randperm(lengths[request])[:count].int()
    positions[4] = -1
    positions[5, 1:] = -1
    q = torch.randn(len(request_ids), heads, latent + rope).to(dtype)

    out, lse = sparse_mla(
        q,
        cache,
        positions,
        request_ids,
        table,
        scale=0.3,
        kv_lora_rank=latent,
        tile_bytes=tile_bytes,
    )

    slots = locate_rows(positions, request_ids, table, block_size)
    want_out, want_lse = sparse_mla_reference(
        q, cache.flatten(0, 1), slots, scale=0.3, kv_lora_rank=latent
    )
    assert out.dtype == dtype
    assert_close("out", out, want_out, OUT_BOUND[dtype] * float(want_out.abs().max()))
    assert_close("lse", lse, want_lse, 1e-5 * float(want_lse[want_lse > -9e9].max()))
    assert (out[4] == 0).all()
    assert (lse[4] == float("-inf")).all()


def test_sparse_mla_survives_large_scores():
    cache = torch.full((1, 4, 8), 100.0)
    q = torch.full((1, 2, 8), 100.0)
    out, lse = sparse_mla(
        q,
        cache,
        torch.arange(4).view(1, 4),
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(1, 1, dtype=torch.int32),
        scale=1.0,
        kv_lora_rank=8,
        tile_bytes=1,
    )
    assert_close("out", out, torch.full_like(out, 100.0), 1e-4)
    assert_close("lse", lse, torch.full_like(lse, 80001.3863), 0.1)


def test_writing_skips_padding_slots_and_leaves_other_rows_alone():
    cache = torch.full((3, 4, 2), NAN)
    rows = torch.arange(8.0).view(4, 2)
    write_rows(cache, torch.tensor([9, -1, 0, 7]), rows)
    flat = cache.flatten(0, 1)
    assert torch.equal(flat[[9, 0, 7]], rows[[0, 2, 3]])
    assert int(flat.isnan().all(-1).sum()) == 9


def test_locating_uses_64_bit_offsets():
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    slots = locate_rows(
        torch.tensor([[5, -1]], dtype=torch.int32), torch.zeros(1).long(), table, 16
    )
    assert slots.tolist() == [[(2**31 - 1) * 16 + 5, -1]]


def index_case(
    length: int, tokens: int, dtype: torch.dtype = torch.float32, heads: int = 5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(length)
    cache, table = paged([9, length], 7, 16, dtype, shared_blocks=1, strided=True)
    q = torch.randn(tokens, heads, 16).to(dtype)
    return q, torch.randn(tokens, heads), cache, table[1]


def selected_by_reference(q, weights, cache, table, first_position, topk):
    length = first_position + len(q)
    slots = locate_rows(
        torch.arange(length).view(1, -1),
        torch.zeros(1, dtype=torch.int64),
        table.view(1, -1),
        cache.shape[1],
    )
    keys = gather_rows(cache, slots[0])
    logits = index_logits_reference(q, weights, keys)
    positions = torch.arange(first_position, length)
    return select_positions_reference(logits, positions, topk)


@pytest.mark.parametrize("tile_bytes", [1 << 26, 20_000, 1], ids=["one", "some", "min"])
@pytest.mark.parametrize("dtype", OUT_BOUND, ids=str)
@pytest.mark.parametrize(
    ("length", "tokens", "topk"),
    [(1, 1, 8), (8, 8, 8), (9, 1, 8), (9, 9, 8), (200, 150, 8), (200, 3, 190)],
)
def test_selection_equals_reference(length, tokens, topk, dtype, tile_bytes):
    q, weights, cache, table = index_case(length, tokens, dtype)
    first = length - tokens
    got = select_positions(
        q,
        weights,
        cache,
        table,
        first_position=first,
        topk=topk,
        tile_bytes=tile_bytes,
    )
    want = selected_by_reference(q, weights, cache, table, first, topk)
    assert torch.equal(got, want)


def test_selection_of_equal_logits_takes_the_lower_positions():
    cache, table = paged([50], 7, 16, torch.float32)
    # Every head of every query clips to zero: all logits are equal.
    cache[:] = -1.0
    got = select_positions(
        torch.ones(2, 3, 16),
        torch.ones(2, 3),
        cache,
        table[0],
        first_position=48,
        topk=5,
    )
    assert got.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_selection_takes_what_is_above_a_tie_and_fills_up_from_the_left():
    logits = torch.tensor([[2.0, 1.0, 2.0, 3.0, 2.0, 2.0, 9.0]])
    position = torch.tensor([5])
    want = [[0, 2, 3]]
    assert select_positions_reference(logits, position, 3).tolist() == want
    got = torch_indexer._topk_lowest_first(logits, position, 3)
    assert got.tolist() == want


def test_selection_never_takes_nan():
    logits = torch.tensor([[NAN, 1.0, NAN, 2.0, NAN]])
    position = torch.tensor([4])
    want = select_positions_reference(logits, position, 3)
    assert want.tolist() == [[1, 3, -1]]
    got = torch_indexer._topk_lowest_first(logits, position, 3)
    assert sorted(got[0].tolist()) == [-1, 1, 3]


def largest_allocation(function) -> int:
    """Bytes of the largest tensor that any operation inside `function` makes."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    size = leaf.untyped_storage().nbytes()
                    inputs = {
                        t.untyped_storage().data_ptr()
                        for t in tree_leaves((args, kwargs))
                        if isinstance(t, torch.Tensor)
                    }
                    if leaf.untyped_storage().data_ptr() not in inputs:
                        self.largest = max(self.largest, size)
            return result

    with Watch() as watch:
        function()
    return watch.largest


def test_selection_over_a_long_context_stays_within_its_memory_bound():
    length, heads, dim = 100_000, 32, 16
    cache = torch.randn(-(-length // 128), 128, dim)
    table = torch.randperm(len(cache), dtype=torch.int32)
    q, weights = torch.randn(40, heads, dim), torch.randn(40, heads)

    def run():
        select_positions(
            q, weights, cache, table, first_position=length - 40, topk=2048
        )

    largest = largest_allocation(run)
    assert largest <= torch_indexer.TILE_BYTES
    # All heads of all queries at once would be 512 MB.
    assert 40 * heads * length * 4 > 7 * torch_indexer.TILE_BYTES


def test_attention_over_many_rows_stays_within_its_memory_bound():
    topk, heads, width = 60_000, 4, 576
    cache = torch.zeros(topk // 16, 16, width)
    positions = torch.randperm(topk, dtype=torch.int32).view(1, -1).expand(2, -1)

    def run():
        sparse_mla(
            torch.randn(2, heads, width),
            cache,
            positions,
            torch.zeros(2, dtype=torch.int64),
            torch.arange(len(cache), dtype=torch.int32).view(1, -1),
            scale=1.0,
            kv_lora_rank=512,
        )

    assert largest_allocation(run) <= torch_sparse_mla.TILE_BYTES
    assert topk * width * 4 > 2 * torch_sparse_mla.TILE_BYTES


def test_backend_is_registered():
    from vllm.v1.attention.backends.mla.cpu_mla_sparse import CPUMLASparseBackend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert AttentionBackendEnum["CPU_MLA_SPARSE"].get_class() is CPUMLASparseBackend
    assert CPUMLASparseBackend.get_name() == "CPU_MLA_SPARSE"


def selector_config(**changes):
    from vllm.v1.attention.selector import AttentionSelectorConfig

    options = {
        "head_size": 576,
        "dtype": torch.float32,
        "kv_cache_dtype": "auto",
        "block_size": None,
        "use_mla": True,
        "use_sparse": True,
    }
    return AttentionSelectorConfig(**{**options, **changes})


def test_platform_selects_backend():
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum as Backends

    path = Backends["CPU_MLA_SPARSE"].get_path()
    for asked in (None, Backends["CPU_MLA_SPARSE"]):
        got = CpuPlatform.get_attn_backend_cls(asked, selector_config())
        assert got == path
    dense = CpuPlatform.get_attn_backend_cls(None, selector_config(use_sparse=False))
    assert dense != path


def test_platform_refuses_other_backends_and_cache_dtypes_by_name():
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum as Backends

    with pytest.raises(ValueError, match="CPU_MLA cannot.*CPU_MLA_SPARSE"):
        CpuPlatform.get_attn_backend_cls(Backends.CPU_MLA, selector_config())
    with pytest.raises(ValueError, match="fp8 .*auto, float16, bfloat16"):
        CpuPlatform.get_attn_backend_cls(None, selector_config(kv_cache_dtype="fp8"))


def test_refused_cache_dtypes_are_those_that_the_backend_lacks():
    from vllm.platforms.cpu_sparse_mla import CACHE_DTYPES
    from vllm.v1.attention.backends.mla.cpu_mla_sparse import CPUMLASparseBackend

    assert list(CACHE_DTYPES) == CPUMLASparseBackend.supported_kv_cache_dtypes


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
def test_options_without_support_are_refused_by_name(option):
    from vllm.v1.attention.backends.mla.cpu_mla_sparse import CPUMLASparseImpl

    options = {
        "alibi_slopes": None,
        "sliding_window": None,
        "logits_soft_cap": None,
        "kv_sharing_target_layer_name": None,
        "attn_type": "decoder",
        option: "encoder",
    }
    refusal = f"CPU_MLA_SPARSE does not support {option}='encoder'"
    with pytest.raises(NotImplementedError, match=refusal):
        CPUMLASparseImpl(
            4, 576, 0.1, 1, kv_cache_dtype="auto", kv_lora_rank=512, **options
        )


@pytest.mark.parametrize(
    ("attributes", "sparse"),
    [
        pytest.param({"index_topk": 64}, True, id="dsa"),
        pytest.param({}, False, id="dense-mla"),
        pytest.param({"index_topk": 64, "compress_ratios": [4]}, False, id="v4"),
    ],
)
def test_limits_are_lifted_for_sparse_mla_only(attributes, sparse):
    from vllm.platforms.cpu_sparse_mla import lift_mla_limits

    config = platform_config(attributes)
    assert lift_mla_limits(config, True, False) == (not sparse, sparse)


@pytest.mark.parametrize("kind", ["decode_context", "prefill_context", "pipeline"])
def test_parallelism_without_support_is_refused_by_name(kind):
    from vllm.platforms.cpu_sparse_mla import lift_mla_limits

    config = platform_config({"index_topk": 64}, **{f"{kind}_parallel_size": 2})
    option = f"--{kind.replace('_', '-')}-parallel-size 2"
    with pytest.raises(ValueError, match=option):
        lift_mla_limits(config, True, False)


def test_expert_parallelism_needs_blocks():
    from vllm.platforms.cpu_sparse_mla import lift_mla_limits

    parallel = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    config = platform_config({"index_topk": 64}, **parallel)
    with pytest.raises(ValueError, match="--quantization gguf_native"):
        lift_mla_limits(config, True, False)
    config.model_config.quantization = "gguf_native"
    assert lift_mla_limits(config, True, False) == (False, True)


def platform_config(attributes, **parallel):
    """What the platform reads of a VllmConfig; `attributes` are the model's."""
    from vllm.config import CompilationMode

    sizes = {
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "enable_expert_parallel": False,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(
            use_mla=True,
            quantization=None,
            hf_text_config=SimpleNamespace(**attributes),
        ),
        attention_config=SimpleNamespace(backend=None),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(mode=CompilationMode.NONE),
        parallel_config=SimpleNamespace(**{**sizes, **parallel}),
    )


def engine_config(folder, **options):
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(folder), skip_tokenizer_init=True, **options
    ).create_engine_config()


@pytest.fixture(scope="module")
def config_folder(tmp_path_factory):
    from tests.helpers.tiny_hf_model import write_tiny_config

    return write_tiny_config(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(("asked", "got"), [(None, 128), (48, 48)])
def test_platform_lifts_mla_limits(config_folder, asked, got):
    options = {} if asked is None else {"block_size": asked}
    config = engine_config(config_folder, max_num_batched_tokens=256, **options)
    assert config.cache_config.block_size == got
    assert config.cache_config.enable_prefix_caching
    assert config.scheduler_config.enable_chunked_prefill
    assert config.scheduler_config.max_num_batched_tokens == 256


def test_compilation_stays_off(config_folder, monkeypatch):
    from vllm.config import CompilationMode

    # Otherwise vLLM itself turns compilation off for GLM-5.
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")
    mode = engine_config(config_folder).compilation_config.mode
    assert mode == CompilationMode.NONE


def test_wrong_options_are_refused_before_the_engine_starts(config_folder):
    with pytest.raises(ValueError, match="CPU_MLA cannot.*CPU_MLA_SPARSE"):
        engine_config(config_folder, attention_backend="CPU_MLA")
    with pytest.raises(ValueError, match="--kv-cache-dtype fp8 "):
        engine_config(config_folder, kv_cache_dtype="fp8")


def test_model_uses_cpu_indexer():
    from vllm.model_executor.layers.cpu_sparse_attn_indexer import CPUIndexer
    from vllm.model_executor.models import deepseek_v2

    assert deepseek_v2.Indexer is CPUIndexer


def test_other_platforms_keep_the_release_indexer(monkeypatch):
    from vllm.model_executor.layers import cpu_sparse_attn_indexer

    class ReleaseIndexer(torch.nn.Module):
        pass

    monkeypatch.setattr(
        cpu_sparse_attn_indexer,
        "current_platform",
        SimpleNamespace(is_cpu=lambda: False),
    )
    factory = cpu_sparse_attn_indexer.indexer_for_platform
    assert factory(ReleaseIndexer) is ReleaseIndexer
