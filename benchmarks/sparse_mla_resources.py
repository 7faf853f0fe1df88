#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Compile every sparse MLA kernel that a device may pick; print what it takes.

    python benchmarks/sparse_mla_resources.py > docs/sparse_mla_resources.md

Needs torch and Triton, and no GPU: ptxas assembles for each device. About seven minutes
of one core when nothing is in Triton's cache. Exit status 1 if a kernel does not fit.
"""

import argparse
import ast
import functools
import hashlib
import itertools
import multiprocessing
import operator
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any

import torch

if __name__ in ("__main__", "__mp_main__"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))
    import _standalone

    _standalone.use(alone=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks.sparse_mla_timing import compile_only
from vllm.v1.attention.ops import fp8_bytes
from vllm.v1.attention.ops.sparse_mla import gluon_sparse_mla
from vllm.v1.attention.ops.sparse_mla import triton_sparse_mla as kernels
from vllm.v1.attention.ops.sparse_mla.tuning import (
    CacheFormat,
    Kernel,
    KernelConfig,
    device_class,
    table,
)

# Shared memory of one thread block, in bytes, by compute capability.
LIMITS = {
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    120: 101_376,
    121: 101_376,
}
# Bytes a thread that may be spilled: a few numbers, most of them read after the loop.
# What spills nothing instead was slower: docs/design/sparse_mla.md.
STACK = 80
DTYPES = (torch.bfloat16, torch.float16)
ROPE = (64, 0)
TOPK = 2048


@dataclass(frozen=True, order=True)
class Entry:
    """A kernel shape that a device may run; `split`: also with its rows split."""

    sm: int
    cache: CacheFormat
    shape: tuple[int, int, int, int]
    kernel: Kernel
    split: bool

    def config(self, splits: int = 1) -> KernelConfig:
        """The configuration, its rows cut into `splits` parts."""
        return KernelConfig(*self.shape, splits, kernel=self.kernel)

    @property
    def label(self) -> str:
        """How the table of results names it."""
        blocks = " x ".join(map(str, self.shape[:2]))
        warps, stages = self.shape[2:]
        kernel = f"{self.cache} | {self.kernel}"
        return f"{self.sm} | {kernel} | {blocks} | {warps} | {stages}"


@dataclass(frozen=True)
class Usage:
    """What a kernel takes: bytes of shared memory, registers, bytes of stack.

    Registers that do not suffice are spilled to the stack, and nothing else is there.
    """

    shared: int
    registers: int
    stack: int
    variants: int = 1

    def __or__(self, other: "Usage") -> "Usage":
        """The worst of both."""
        return Usage(
            max(self.shared, other.shared),
            max(self.registers, other.registers),
            max(self.stack, other.stack),
            self.variants + other.variants,
        )


def entries(sm: int) -> list[Entry]:
    """What the table has for compute capability `sm`."""
    device = device_class((sm // 10, sm % 10))
    few_tokens: dict[tuple[CacheFormat, tuple[int, int, int, int], Kernel], bool] = {}
    for row in table():
        if row.device is device:
            key = row.cache, astuple(row.config)[:4], row.config.kernel
            few_tokens[key] = few_tokens.get(key, False) or row.few_tokens
    return sorted(Entry(sm, *key, split) for key, split in few_tokens.items())


def usages(entry: Entry) -> Iterator[Usage]:
    """Each variant of the entry: dtypes, head sizes, split or not."""
    dtypes = DTYPES[:1] if entry.cache is CacheFormat.FP8_DS_MLA else DTYPES
    for dtype, rope in itertools.product(dtypes, ROPE):
        for splits in (1, 4) if entry.split else (1,):
            yield usage(compiled(entry, entry.config(splits), dtype, rope)[0])


def compiled(
    entry: Entry, config: KernelConfig, dtype: torch.dtype, rope: int
) -> list[Any]:
    """The kernels that a call launches on this device; with counts, as in serving.

    Any number of tokens and rows compiles the same code, and so does any number of
    heads and of entries that 16 divides.
    """
    width = kernels.LATENT_DIM + rope
    rows = {
        CacheFormat.MODEL: torch.zeros(8, width, dtype=dtype),
        CacheFormat.FP8: torch.zeros(8, width, dtype=torch.uint8),
        CacheFormat.FP8_DS_MLA: torch.zeros(8, 656, dtype=torch.uint8),
    }
    kernels._device = lambda device: ((entry.sm // 10, entry.sm % 10), 132)
    target = GPUTarget("cuda", entry.sm, 32)
    # Triton keeps what it compiled by the number of the device.
    device = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: entry.sm,
        get_current_stream=lambda device: 0,
    )
    driver.set_active(device)
    with compile_only() as found:
        kernels.triton_sparse_mla(
            torch.zeros(2, 16, width, dtype=dtype),
            rows[entry.cache],
            torch.zeros(2, TOPK, dtype=torch.int32),
            torch.zeros(2, dtype=torch.int32),
            scale=1.0,
            kv_scale=torch.ones(()),
            config=config,
        )
    return found


def usage(kernel: Any) -> Usage:
    """Read from the kernel's machine code."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.check_output(command, text=True)
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return Usage(
        shared=kernel.metadata.shared,
        registers=int(found["REG"]),
        stack=int(found["STACK"]) + int(found["LOCAL"]),
    )


def survey(sm: int) -> dict[str, Usage]:
    """The worst of all variants, by label, of everything that `sm` may pick."""
    return {entry.label: worst(entry) for entry in entries(sm)}


def worst(entry: Entry) -> Usage:
    """The largest of each figure over all variants of an entry."""
    return functools.reduce(operator.or_, usages(entry))


def kernel_digest() -> str:
    """Changes with the kernels' code and with Triton, not with comments."""
    parts = [triton.__version__]
    for module in (kernels, gluon_sparse_mla, fp8_bytes):
        tree = ast.parse(Path(module.__file__).read_text())
        for node in tree.body:
            jitted = isinstance(node, ast.FunctionDef) and node.decorator_list
            if jitted and ast.get_docstring(node) is not None:
                del node.body[0]
            if jitted or isinstance(node, ast.Assign):
                parts.append(ast.unparse(node))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def fits(sm: int, found: Usage) -> bool:
    return found.shared <= LIMITS[sm] and found.stack <= STACK


HEAD = """\
# What the sparse MLA kernels take

Printed by `python benchmarks/sparse_mla_resources.py`; do not edit. Every shape of the
kernel that `tuning.py` may pick on a device, compiled ahead of time: no GPU took part.
Each line is the worst of its variants: bfloat16 and float16, head size 576 and 512, and
for few tokens also the one whose rows are split. Stack is where spilled registers go.
Of fp8_ds_mla bfloat16 alone is listed: float16 takes the Triton kernel of the same
shape there, which fits as well, and spills more.

Triton {triton}, kernels {digest}
"""
COLUMNS = ("SM", "cache", "kernel", "heads x rows", "warps", "stages", "variants")
COLUMNS += ("shared bytes", "of", "registers", "stack bytes")


def render(found: dict[int, dict[str, Usage]]) -> str:
    """The document."""
    lines = [HEAD.format(triton=triton.__version__, digest=kernel_digest())]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for sm, by_label in sorted(found.items()):
        lines += [line(sm, label, one) for label, one in by_label.items()]
    return "\n".join(lines)


def line(sm: int, label: str, found: Usage) -> str:
    return (
        f"| {label} | {found.variants} | {found.shared} | {LIMITS[sm]} |"
        f" {found.registers} | {found.stack} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=1, help="processes")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, spawn) as pool:
        found = dict(zip(LIMITS, pool.map(survey, LIMITS), strict=True))
    print(render(found))
    bad = [
        f"sm_{label}: {one}"
        for sm, by_label in found.items()
        for label, one in by_label.items()
        if not fits(sm, one)
    ]
    for text in bad:
        print(f"does not fit or spills: {text}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
