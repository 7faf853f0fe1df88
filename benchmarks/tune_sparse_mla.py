#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Measure configurations of the sparse MLA kernel on this GPU; print table entries.

    python benchmarks/tune_sparse_mla.py --json tuned.json

Needs torch, Triton and this repository; vLLM need not be installed. For every cache
format and class of heads it compiles what fits into the device's shared memory, times
all of it briefly and the best again, and prints entries for
`vllm/v1/attention/ops/sparse_mla/tuning.py`. Kernels that give wrong results or spill
more than a few registers are not chosen. Please send the printed entries and the
JSON file.
"""

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))
    import _standalone

    _standalone.use()

from benchmarks import sparse_mla_timing as timing
from benchmarks.sparse_mla_timing import (
    Workload,
    compile_only,
    machine,
    measure,
    row_bytes,
)
from tests.gpu._standalone import asked_capability, pretend
from tests.overlay.sparse_mla.cases import Case, make
from vllm.v1.attention.ops.sparse_mla import triton_sparse_mla as kernels
from vllm.v1.attention.ops.sparse_mla.tuning import (
    Kernel,
    KernelConfig,
    device_class,
    with_splits,
)

TOKENS = {True: (1, 8, 32), False: (512, 2048)}
TOPK = 2048
WRONG = 4e-3
# Registers of 32 bits; 80 bytes, as in sparse_mla_resources.py.
SPILLS = 20
FINALISTS = 4


@dataclass
class Candidate:
    """A configuration in one place of the table, and what was seen of it.

    Attributes:
        us: microseconds by number of tokens.
        spills: registers that were spilled; with many it is timed, but not chosen.
        status: "untried", "compiled", "measured", or why it is out.
    """

    config: KernelConfig
    status: str = "untried"
    shared: int = 0
    registers: int = 0
    spills: int = 0
    us: dict[int, float] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """Geometric mean of the times; the smaller, the better."""
        return math.exp(sum(map(math.log, self.us.values())) / len(self.us))

    def report(self) -> dict[str, Any]:
        return {
            "kernel": self.config.kernel,
            "config": astuple(self.config)[:4],
            "status": self.status,
            "shared": self.shared,
            "registers": self.registers,
            "spills": self.spills,
            "us": self.us,
        }


@dataclass
class Place:
    """One entry of the table: all its candidates, and the best of them."""

    cache: str
    heads: int
    few: bool
    candidates: list[Candidate]

    @property
    def ranked(self) -> list[Candidate]:
        """Those that were timed at all numbers of tokens, the fastest first."""
        done = [c for c in self.candidates if len(c.us) == len(TOKENS[self.few])]
        return sorted(done, key=lambda c: c.score)

    @property
    def best(self) -> Candidate | None:
        """The fastest that hardly spills registers."""
        return next((c for c in self.ranked if c.spills <= SPILLS), None)

    def __str__(self) -> str:
        tokens = "few" if self.few else "many"
        return f"{self.cache}, {self.heads} heads, {tokens} tokens"


def configurations(heads: int, row_bytes: int, limit: int) -> Iterator[KernelConfig]:
    """What may be worth a try: accumulators within registers, tiles within `limit`."""
    for block_heads, block_rows, warps, stages in itertools.product(
        (16, 32, 64, 128), (64, 32, 16, 128), (8, 4), (3, 2, 5, 1)
    ):
        if block_heads > max(16, heads):
            continue
        # 512 float32 sums a head in the registers of all threads, 255 each.
        if block_heads * 512 / (warps * 32) > 192:
            continue
        # The load of indices takes every other stage.
        if stages // 2 * block_rows * row_bytes > limit:
            continue
        yield KernelConfig(block_heads, block_rows, warps, stages)
    for block_heads, block_rows in itertools.product((16, 32), (32, 64)):
        for warps in (block_heads // 4, block_heads // 2):
            fits = 2 * block_rows * row_bytes <= limit and warps <= 8
            if fits and block_heads <= max(16, heads):
                shape = block_heads, block_rows, warps, 2
                yield KernelConfig(*shape, kernel=Kernel.GLUON)


def served(config: KernelConfig, case: Case) -> KernelConfig:
    """`config` with the splits that serving gives it where it is the only entry."""
    _, num_sms = kernels._device(torch.device(timing.DEVICE, 0))
    if case.tokens * -(-case.heads // config.block_heads) >= num_sms:
        return config
    return with_splits(config, case.heads, case.tokens, case.topk, num_sms)


def compile_all(
    place: Place, limit: int, workers: int, deadline: float
) -> Iterable[Candidate]:
    """Compile candidates in threads until `deadline`; the ones that may be timed."""
    tokens = TOKENS[place.few][0]
    case = Case(place.heads, tokens, TOPK, place.cache, rows=64, pattern="empty")
    inputs, _ = make(case, timing.DEVICE)

    def compile_one(candidate: Candidate) -> None:
        if time.monotonic() > deadline:
            return
        try:
            config = served(candidate.config, case)
            with compile_only() as compiled:
                kernels.triton_sparse_mla(**inputs.call(), config=config)
            kernel = compiled[0]
            candidate.shared = kernel.metadata.shared
            if candidate.shared > limit:
                candidate.status = "too much shared memory"
                return
            kernel._init_handles()
            candidate.registers, candidate.spills = kernel.n_regs, kernel.n_spills
            candidate.status = "compiled"
        except Exception as error:  # whatever the compiler says: it is not a candidate
            candidate.status = f"{type(error).__name__}: {error}"[:200]

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(compile_one, place.candidates))
    return [c for c in place.candidates if c.status == "compiled"]


def time_one(candidate: Candidate, workload: Workload, rep_ms: int) -> None:
    """Check the result and time it; a wrong one is out."""
    config = served(candidate.config, workload.case)
    call: dict[str, Any] = workload.inputs.call()
    sets = workload.index_sets

    def run(i: int) -> torch.Tensor:
        indices = {"indices": sets[i]}
        return kernels.triton_sparse_mla(**(call | indices), config=config)[0]

    try:
        error = workload.error(run(0))
        if error > WRONG:
            candidate.status = f"wrong: error {error:.1e}"
            candidate.us.clear()
            return
        candidate.us[workload.case.tokens] = measure(run, workload, rep_ms).us
        candidate.status = "measured"
    except Exception as error:  # a launch that fails: it is not a candidate
        candidate.status = f"{type(error).__name__}: {error}"[:200]
        candidate.us.clear()


def tune(place: Place, options: argparse.Namespace, limit: int, seconds: float) -> None:
    """Fill in the candidates of a place, within about `seconds`."""
    begin = time.monotonic()
    print(f"{place}: {len(place.candidates)} candidates", flush=True)
    compiled = compile_all(place, limit, options.workers, begin + seconds / 2)
    compile_seconds = time.monotonic() - begin
    tokens = TOKENS[place.few]
    workload = Workload.create(place.heads, tokens[0], TOPK, place.cache)
    for candidate in compiled:
        if time.monotonic() < begin + seconds:
            time_one(candidate, workload, 10)
    timed = sorted((c for c in compiled if c.us), key=lambda c: c.score)
    finalists = [c for c in timed if c.spills <= SPILLS][:FINALISTS]
    finalists += [c for c in timed if c.spills > SPILLS][:1]
    for number in tokens:
        workload = Workload.create(place.heads, number, TOPK, place.cache)
        for candidate in finalists:
            if candidate.us:
                time_one(candidate, workload, 60)
    said = [place.best] + [c for c in place.ranked[:1] if c.spills > SPILLS]
    seconds = time.monotonic() - begin
    print(
        f"{place}: {len(compiled)} compiled in {compile_seconds:.0f} s, all done in"
        f" {seconds:.0f} s; {' but '.join(map(describe, said))}",
        flush=True,
    )


def describe(candidate: Candidate | None) -> str:
    if candidate is None:
        return "nothing measured"
    times = ", ".join(f"T={t} {us:.1f} us" for t, us in candidate.us.items())
    spills = f", spills {candidate.spills}" if candidate.spills else ""
    return (
        f"{written(candidate.config)} {times}, {candidate.shared} bytes,"
        f" {candidate.registers} registers{spills}"
    )


def entries(places: list[Place], device: str) -> str:
    """The table entries to paste into tuning.py."""
    lines: list[str] = []
    for cache in dict.fromkeys(place.cache for place in places):
        found = {(p.heads, p.few): p.best for p in places if p.cache == cache}
        lines += ["*_entries(", f"    DeviceClass.{device.upper()},"]
        lines += [f"    CacheFormat.{cache.upper()},"]
        for heads in dict.fromkeys(heads for heads, _ in found):
            pair = [found.get((heads, few)) for few in (True, False)]
            if None in pair:
                lines.append(f"    # {heads} heads: not measured")
                continue
            few, many = (written(c.config) for c in pair if c)
            lines.append(f"    ({heads}, {few}, {many}),")
        lines.append("),")
    return "\n".join(lines)


def written(config: KernelConfig) -> str:
    """The configuration as tuning.py writes it."""
    shape = astuple(config)[:4]
    if config.kernel is Kernel.GLUON:
        return f"_gluon{shape[:3]}"
    return f"KernelConfig{shape}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=900, help="time to take")
    parser.add_argument("--cache", default="model,fp8,fp8_ds_mla")
    parser.add_argument("--heads", default="16,32,128", help="upper ends of classes")
    parser.add_argument("--capability", help="the table's device, as 8.9")
    parser.add_argument("--shared-memory", type=int, help="limit in bytes")
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    end = time.monotonic() + options.seconds
    pretend(asked_capability(options.capability))
    device = device_class(kernels._device(torch.device(timing.DEVICE, 0))[0])
    has = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    limit = min(has, options.shared_memory or device.shared_memory)
    found = machine()
    print(", ".join(f"{key} {value}" for key, value in found.items()))
    print(f"device class {device}, {limit} bytes of shared memory", flush=True)
    places = [
        Place(
            cache,
            int(heads),
            few,
            [Candidate(c) for c in configurations(int(heads), row_bytes(cache), limit)],
        )
        for cache in options.cache.split(",")
        for heads in options.heads.split(",")
        for few in (False, True)
    ]
    for number, place in enumerate(places):
        left = max(0.0, end - time.monotonic())
        tune(place, options, limit, left / (len(places) - number))
    untried = sum(c.status == "untried" for p in places for c in p.candidates)
    if untried:
        print(f"\n{untried} candidates untried; give more --seconds")
    print("\n" + entries(places, device))
    if options.json:
        report = {
            "machine": found,
            "device_class": device,
            "shared_memory": limit,
            "places": [
                {
                    "cache": place.cache,
                    "heads": place.heads,
                    "few_tokens": place.few,
                    "best": place.best.report() if place.best else None,
                    "candidates": [c.report() for c in place.candidates],
                }
                for place in places
            ],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(place.best for place in places) else 1


if __name__ == "__main__":
    sys.exit(main())
