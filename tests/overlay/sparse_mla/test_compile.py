# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Every kernel that the table may pick fits its device and spills no registers.

docs/sparse_mla_resources.md has the figures of all of them. To compile all takes some
minutes, so here the document is checked as such, and a part of it is compiled again:
of the shape with the most shared memory, all variants on three devices of different
code generators and one variant on the others.
"""

import itertools
import re
from pathlib import Path

import pytest
import torch

from tests.helpers.real_triton import with_compiler

DOCUMENT = Path(__file__).parents[3] / "docs" / "sparse_mla_resources.md"
ALL_VARIANTS = (86, 90, 120)
ONE_VARIANT = (80, 89, 100, 121)
AGAIN = "run python benchmarks/sparse_mla_resources.py > docs/sparse_mla_resources.md"


def documented() -> dict[str, str]:
    """Lines of the table by what they begin with: device, cache and shape."""
    lines = [
        line for line in DOCUMENT.read_text().split("\n") if re.match(r"\| \d", line)
    ]
    return {"|".join(line.split("|")[1:7]).strip(): line for line in lines}


def largest(sm: int):
    """The table's entry with the most shared memory, and its line."""
    from benchmarks.sparse_mla_resources import entries

    lines = documented()
    shared = {entry: int(lines[entry.label].split("|")[8]) for entry in entries(sm)}
    entry = max(shared, key=lambda entry: shared[entry])
    return entry, lines[entry.label]


def usage_in(line: str):
    from benchmarks.sparse_mla_resources import Usage

    variants, shared, _, registers, stack = map(int, line.split("|")[7:12])
    return Usage(shared, registers, stack, variants)


@with_compiler
def test_the_document_is_of_these_kernels():
    import triton

    from benchmarks.sparse_mla_resources import kernel_digest

    said = f"Triton {triton.__version__}, kernels {kernel_digest()}"
    with_pinned = f"{AGAIN}, with the Triton of requirements/test.txt"
    assert said in DOCUMENT.read_text(), f"it is not of {said}: {with_pinned}"


@with_compiler
def test_the_document_has_all_that_the_table_may_pick():
    from benchmarks.sparse_mla_resources import LIMITS, entries

    expected = {
        entry.label: (1 + entry.split) * (2 if entry.cache == "fp8_ds_mla" else 4)
        for sm in LIMITS
        for entry in entries(sm)
    }
    found = {label: usage_in(line).variants for label, line in documented().items()}
    assert found == expected, AGAIN


@with_compiler
def test_everything_fits_and_nothing_spills():
    from benchmarks.sparse_mla_resources import LIMITS, entries, fits

    lines = documented()
    bad = [
        lines[entry.label]
        for sm in LIMITS
        for entry in entries(sm)
        if not fits(sm, usage_in(lines[entry.label]))
    ]
    assert not bad, "\n".join(bad)


@with_compiler
@pytest.mark.parametrize("sm", ALL_VARIANTS)
def test_compiling_gives_the_figures_of_the_document(sm):
    from benchmarks.sparse_mla_resources import line, worst

    entry, said = largest(sm)
    assert line(sm, entry.label, worst(entry)) == said, AGAIN


@with_compiler
@pytest.mark.parametrize("sm", ONE_VARIANT)
def test_one_variant_takes_no_more_than_the_document_says(sm):
    from benchmarks.sparse_mla_resources import compiled, usage

    entry, said = largest(sm)
    kernel = compiled(entry, entry.config(), torch.bfloat16, 64)[0]
    assert kernel.metadata.target.arch == sm
    found, limit = usage(kernel), usage_in(said)
    assert found.shared <= limit.shared
    assert found.registers <= limit.registers
    assert found.stack <= limit.stack


@with_compiler
@pytest.mark.parametrize("sm", [80, 120])
def test_combining_the_most_splits_spills_nothing(sm):
    from benchmarks.sparse_mla_resources import compiled, entries, fits, usage

    entry = entries(sm)[0]
    _, combine = compiled(entry, entry.config(splits=128), torch.bfloat16, 64)
    assert combine.metadata.name == "_combine_kernel"
    assert fits(sm, usage(combine))


@with_compiler
def test_what_does_not_fit_is_found():
    from benchmarks.sparse_mla_resources import (
        CacheFormat,
        Entry,
        Kernel,
        compiled,
        fits,
        usage,
    )

    entry = Entry(120, CacheFormat.MODEL, (64, 64, 4, 2), Kernel.TRITON, False)
    found = usage(compiled(entry, entry.config(), torch.bfloat16, 64)[0])
    assert found.shared > 101_376
    assert found.stack > 0
    assert not fits(120, found)


@with_compiler
@pytest.mark.parametrize("sm", [80, 86])
def test_devices_without_fp8_need_no_instruction_of_it(sm):
    from benchmarks.sparse_mla_resources import (
        CacheFormat,
        Entry,
        Kernel,
        compiled,
    )

    shapes = ((16, 32, 4, 2), Kernel.TRITON), ((16, 32, 8, 2), Kernel.GLUON)
    caches = CacheFormat.FP8, CacheFormat.FP8_DS_MLA
    for cache, shape in itertools.product(caches, shapes):
        entry = Entry(sm, cache, *shape, False)
        kernel = compiled(entry, entry.config(), torch.bfloat16, 64)[0]
        assert f".target sm_{sm}" in kernel.asm["ptx"]
        assert "e4m3" not in kernel.asm["ptx"]
