# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The Triton kernels of sparse MLA in Triton's interpreter, at small sizes.

In float32 and float16, since the interpreter gets bfloat16 wrong; the same cases in
bfloat16 and at real sizes are in tests/gpu. The case of every test leaves NaN in all
rows that nobody selects.
"""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch

from tests.helpers.real_triton import in_interpreter
from tests.overlay.sparse_mla.cases import (
    LATENT,
    PATTERNS,
    Case,
    Errors,
    Inputs,
    attention,
    make,
    poison_unselected,
)

CACHES = ("model", "fp8", "fp8_ds_mla")
DTYPES = (torch.float32, torch.float16)
ROWS = 400


def attend(
    inputs: Inputs, block_heads: int = 16, block_rows: int = 64, splits: int = 1
):
    from vllm.v1.attention.ops.sparse_mla.triton_sparse_mla import triton_sparse_mla
    from vllm.v1.attention.ops.sparse_mla.tuning import KernelConfig

    config = KernelConfig(block_heads, block_rows, 4, 2, splits)
    return triton_sparse_mla(**inputs.call(), config=config)


def check(case: Case, **config: Any) -> None:
    inputs, _ = make(case)
    errors = Errors()
    errors.compare(str(case), attend(inputs, **config), inputs)
    assert not errors.problems, errors.problems


def shapes() -> list[Case]:
    """Every pair of heads, tokens and top-k, with caches and dtypes taking turns."""
    cases = []
    all_shapes = itertools.product((1, 4, 8, 11, 16, 64), (1, 2, 7), (1, 17, 64, 200))
    for number, (heads, tokens, topk) in enumerate(all_shapes):
        # 12 shapes for each number of heads; the turn changes from one to the next.
        turn = number + number // 12
        cache, dtype = CACHES[turn % 3], DTYPES[turn // 3 % 2]
        case = Case(heads, tokens, topk, cache, dtype, rows=ROWS, seed=number)
        cases.append(dataclasses.replace(case, counts=number % 4 == 1))
    return cases


@in_interpreter
@pytest.mark.parametrize("case", shapes(), ids=str)
def test_equals_float64(case):
    check(case, block_heads=64 if case.heads > 16 else 16)


@in_interpreter
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("cache", CACHES)
def test_entries_may_select_nothing_anywhere(cache, pattern):
    check(Case(5, 2, 70, cache, torch.float16, rows=ROWS, pattern=pattern))


@in_interpreter
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("cache", CACHES)
def test_rows_without_rotated_part(cache, counts):
    check(Case(8, 5, 70, cache, torch.float16, rope=0, rows=ROWS, counts=counts))


@in_interpreter
@pytest.mark.parametrize("block_rows", [16, 32, 128])
@pytest.mark.parametrize("block_heads", [16, 32])
def test_every_tile_gives_the_result(block_heads, block_rows):
    case = Case(35, 2, 75, "fp8_ds_mla", torch.float16, rows=ROWS, counts=True)
    check(case, block_heads=block_heads, block_rows=block_rows)


@in_interpreter
@pytest.mark.parametrize("splits", [2, 3, 5, 16])
@pytest.mark.parametrize("cache", CACHES)
def test_any_number_of_splits_gives_the_single_pass(cache, splits):
    case = Case(3, 5, 70, cache, torch.float32, rows=ROWS, counts=splits == 3)
    check(case, block_rows=16, splits=splits)


@in_interpreter
@pytest.mark.parametrize("layout", ["tuple", "views", "strided", "heads-first"])
@pytest.mark.parametrize("rope", [64, 0])
def test_the_layout_of_the_query_changes_no_bit(layout, rope):
    case = Case(5, 3, 40, dtype=torch.float16, rope=rope, rows=ROWS)
    want = attend(make(case)[0])
    other, _ = make(dataclasses.replace(case, layout=layout))
    for a, b in zip(attend(other), want, strict=True):
        assert torch.equal(a, b)


@in_interpreter
def test_index_rows_may_lie_apart():
    inputs, _ = make(Case(5, 3, 40, dtype=torch.float16, rows=ROWS))
    wide = torch.full((3, 90), ROWS + 5, dtype=torch.int32)
    wide[:, 30:70] = inputs.indices
    want = attend(inputs)
    got = attend(dataclasses.replace(inputs, indices=wide[:, 30:70]))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@in_interpreter
def test_the_order_of_rows_does_not_matter():
    inputs, _ = make(Case(5, 1, 60, dtype=torch.float32, rows=ROWS, pattern="gaps"))
    mixed = dataclasses.replace(inputs, indices=inputs.indices[:, torch.randperm(60)])
    errors = Errors()
    errors.compare("mixed", attend(mixed), inputs)
    assert not errors.problems, errors.problems


@in_interpreter
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("cache", CACHES)
def test_infinities_in_other_rows_do_not_leak(cache, pattern):
    case = Case(3, 2, 40, cache, torch.float16, rows=ROWS, pattern=pattern)
    inputs, _ = make(case)
    unused = ~torch.isin(torch.arange(ROWS), inputs.indices[inputs.chosen])
    if cache == "model":
        inputs.rows[unused] = math.inf
    elif cache == "fp8_ds_mla":
        # Infinite scales and rotated parts of values that are numbers.
        poison_unselected(inputs, 0x11)
        words = inputs.rows.view(torch.int32)
        words[unused, 128:132] = 0x7F800000
        words[unused, 132:] = 0x7F807F80
        inputs.rows.copy_(words.view(torch.uint8))
    else:
        poison_unselected(inputs, 0x7E)
    errors = Errors()
    errors.compare(str(case), attend(inputs), inputs)
    assert not errors.problems, errors.problems


@in_interpreter
@pytest.mark.parametrize("cache", ["fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("exact", [True, False], ids=["scale-1", "any-scale"])
def test_a_row_alone_comes_out_as_its_values(cache, exact):
    finite = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F])
    # Half of the codes in each group of 128, all of them in each row.
    case = Case(2, 3, 5, cache, torch.float16, rows=8, pattern="one")
    inputs, _ = make(case)
    place = torch.arange(case.rows).unsqueeze(1) + torch.arange(LATENT)
    inputs.rows[:, :LATENT] = finite[place % len(finite)].to(torch.uint8)
    inputs.rows[:, LATENT:] = 0
    scales = torch.full((8, 4), 1.0) if exact else torch.rand(8, 4) + 0.01
    if cache == "fp8_ds_mla":
        inputs.rows[:, LATENT : LATENT + 16] = scales.view(torch.uint8)
    else:
        inputs.kv_scale.copy_(scales[0, 0])
    out, _ = attend(inputs)
    want, _ = attention(inputs)
    # A code times its scale is rounded once or twice; times one, never.
    bound = 0.0 if exact else want.abs() * 2.0**-10 + 2.0**-24
    assert bool(((out.double() - want).abs() <= bound).all())
    assert len(want.unique()) > 250


@in_interpreter
def test_fp8_rows_may_have_their_type_or_be_bytes():
    inputs, _ = make(Case(2, 2, 20, "fp8", torch.float16, rows=ROWS))
    typed = dataclasses.replace(inputs, rows=inputs.rows.view(torch.float8_e4m3fn))
    for a, b in zip(attend(typed), attend(inputs), strict=True):
        assert torch.equal(a, b)


@in_interpreter
def test_large_scores_neither_overflow_nor_vanish():
    inputs, _ = make(Case(3, 2, 70, dtype=torch.float32, rows=ROWS, pattern="full"))
    inputs = dataclasses.replace(inputs, scale=inputs.scale * 3000)
    want = attention(inputs)
    assert float(want[1].abs().max()) > 3000
    errors = Errors()
    errors.add("large", attend(inputs), want, 2e-2, 2e-2)
    assert not errors.problems, errors.problems


@in_interpreter
def test_inputs_are_left_as_they_are():
    case = Case(3, 2, 70, "fp8", torch.float16, rows=ROWS, counts=True)
    inputs, _ = make(case)
    tensors = (inputs.q, inputs.rows, inputs.indices, inputs.counts, inputs.kv_scale)
    before = [tensor.clone() for tensor in tensors]
    attend(inputs, splits=2)
    for old, new in zip(before, tensors, strict=True):
        assert torch.equal(old, new)


@in_interpreter
def test_no_query_at_all():
    inputs, _ = make(Case(3, 1, 9, dtype=torch.float16, rows=ROWS))
    none = dataclasses.replace(inputs, q=inputs.q[:0], indices=inputs.indices[:0])
    out, lse = attend(none)
    assert (out.shape, lse.shape) == ((0, 3, LATENT), (0, 3))


# Argument, what is done to it, and what the error says.
WRONG: dict[str, tuple[str, Any, str]] = {
    "narrow-q": ("q", lambda q: q[..., :500], "500"),
    "q-dtype": ("q", lambda q: q.double(), "float64"),
    "many-heads": ("q", lambda q: q.repeat(1, 65, 1), "130 heads"),
    "q-stride": ("q", lambda q: q.mT.contiguous().mT, "contiguous"),
    "row-stride": ("rows", lambda rows: rows[:, :575], "contiguous"),
    "narrow-rows": ("rows", lambda rows: rows[:, :575].contiguous(), "575"),
    "rows-dtype": ("rows", lambda rows: rows.float(), "float32"),
    "indices-dtype": ("indices", lambda indices: indices.long(), "int64"),
    "few-indices": ("indices", lambda indices: indices[:1], r"\(1, 9\)"),
    "no-indices": ("indices", lambda indices: indices[:, :0], r"\(2, 0\)"),
    "indices-stride": ("indices", lambda indices: indices[:, ::2], r"\(2, 5\)"),
    "counts-dtype": ("counts", lambda _: torch.ones(2), "counts are torch.float32"),
    "many-counts": ("counts", lambda _: torch.ones(3, dtype=torch.int32), r"\(3,\)"),
}


@in_interpreter
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_inputs_are_named(wrong):
    name, change, message = WRONG[wrong]
    inputs, _ = make(Case(2, 2, 9, dtype=torch.float16, rows=20))
    inputs = dataclasses.replace(inputs, **{name: change(getattr(inputs, name))})
    with pytest.raises(ValueError, match=message):
        attend(inputs)


@in_interpreter
def test_an_fp8_cache_needs_its_scale():
    inputs, _ = make(Case(2, 2, 9, "fp8", dtype=torch.float16, rows=20))
    with pytest.raises(ValueError, match="kv_scale"):
        attend(dataclasses.replace(inputs, kv_scale=None))
