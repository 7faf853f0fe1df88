#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""How fast GGUF blocks go from a file to a device, beside plain reads of the file.

    python benchmarks/gguf_load.py --gb 12 --device cuda --parts 1,8 --json load.json
    python benchmarks/gguf_load.py --gb 1 --device cpu --threads 1,2

Writes a file of random blocks (experts and an attention projection in GLM-5's shapes)
and takes it away at the end. `--parts` are tensor-parallel sizes, of which rank 0 is
loaded. Rates are GB/s (10^9 bytes), medians of `--runs`:

    plain reads      readinto of 32 MiB, by one thread, or by as many as the loader has
    loaded           as the loader does it: rate of bytes needed, and of bytes read
    mapped           copies from the memory map, as parameters on the CPU are loaded
    device copies    from one pinned buffer: the bound of the bus

"cold" is after the file's pages were dropped from the page cache, which is checked; if
the system keeps them there are no such numbers. Host memory is the growth of the peak
resident set beyond the targets; pinned buffers may lie outside of it and are given
beside. Needs torch, gguf-py, and the vLLM release or the fork; an installed fork must
be of this checkout (`vfork sync`).
"""

import argparse
import json
import os
import platform
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))
    import _standalone

    _standalone.use(packages=(*_standalone.GGUF, "vllm.model_executor.model_loader"))

from tests.helpers.gguf_writer import Tensor, write_gguf
from vllm.model_executor.layers.quantization.gguf.layout import (
    BlockShard,
    lay_out,
    load_shard,
)
from vllm.model_executor.model_loader.gguf.file_blocks import (
    BlockReader,
    FileBlocks,
    lane_maker,
)
from vllm.model_executor.model_loader.gguf.transport import (
    BUFFER_BYTES,
    BUFFERS,
    THREADS,
    Transport,
)
from vllm.transformers_utils.gguf.reader import GGUFFile, TensorInfo, open_gguf

HIDDEN, INNER, HEADS = 6144, 2048, 16384
LAYERS = 4
# Name -> (input and output size, type, whether a rank's cut goes through rows).
MATRICES = {
    "ffn_gate_exps": (HIDDEN, INNER, "Q4_K", False),
    "ffn_up_exps": (HIDDEN, INNER, "Q4_K", False),
    "ffn_down_exps": (INNER, HIDDEN, "Q5_K", True),
    "attn_output": (HEADS, HIDDEN, "Q8_0", True),
}


@dataclass(frozen=True)
class Job:
    """One matrix of the file, and where this rank's part of it goes."""

    source: TensorInfo
    index: int
    shard: BlockShard
    row_parts: int
    column_parts: int
    target: torch.Tensor

    def load(self, blocks: FileBlocks | torch.Tensor) -> None:
        load_shard(
            self.target,
            self.shard,
            blocks,
            row_parts=self.row_parts,
            column_parts=self.column_parts,
            rank=0,
            what=self.source.name,
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=2.0, help="size of the file, 10^9")
    parser.add_argument("--folder", type=Path, help="where the file is written")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "")
    parser.add_argument("--parts", default="1", help="tensor-parallel sizes")
    parser.add_argument("--threads", default=str(THREADS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def write_file(path: Path, size: float) -> None:
    """Write about `size` bytes of random blocks, in tensors of the shapes above.

    Each layer has one expert at least, so a file has 0.53 GB at least.
    """
    tensors = []
    dense = sum(t.nbytes for t in layer_tensors(0, 1) if "attn" in t.name)
    each = sum(t.nbytes for t in layer_tensors(0, 1)) - dense
    experts = max(1, round((size / LAYERS - dense) / each))
    for layer in range(LAYERS):
        tensors += layer_tensors(layer, experts)
    write_gguf(path, {"general.architecture": "benchmark"}, tensors)
    with open_gguf(path) as file:
        start = min(info.offset for info in file.tensors.values())
    left = path.stat().st_size - start
    noise = memoryview(os.urandom(BUFFER_BYTES + 4096))
    with path.open("r+b", buffering=0) as out:
        out.seek(start)
        while left > 0:
            shift = random.randrange(4096)
            left -= out.write(noise[shift : shift + min(left, BUFFER_BYTES)])
        os.fsync(out.fileno())


def layer_tensors(layer: int, experts: int) -> list[Tensor]:
    return [
        Tensor(
            f"blk.{layer}.{name}.weight",
            (inputs, outputs, experts) if "exps" in name else (inputs, outputs),
            kind,
        )
        for name, (inputs, outputs, kind, _) in MATRICES.items()
    ]


def make_jobs(file: GGUFFile, parts: int, device: str) -> list[Job]:
    """The work of rank 0 of `parts`, with new targets, in file order."""
    jobs = []
    for info in file.tensors.values():
        inputs, outputs, _, through_rows = MATRICES[info.name.split(".")[2]]
        rows, columns = (1, parts) if through_rows else (parts, 1)
        (shard,) = lay_out([info.type], [outputs // rows], inputs // columns, info.name)
        count = info.shape[0] if len(info.shape) == 3 else 1
        data = torch.zeros(count, shard.nbytes, dtype=torch.uint8, device=device)
        for index in range(count):
            target = shard.view(data[index])
            jobs.append(Job(info, index, shard, rows, columns, target))
    return jobs


def loaded(file: GGUFFile, jobs: list[Job], threads: int) -> None:
    """What the loader does for parameters that are not on the CPU.

    Pinned memory is kept for the next run, as allocating it would weigh more here than
    in the loading of a large file.
    """
    device = jobs[0].target.device
    with Transport(file.paths, lane_maker(device), threads=threads) as transport:
        reader = BlockReader(file)
        reader.read_into = transport.order
        for job in jobs:
            job.load(reader.matrix(job.source, job.index))


def as_the_loader(file: GGUFFile, jobs: list[Job]) -> None:
    with BlockReader(file) as reader:
        for job in jobs:
            job.load(reader.matrix(job.source, job.index))


def mapped(file: GGUFFile, jobs: list[Job]) -> None:
    reader = BlockReader(file)
    reader.read_into = lambda span, target: target.copy_(reader._mapped(span))
    for job in jobs:
        job.load(reader.matrix(job.source, job.index))
        file.close()
    if jobs[0].target.is_cuda:
        torch.cuda.synchronize()


def check(file: GGUFFile, jobs: list[Job]) -> None:
    """Compare some targets with what the memory map has."""
    for job in random.Random(0).sample(jobs, min(16, len(jobs))):
        expected = torch.empty_like(job.target, device="cpu")
        reader = BlockReader(file)
        Job(**{**job.__dict__, "target": expected}).load(
            reader.matrix(job.source, job.index)
        )
        if not torch.equal(job.target.cpu(), expected):
            raise SystemExit(f"{job.source.name} {job.index}: wrong bytes were loaded")
    # Pages that are mapped stay in the page cache.
    file.close()


def plain_reads(path: Path, threads: int) -> None:
    """Read the file into buffers that are used again, 32 MiB at a time, in order."""
    chunks = iter(range(0, path.stat().st_size, BUFFER_BYTES))

    def read(_: int) -> None:
        buffer = bytearray(BUFFER_BYTES)
        with path.open("rb", buffering=0) as source:
            # A range's iterator is safe to share under Python's lock.
            for start in chunks:
                source.seek(start)
                source.readinto(buffer)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))


def drop_cache(path: Path) -> bool:
    """Drop the file from the page cache; whether that worked."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return not any(cached(file.fileno(), path.stat().st_size))


def cached(file: int, size: int) -> Iterator[bool]:
    """Whether pages spread over a file are in the page cache."""
    for place in range(0, size, max(1, size // 64)):
        try:
            # At most what is cached, from a page on.
            yield os.preadv(file, [bytearray(1)], place, os.RWF_NOWAIT) > 0
        except BlockingIOError:
            yield False


def device_copies(device: str) -> float:
    """GB/s from one pinned buffer to the device."""
    source = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    count = 64
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
    return count * BUFFER_BYTES / (time.perf_counter() - start) / 1e9


def status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", text)
    return int(found[1]) << 10 if found else 0


class Report:
    """Times work, prints a line for each and keeps the numbers."""

    def __init__(self, path: Path, runs: int) -> None:
        self.path, self.runs = path, runs
        self.rows: list[dict[str, Any]] = []

    def time(
        self, name: str, nbytes: int, work: Callable[[], None], **more: Any
    ) -> None:
        """Time `work`, which needs `nbytes`; `cold` in `more` drops the cache first."""
        times, peak = [], 0
        if not more.get("cold"):
            plain_reads(self.path, 1)
        for _ in range(self.runs):
            if more.get("cold") and not drop_cache(self.path):
                print(f"{name}: the system keeps the file cached, no number")
                return
            before = reset_peak()
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
            peak = max(peak, status("VmHWM") - before)
        row = {
            "name": name,
            **more,
            "gb_per_s": nbytes / statistics.median(times) / 1e9,
            "seconds": times,
            "bytes": nbytes,
            "host_peak_mib": peak / 2**20,
        }
        self.rows.append(row)
        details = " ".join(f"{key}={value}" for key, value in more.items())
        print(
            f"{name:14}{details:44}{row['gb_per_s']:8.2f} GB/s"
            f"{row['host_peak_mib']:9.0f} MiB",
            flush=True,
        )

    def best_read(self, cold: bool, threads: int | None = None) -> float | None:
        rates = [
            row["gb_per_s"]
            for row in self.rows
            if row["name"] == "plain reads"
            and row["cold"] == cold
            and threads in (None, row["threads"])
        ]
        return max(rates, default=None)


def reset_peak() -> int:
    """Begin a new peak of the resident set; returns what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def measure(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    report = Report(path, options.runs)
    size = path.stat().st_size
    counts = [int(count) for count in options.threads.split(",")]
    for cold in (False, True):
        for threads in sorted({1, *counts}):
            report.time(
                "plain reads",
                size,
                lambda threads=threads: plain_reads(path, threads),
                cold=cold,
                threads=threads,
            )
    bus = device_copies(options.device) if "cuda" in options.device else None
    if bus:
        print(f"{'device copies':58}{bus:8.2f} GB/s")
    with open_gguf(path) as file:
        for parts in map(int, options.parts.split(",")):
            measure_loading(file, parts, counts, report, options.device)
    ratios = add_ratios(report)
    return {"device_copies_gb_per_s": bus, "ratios": ratios, "results": report.rows}


def measure_loading(
    file: GGUFFile, parts: int, counts: list[int], report: Report, device: str
) -> None:
    jobs = make_jobs(file, parts, device)
    as_the_loader(file, jobs[:16])
    check(file, jobs[:16])
    needed = sum(job.target.numel() for job in jobs)
    read = sum(job.target.numel() * job.column_parts for job in jobs)
    for cold in (False, True):
        for threads in counts:
            report.time(
                "loaded",
                needed,
                lambda threads=threads: loaded(file, jobs, threads),
                cold=cold,
                threads=threads,
                parts=parts,
                read_bytes=read,
            )
            check(file, jobs)
    for job in jobs:
        job.target.zero_()
    report.time("mapped", needed, lambda: mapped(file, jobs), cold=False, parts=parts)
    check(file, jobs)


def add_ratios(report: Report) -> list[dict[str, Any]]:
    """The rate of reading while loading, over those of plain reads."""
    ratios = []
    for row in report.rows:
        if row["name"] != "loaded":
            continue
        rate = row["gb_per_s"] * row["read_bytes"] / row["bytes"]
        ratio = {
            "cold": row["cold"],
            "threads": row["threads"],
            "parts": row["parts"],
            "read_gb_per_s": rate,
        }
        for name, threads in (
            ("of_one_thread", 1),
            ("of_as_many_threads", row["threads"]),
            ("of_the_best", None),
        ):
            plain = report.best_read(row["cold"], threads)
            ratio[name] = rate / plain if plain else None
        ratios.append(ratio)
        shown = ", ".join(
            f"{key} {value:.2f}"
            for key, value in ratio.items()
            if isinstance(value, float)
        )
        print(
            f"{'cold' if row['cold'] else 'cached'}, {row['threads']} threads, "
            f"{row['parts']} parts: {shown}"
        )
    return ratios


def main() -> None:
    options = arguments()
    options.device = options.device or "cpu"
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "blocks.gguf"
        start = time.perf_counter()
        write_file(path, options.gb * 1e9)
        size = path.stat().st_size
        print(
            f"wrote {size / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s; "
            f"{BUFFERS} buffers of {BUFFER_BYTES >> 20} MiB a thread"
        )
        found = measure(path, options)
    if options.json:
        machine = {
            "device": torch.cuda.get_device_name()
            if "cuda" in options.device
            else platform.machine(),
            "cpus": len(os.sched_getaffinity(0)),
            "torch": torch.__version__,
            "kernel": platform.release(),
        }
        buffers = {"each": BUFFER_BYTES, "per_thread": BUFFERS}
        report = {"machine": machine, "bytes": size, "buffers": buffers, **found}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
