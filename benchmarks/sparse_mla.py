#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Time the sparse MLA kernel beside those that the release ships, in one run.

    python benchmarks/sparse_mla.py --json sparse_mla.json
    python benchmarks/sparse_mla.py --peers none --heads 64 --config 64,64,8,3

GLM-5 shapes: 576-wide rows, top-k 2048, random rows of 262,144. Up to 128 tokens the
figure that counts is that of a call inside a CUDA graph, which goes through several
sets of rows; above, that of a call by itself after a flush of the L2 cache. A ratio is
our time over the best peer's. Rates count 2 * T * H * K * (576 + 512) operations and
the gathered rows; `error` is the relative error of four tokens against float64. Peers
need the release; with `--peers none`, torch and Triton are enough.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))
    import _standalone

    _standalone.use()

from benchmarks import sparse_mla_timing as timing
from benchmarks.sparse_mla_peers import PEERS
from benchmarks.sparse_mla_timing import Call, Workload, machine, measure
from tests.gpu._standalone import asked_capability, pretend
from vllm.v1.attention.ops.sparse_mla import triton_sparse_mla as kernels
from vllm.v1.attention.ops.sparse_mla.tuning import (
    CacheFormat,
    KernelConfig,
    choose_config,
    parse_config,
)

PEER_NAMES = ("flashmla", "fa3", "release")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=numbers, default=[64, 16, 8])
    parser.add_argument("--tokens", type=numbers, default=[1, 8, 32, 128, 1024, 4096])
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--cache", default="model,fp8_ds_mla", help="and fp8")
    parser.add_argument("--dtype", default="bfloat16", help="or float16")
    parser.add_argument("--peers", default=",".join(PEER_NAMES), help="or none")
    parser.add_argument("--config", help="ours: heads,rows,warps,stages[,splits]")
    parser.add_argument("--capability", help="our configurations for this one, as 8.9")
    parser.add_argument("--rep", type=int, default=60, help="milliseconds per figure")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def ours(workload: Workload, options: argparse.Namespace) -> tuple[Call, KernelConfig]:
    """Our call, and the configuration that it takes."""
    case = workload.case
    if options.config:
        config = parse_config(options.config)
    else:
        capability, num_sms = kernels._device(torch.device(timing.DEVICE, 0))
        cache = CacheFormat(case.cache)
        config = choose_config(
            capability, case.heads, case.tokens, case.topk, cache, num_sms
        )
    call: dict[str, Any] = workload.inputs.call()
    sets = workload.index_sets

    def run(i: int) -> torch.Tensor:
        indices = {"indices": sets[i]}
        return kernels.triton_sparse_mla(**(call | indices), config=config)[0]

    return run, config


def measured(name: str, call: Call, workload: Workload, rep: int) -> dict[str, Any]:
    """One kernel's figures at one shape."""
    error = workload.error(call(0))
    timing = measure(call, workload, rep)
    return {
        "name": name,
        "eager_us": timing.eager_us,
        "graph_us": timing.graph_us,
        "us": timing.us,
        "tflops": workload.flops / timing.us / 1e6,
        "gb_per_s": workload.gathered_bytes / timing.us / 1e3,
        "error": error,
    }


def shape_report(
    cache: str, heads: int, tokens: int, options: argparse.Namespace
) -> dict[str, Any]:
    """All kernels at one shape; prints its figures."""
    dtype = getattr(torch, options.dtype)
    workload = Workload.create(heads, tokens, options.topk, cache, dtype)
    call, config = ours(workload, options)
    figures = [measured("ours", call, workload, options.rep)]
    failed: dict[str, str] = {}
    for name in options.peers.split(","):
        if name not in PEERS[cache]:
            continue
        try:
            peer = PEERS[cache][name](workload)
            figures.append(measured(name, peer, workload, options.rep))
        except Exception as error:  # a peer that lacks this shape, in its own words
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    right = [figure for figure in figures[1:] if figure["error"] < 2e-2]
    best = min(right, key=lambda figure: figure["us"], default=None)
    report = {
        "cache": cache,
        "dtype": options.dtype,
        "heads": heads,
        "tokens": tokens,
        "topk": options.topk,
        "config": asdict(config),
        "figures": figures,
        "failed": failed,
        "best_peer": best["name"] if best else None,
        "ratio": figures[0]["us"] / best["us"] if best else None,
    }
    print_report(report)
    return report


def print_report(report: dict[str, Any]) -> None:
    shape = f"{report['cache']:10s} H={report['heads']:<3d} T={report['tokens']:<5d}"
    for figure in report["figures"]:
        print(
            f"{shape} {figure['name']:9s} {figure['us']:9.1f} us"
            f" (eager {figure['eager_us']:8.1f}) {figure['tflops']:6.1f} TFLOP/s"
            f" {figure['gb_per_s']:7.1f} GB/s  error {figure['error']:.1e}",
            flush=True,
        )
    for name, message in report["failed"].items():
        print(f"{shape} {name:9s} failed: {message}", flush=True)
    config = dict(report["config"])
    values = ",".join(map(str, (config.pop("kernel"), *config.values())))
    ratio = "no peer"
    if report["ratio"] is not None:
        ratio = f"ratio {report['ratio']:.2f} to {report['best_peer']}"
    print(f"{shape} {ratio}, configuration {values}", flush=True)


def main() -> int:
    options = arguments()
    pretend(asked_capability(options.capability))
    found = machine()
    print(", ".join(f"{key} {value}" for key, value in found.items()), flush=True)
    reports = [
        shape_report(cache, heads, tokens, options)
        for cache in options.cache.split(",")
        for heads in options.heads
        for tokens in options.tokens
    ]
    print("\n| cache | heads | tokens | us | TFLOP/s | GB/s | best peer | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for report in reports:
        figure = report["figures"][0]
        ratio = f"{report['ratio']:.2f}" if report["ratio"] else ""
        print(
            f"| {report['cache']} | {report['heads']} | {report['tokens']} |"
            f" {figure['us']:.1f} | {figure['tflops']:.0f} | {figure['gb_per_s']:.0f} |"
            f" {report['best_peer'] or ''} | {ratio} |"
        )
    if options.json:
        text = json.dumps({"machine": found, "shapes": reports}, indent=1)
        options.json.write_text(text + "\n")
    wrong = [report for report in reports if report["figures"][0]["error"] > 4e-3]
    for report in wrong:
        print(f"WRONG: {report['cache']} H={report['heads']} T={report['tokens']}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
