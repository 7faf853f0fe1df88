#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Check GGUF blocks decoded on this GPU, bit for bit; exit status 1 on failure.

    python tests/gpu/check_gguf.py [--only NAME ...] \\
        [--types TYPE ...] [--time]

Needs torch, Triton and gguf-py, with whose values it compares; vLLM is used only if it
is installed. One line per group. `--time` prints how fast a matrix is dequantized to
bfloat16 as well: weights, and bytes of blocks and of results, per second.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import _standalone

    _standalone.use(packages=_standalone.GGUF)

from tests.helpers.gguf_random import expected_weights, random_bytes
from tests.overlay.quantization import transposed_kernel as part
from vllm.model_executor.layers.quantization.gguf.triton_decode import (
    SUPPORTED,
    tables,
)
from vllm.model_executor.layers.quantization.gguf.triton_dequantize import (
    triton_dequantize,
)
from vllm.transformers_utils.gguf.ggml_types import (
    GGML_TYPES,
    GGML_TYPES_BY_NAME,
    GGMLType,
)

DEVICE = "cuda"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 256), (37, 6144), (515, 2048), (3, 16384))
GATHERED = 333
# Of blocks, when offsets shall need more than 32 bits.
FAR_BYTES = 9 << 29
FAR_GIB = 22
TIMED = (16384, 6144)
Problems = list[str]
# Those asked for.
kinds = [kind for kind in GGML_TYPES.values() if kind.name in SUPPORTED]


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    integer = torch.int32 if got.dtype == torch.float32 else torch.int16
    return torch.equal(got.view(integer), want.to(got.device).view(integer))


def poisoned(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((rows, columns), float("nan"), dtype=dtype, device=DEVICE)


def random_kind(kind: GGMLType, rows: int, columns: int) -> torch.Tensor:
    return random_bytes(kind, rows, columns, seed=rows, device=DEVICE)


def types() -> Problems:
    """Every type in every dtype, at small and large shapes."""
    problems: Problems = []
    for kind in kinds:
        for rows, columns in SHAPES:
            blocks = random_kind(kind, rows, columns)
            want = expected_weights(kind, blocks)
            for dtype in DTYPES:
                out = poisoned(rows, columns, dtype)
                triton_dequantize(blocks, kind, columns, dtype, out=out)
                if not same_bits(out, want.to(dtype)):
                    problems.append(f"{kind.name} {rows} x {columns} {dtype}")
    return problems


def gathered() -> Problems:
    """Rows by number; zeros for numbers that are none."""
    problems: Problems = []
    for kind in kinds:
        blocks = random_kind(kind, 100, 2048)
        values = expected_weights(kind, blocks)
        for dtype in (torch.int32, torch.int64):
            ids = torch.randint(-20, 120, (GATHERED,)).to(dtype)
            known = (ids >= 0) & (ids < 100)
            want = torch.zeros(GATHERED, 2048)
            want[known] = values[ids[known].long()]
            out = poisoned(GATHERED, 2048, torch.float32)
            ids = ids.to(DEVICE)
            triton_dequantize(blocks, kind, 2048, out.dtype, out=out, row_ids=ids)
            if not same_bits(out, want):
                problems.append(f"{kind.name} {dtype}")
    return problems


def views() -> Problems:
    """Some columns of some rows of a larger matrix, into part of a larger result."""
    problems: Problems = []
    for kind in kinds:
        wide = random_kind(kind, 40, 3072)
        start, length = kind.row_bytes(256), kind.row_bytes(2048)
        blocks = wide[3:36, start : start + length]
        out = poisoned(40, 2100, torch.float32)
        inside = out[5:38, 30 : 30 + 2048]
        triton_dequantize(blocks, kind, 2048, out.dtype, out=inside)
        want = expected_weights(kind, wide)[3:36, 256 : 256 + 2048].contiguous()
        if not same_bits(inside.contiguous(), want):
            problems.append(kind.name)
        inside.fill_(float("nan"))
        if not out.isnan().all():
            problems.append(f"{kind.name}: wrote beside the result")
    return problems


def unaligned() -> Problems:
    """Rows that start at any byte."""
    problems: Problems = []
    for kind in kinds:
        blocks = random_kind(kind, 9, 512)
        want = expected_weights(kind, blocks)
        for start in (1, 2, 3, 4, 8):
            room = torch.zeros(blocks.numel() + start, dtype=torch.uint8, device=DEVICE)
            moved = room[start:].view(blocks.shape)
            moved.copy_(blocks)
            out = triton_dequantize(moved, kind, 512, torch.float32)
            if not same_bits(out, want):
                problems.append(f"{kind.name} at byte {start}")
    return problems


def parts() -> Problems:
    """Weights loaded by a kernel as for a product, transposed, from inside a block."""
    problems: Problems = []
    for kind in kinds:
        blocks = random_kind(kind, part.ROWS, 512)
        values = expected_weights(kind, blocks)
        for start, end, rows in ((0, 512, 4), (213, 301, 3), (256, 384, 1)):
            out = poisoned(part.COLUMNS, part.ROWS, torch.float32)
            part.transposed_kernel[(1,)](
                blocks,
                out,
                tables(kind, blocks.device),
                blocks.stride(0),
                start,
                end,
                rows,
                TYPE=kind.id,
                COLUMNS=part.COLUMNS,
                ROWS=part.ROWS,
            )
            end = min(end, start + part.COLUMNS)
            want = torch.zeros(part.COLUMNS, part.ROWS)
            want[: end - start, :rows] = values[:rows, start:end].t()
            if not torch.equal(out.cpu(), want):
                problems.append(f"{kind.name}, columns {start} to {end}")
    return problems


def far() -> Problems:
    """Blocks and results beyond 2**32 bytes."""
    problems: Problems = []
    if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < FAR_GIB << 30:
        print(f"  far: skipped, needs {FAR_GIB} GiB of device memory")
        return problems
    for name in ("Q4_K", "IQ2_XS"):
        kind = GGML_TYPES_BY_NAME[name]
        columns = 4096 if name == "Q4_K" else 2048
        rows = FAR_BYTES // 2 // columns
        # Fewer bytes of blocks than of results; rows lie apart to go as far.
        stride = FAR_BYTES // rows
        room = torch.zeros(rows, stride, dtype=torch.uint8, device=DEVICE)
        blocks = room[:, : kind.row_bytes(columns)]
        blocks[-8:] = random_kind(kind, 8, columns)
        want = expected_weights(kind, blocks[-8:]).bfloat16()
        out = triton_dequantize(blocks, kind, columns, torch.bfloat16)
        if not same_bits(out[-8:], want):
            problems.append(f"{name}: last of {rows} rows")
        if out[:-8].count_nonzero():
            problems.append(f"{name}: rows of zero bytes are not zero")
        ids = torch.arange(rows - 8, rows, device=DEVICE)
        out = triton_dequantize(blocks, kind, columns, torch.bfloat16, row_ids=ids)
        if not same_bits(out, want):
            problems.append(f"{name}: last rows, gathered")
    return problems


def graphs() -> Problems:
    """A captured call decodes what the blocks and the ids are when it is replayed."""
    problems: Problems = []
    for kind in kinds:
        blocks = random_kind(kind, 64, 2048)
        ids = torch.zeros(16, dtype=torch.int64, device=DEVICE)
        out = poisoned(16, 2048, torch.float32)

        def call(kind=kind, blocks=blocks, ids=ids, out=out) -> None:
            triton_dequantize(blocks, kind, 2048, out.dtype, out=out, row_ids=ids)

        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        for seed in (1, 2):
            blocks.copy_(random_bytes(kind, 64, 2048, seed=seed))
            ids.copy_(torch.randint(64, (16,)))
            out.fill_(float("nan"))
            graph.replay()
            want = expected_weights(kind, blocks)[ids.cpu()]
            if not same_bits(out, want):
                problems.append(f"{kind.name}, replay {seed}")
    return problems


GROUPS: dict[str, Callable[[], Problems]] = {
    function.__name__: function
    for function in (types, gathered, views, unaligned, parts, far, graphs)
}


def run(names: list[str]) -> bool:
    """Run groups by name and print a line for each; whether all of them passed."""
    passed = True
    for name in names:
        begin = time.monotonic()
        try:
            problems = GROUPS[name]()
        except Exception as error:  # the other groups shall still run
            problems = [f"{type(error).__name__}: {error}"[:500]]
        took = time.monotonic() - begin
        result = "FAILED" if problems else "ok"
        print(f"{name}: {result} ({took:.1f} s)", flush=True)
        for problem in problems[:30]:
            print(f"  {problem}", flush=True)
        passed &= not problems
    return passed


def print_times() -> None:
    """A line for each type: the best of 20 calls, each after a flush of the L2."""
    rows, columns = TIMED
    flush = torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE)
    for kind in kinds:
        blocks = random_kind(kind, rows, columns)
        out = poisoned(rows, columns, torch.bfloat16)
        best = float("inf")
        for _ in range(20):
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            triton_dequantize(blocks, kind, columns, out.dtype, out=out)
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) * 1e-3)
        moved = blocks.numel() + out.numel() * out.itemsize
        print(
            f"{kind.name:8s} {best * 1e6:7.1f} us, {out.numel() / best * 1e-9:6.0f} G "
            f"weights/s, {moved / best * 1e-12:5.2f} TB/s",
            flush=True,
        )


def main() -> int:
    global kinds
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--types", nargs="+", choices=sorted(SUPPORTED))
    parser.add_argument("--time", action="store_true")
    options = parser.parse_args()
    if options.types:
        kinds = [GGML_TYPES_BY_NAME[name] for name in options.types]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    passed = run(options.only)
    if options.time:
        print_times()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
