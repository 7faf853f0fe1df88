# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""`fused_norm_rope` in Triton's interpreter, against definitions in PyTorch."""

from typing import Any

import pytest
import torch

from tests.helpers.real_triton import exact_conversions, in_interpreter
from tests.overlay.dsa_fused.cases import (
    DS_MLA_BYTES,
    INDEX_DIM,
    KV_DIM,
    PAGE,
    POISON,
    ROPE,
    NormRope,
    norm_rope_inputs,
)

FLOATS = (torch.float32, torch.float16)
# Largest relative error of a value, of which a half is the rounding to the dtype.
BOUND = {torch.float32: 1e-5, torch.float16: 1e-3}
CACHES = [("auto", 0.0), ("fp8", 0.0), ("fp8_e4m3", 0.031), ("fp8_ds_mla", 0.0)]


def small(**changes: Any) -> NormRope:
    return NormRope(**{"dtype": torch.float32, "q_dim": 192, "topk": 70} | changes)


def run(case: NormRope, **changes: Any) -> dict[str, Any]:
    """The inputs after the call, `q_c_out` being what it returned."""
    from vllm.v1.attention.ops.dsa_fused.norm_rope import fused_norm_rope

    inputs = norm_rope_inputs(case) | changes
    with exact_conversions():
        inputs["q_c_out"] = fused_norm_rope(**inputs)
    return inputs


def poisoned(tensor: torch.Tensor) -> bool:
    return bool((tensor.contiguous().view(torch.uint8) == POISON).all())


def check_close(got: torch.Tensor, want: torch.Tensor) -> None:
    error = (got.double() - want).abs() / want.abs().amax(-1, keepdim=True)
    assert error.max() < BOUND[got.dtype], (error.max(), error.argmax())


def check_rows(run: dict[str, Any], latent: torch.Tensor, rope: torch.Tensor) -> None:
    """The MLA cache has the rows of these values in the slots, and nothing else."""
    from vllm.v1.attention.ops.dsa_fused.reference import (
        e4m3_reference,
        quantize_reference,
    )

    cache, slots = run["mla_kv_cache"], run["slot_mapping"]
    owned = slots >= 0
    whole = cache._base
    row = slots[owned] // PAGE * whole.stride(0) + slots[owned] % PAGE * cache.stride(1)
    at = row[:, None] + torch.arange(cache.shape[-1])
    rows = whole.view(-1)[at]
    latent, rope = latent[owned], rope[owned]
    if run["mla_kv_cache_dtype"] == "fp8_ds_mla":
        codes, scales = quantize_reference(latent.unflatten(1, (4, 128)), 1e-4)
        assert torch.equal(rows[:, :KV_DIM], codes.flatten(1))
        assert torch.equal(rows[:, KV_DIM : KV_DIM + 16].view(torch.float32), scales)
        values = rows[:, KV_DIM + 16 : DS_MLA_BYTES].view(torch.bfloat16)
        assert torch.equal(values, rope.bfloat16())
    else:
        values = torch.cat([latent, rope], 1)
        if cache.dtype == torch.uint8:
            scale = 1.0 if run["skip_scale"] else run["mla_k_scale"]
            values = e4m3_reference(values / scale)
        assert torch.equal(rows, values.to(cache.dtype))
    untouched = torch.ones(whole.numel(), dtype=torch.bool)
    untouched[at] = False
    assert poisoned(whole.view(-1)[untouched])


def check_pages(run: dict[str, Any], keys: torch.Tensor, slots: torch.Tensor) -> None:
    """The index key cache has these keys in the slots, and nothing else."""
    from vllm.v1.attention.ops.dsa_fused.reference import quantize_reference

    codes, scales = quantize_reference(keys, 1e-4 / 448)
    want = torch.full_like(run["indexer_k_cache"]._base, POISON)
    for slot, code, scale in zip(slots.tolist(), codes, scales, strict=True):
        if slot >= 0:
            page, place = want[slot // PAGE], slot % PAGE
            page[place * INDEX_DIM :][:INDEX_DIM] = code
            scale_at = PAGE * INDEX_DIM + place * 4
            page[scale_at : scale_at + 4] = scale[None].view(torch.uint8)
    assert torch.equal(run["indexer_k_cache"]._base, want)


@in_interpreter
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("indexer", ["neox", "interleaved"])
def test_values_are_normed_and_rotated(indexer, dtype):
    from vllm.v1.attention.ops.dsa_fused import reference

    out = run(small(indexer=indexer, dtype=dtype, pages=False))
    position = out["positions"]
    q_c = reference.rms_norm_reference(out["q_c"], out["q_rms_norm_w"], 1e-5)
    kv_c = reference.rms_norm_reference(out["kv_c"], out["kv_rms_norm_w"], 1e-5)
    table = out["k_rope_cos_sin_cache"]
    k_pe = reference.rotate_reference(out["k_pe"], position, table, True)
    weight, bias = out["index_k_layer_norm_w"], out["index_k_layer_norm_bias"]
    index_k = reference.layer_norm_reference(out["index_k"], weight, bias, 1e-6)
    table = out["index_k_rope_cos_sin_cache"]
    pairs = indexer == "interleaved"
    index_k = reference.rotate_reference(index_k, position, table, pairs)

    check_close(out["q_c_out"], q_c)
    check_close(out["kv_c_out"], kv_c)
    check_close(out["k_pe_out"], k_pe)
    check_close(out["index_k_out"], index_k)


@in_interpreter
@pytest.mark.parametrize("cache, scale", CACHES)
def test_cache_rows_hold_the_values_exactly(cache, scale):
    out = run(small(cache=cache, scale=scale))
    check_rows(out, out["kv_c_out"], out["k_pe_out"])
    assert not poisoned(out["kv_c_out"][0]), "tokens of other ranks are wanted, too"


@in_interpreter
@pytest.mark.parametrize("indexer", ["neox", "interleaved"])
def test_index_pages_hold_the_keys_exactly(indexer):
    out = run(small(indexer=indexer))
    check_pages(out, out["index_k_out"], out["slot_mapping"])
    assert poisoned(out["index_k_out"][out["slot_mapping"] < 0])


@in_interpreter
def test_index_keys_can_have_slots_of_their_own():
    case = small(own_index_slots=True)
    slots = norm_rope_inputs(case)["indexer_slot_mapping"]
    slots[1] = -1
    out = run(case, indexer_slot_mapping=slots)
    assert not torch.equal(slots, out["slot_mapping"])
    check_pages(out, out["index_k_out"], slots)


@in_interpreter
@pytest.mark.parametrize("cache, scale", CACHES)
def test_caches_do_not_depend_on_outputs(cache, scale):
    case = small(cache=cache, scale=scale)
    names = ("kv_c_out", "k_pe_out", "index_k_out")
    full, bare = run(case), run(case, **dict.fromkeys(names))
    for name in ("mla_kv_cache", "indexer_k_cache", "q_c_out", "topk_indices_buffer"):
        assert torch.equal(full[name], bare[name]), name


@in_interpreter
@pytest.mark.parametrize("size", [0.0, 1e-6])
def test_scales_of_tiny_rows_have_a_lower_limit(size):
    case = small(cache="fp8_ds_mla")
    inputs = norm_rope_inputs(case)
    names = ("kv_rms_norm_w", "index_k_layer_norm_w", "index_k_layer_norm_bias")
    out = run(case, **{name: inputs[name] * size for name in names})
    assert out["kv_c_out"].abs().max() < 448 * 2.0**-14
    check_rows(out, out["kv_c_out"], out["k_pe_out"])
    check_pages(out, out["index_k_out"], out["slot_mapping"])


@in_interpreter
def test_float16_rows_in_a_float16_cache():
    out = run(small(cache="float16", dtype=torch.float16))
    check_rows(out, out["kv_c_out"], out["k_pe_out"])


@in_interpreter
def test_every_query_is_normed_and_every_topk_row_cleared():
    case = small(cache="fp8_ds_mla", outputs=False)
    every = torch.full((case.tokens,), -1)
    out = run(case, slot_mapping=every)
    assert torch.equal(out["q_c_out"], run(case)["q_c_out"])
    assert (out["topk_indices_buffer"][: case.tokens] == -1).all()
    assert (out["topk_indices_buffer"][case.tokens :] == 7).all()
    assert poisoned(out["mla_kv_cache"])
    assert poisoned(out["indexer_k_cache"])


@in_interpreter
@pytest.mark.parametrize("topk", [64, 1024, 2176])
def test_topk_rows_of_any_width_are_cleared(topk):
    out = run(small(topk=topk, tokens=1, outputs=False))
    assert (out["topk_indices_buffer"][0] == -1).all()
    assert (out["topk_indices_buffer"][1:] == 7).all()


@in_interpreter
def test_layers_without_an_indexer_keep_the_topk_rows():
    out = run(small(cache="fp8", indexer=""))
    assert (out["topk_indices_buffer"] == 7).all()
    check_rows(out, out["kv_c_out"], out["k_pe_out"])


@in_interpreter
def test_without_caches_all_tokens_are_computed():
    """As in a profile run, and where keys are gathered from other ranks first."""
    out = run(small(pages=False), slot_mapping=None)
    for name in ("q_c_out", "kv_c_out", "k_pe_out", "index_k_out"):
        assert not any(poisoned(row) for row in out[name]), name


@in_interpreter
def test_a_new_tensor_is_returned_if_none_is_given():
    case = small()
    out = run(case, q_c_out=None)
    assert torch.equal(out["q_c_out"], run(case)["q_c_out"])
    assert out["q_c_out"].is_contiguous()


@in_interpreter
def test_no_token():
    from vllm.v1.attention.ops.dsa_fused.norm_rope import fused_norm_rope

    inputs = norm_rope_inputs(small(cache="fp8", tokens=1))
    for name, value in inputs.items():
        per_token = isinstance(value, torch.Tensor) and value.shape[:1] == (1,)
        if per_token and name != "mla_k_scale":
            inputs[name] = value[:0]
    assert fused_norm_rope(**inputs).shape == (0, 192)
    assert poisoned(inputs["mla_kv_cache"])


@in_interpreter
@pytest.mark.parametrize("cache", ["auto", "fp8", "fp8_ds_mla"])
def test_caches_of_more_than_two_to_the_31_elements(cache):
    """The memory of these caches is reserved, and a few pages of it used."""
    case = small(cache=cache, tokens=2, dtype=torch.float16)
    near = run(case)
    slot = near["slot_mapping"][1]
    far_slots = torch.tensor([-1, slot % PAGE])
    far: dict[str, Any] = {}
    for name in ("mla_kv_cache", "indexer_k_cache"):
        small_cache = near[name]
        stride = small_cache.stride(0)
        blocks = 2**31 // stride + 2
        storage = torch.empty(blocks * stride, dtype=small_cache.dtype)
        shape = (blocks, *small_cache.shape[1:])
        far[name] = storage.as_strided(shape, small_cache.stride())
    last = {name: len(cache) - 1 for name, cache in far.items()}
    index_slots = far_slots.clone()
    far_slots[1] += last["mla_kv_cache"] * PAGE
    index_slots[1] += last["indexer_k_cache"] * PAGE
    run(case, slot_mapping=far_slots, indexer_slot_mapping=index_slots, **far)
    row = far["mla_kv_cache"][-1, slot % PAGE]
    assert torch.equal(row, near["mla_kv_cache"][slot // PAGE, slot % PAGE])
    at = slot % PAGE * INDEX_DIM
    page, want = (
        block.flatten()[at : at + INDEX_DIM]
        for block in (far["indexer_k_cache"][-1], near["indexer_k_cache"][slot // PAGE])
    )
    assert torch.equal(page, want)


REFUSED = {
    "nvfp4": ({"mla_kv_cache_dtype": "nvfp4_ds_mla"}, "nvfp4_ds_mla is not supported"),
    "e5m2": ({"mla_kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2 is not supported"),
    "bytes": ({"mla_kv_cache_dtype": "auto"}, "which auto does not mean"),
    "width": ({"mla_kv_cache_dtype": "fp8_ds_mla"}, r"expected \[any, any, 656\]"),
    "shuffled": ({"indexer_cache_shuffled": True}, "ROCm"),
    "slots": ({"slot_mapping": None}, "slot_mapping is missing"),
    "index keys": ({"index_k": None}, "index_k is missing"),
    "index norm": ({"index_k_layer_norm_bias": None}, "norm or the table"),
    "positions": ({"positions": torch.zeros(4).long()}, r"positions has shape \[4\]"),
    "table": ({"k_rope_cos_sin_cache": torch.zeros(9, 32)}, r"k_table has shape"),
    "latent": ({"kv_c": torch.zeros(5, 96)}, "is 96, expected a power of two"),
    "columns": ({"k_pe": torch.zeros(ROPE, 5).T}, "k_pe has strides"),
    "pages": ({"indexer_k_cache": torch.zeros(2, PAGE, 128).byte()}, "indexer_k_cache"),
}


@in_interpreter
@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_what_is_not_supported_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        run(small(cache="fp8"), **changes)
