# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The sparse MLA benchmark and tuner without a GPU.

Kernels are interpreted and times made up: how they time is not tested here.
"""

import contextlib
import functools
import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.real_triton import in_interpreter

PROPERTIES = SimpleNamespace(
    multi_processor_count=4, L2_cache_size=1, shared_memory_per_block_optin=101_376
)


@contextlib.contextmanager
def pretended_gpu(microseconds: Callable[[Any], float]):
    """The benchmarks' modules work on CPU tensors; times are those of the function."""
    import benchmarks.sparse_mla as bench
    import benchmarks.sparse_mla_timing as timing
    import benchmarks.tune_sparse_mla as tuner

    def measure(call, workload, rep_ms):
        for i in range(len(workload.index_sets)):
            call(i)
        return timing.Timing(microseconds(call), None)

    cuda = {
        "get_device_properties": lambda device: PROPERTIES,
        "get_device_name": lambda: "pretended",
        "get_device_capability": lambda: (8, 9),
    }
    with contextlib.ExitStack() as stack:
        patch = mock.patch.object
        for name, function in cuda.items():
            stack.enter_context(patch(torch.cuda, name, function))
        stack.enter_context(patch(timing, "DEVICE", "cpu"))
        stack.enter_context(patch(timing, "ROWS", 512))
        for module in (bench, tuner):
            stack.enter_context(patch(module, "measure", measure))
        yield


def run_benchmark(folder: Path, *options: str) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit status, what was printed, and the shapes of the JSON file."""
    import benchmarks.sparse_mla as bench

    path = folder / "found.json"
    shape = ("--heads", "2", "--tokens", "1,2", "--topk", "64", "--dtype", "float16")
    command = ["sparse_mla.py", *shape, "--json", str(path), *options]
    printed = io.StringIO()
    with mock.patch.object(sys, "argv", command), contextlib.redirect_stdout(printed):
        status = bench.main()
    return status, printed.getvalue(), json.loads(path.read_text())["shapes"]


def peer(us: float, error: float = 0.0) -> Callable[[Any], Any]:
    """A made-up peer with a time of its own, off by `error`."""

    def prepare(workload):
        def call(i: int):
            return workload.reference[0] * (1 + error)

        call.us = us
        return call

    return prepare


def missing(workload):
    raise RuntimeError("no such heads")


@in_interpreter
def test_the_ratio_is_to_the_fastest_peer_that_is_right(tmp_path):
    import benchmarks.sparse_mla as bench

    peers = {"flashmla": peer(80.0), "fa3": peer(5.0, error=0.5), "release": missing}
    with (
        pretended_gpu(lambda call: getattr(call, "us", 100.0)),
        mock.patch.dict(bench.PEERS, {"model": peers}),
    ):
        status, printed, shapes = run_benchmark(tmp_path, "--cache", "model")
    assert status == 0
    assert [shape["tokens"] for shape in shapes] == [1, 2]
    for shape in shapes:
        assert shape["ratio"] == 1.25
        assert shape["best_peer"] == "flashmla"
        assert shape["failed"] == {"release": "RuntimeError: no such heads"}
        ours, *others = sorted(shape["figures"], key=lambda f: f["name"] != "ours")
        assert ours["error"] < 1e-3
        assert {figure["name"] for figure in others} == {"flashmla", "fa3"}
    assert shapes[1]["figures"][0]["tflops"] == pytest.approx(
        2 * 2 * 2 * 64 * (576 + 512) / 100e-6 / 1e12
    )
    assert shapes[1]["figures"][0]["gb_per_s"] == pytest.approx(
        2 * 64 * 576 * 2 / 100e-6 / 1e9
    )
    assert "ratio 1.25 to flashmla" in printed


@in_interpreter
def test_a_wrong_result_of_ours_fails_the_benchmark(tmp_path):
    import benchmarks.sparse_mla as bench

    right = bench.kernels.triton_sparse_mla

    def wrong(**call):
        out, lse = right(**call)
        return out * 1.01, lse

    options = ("--cache", "fp8_ds_mla", "--peers", "none", "--config", "16,16,4,1,2")
    with pretended_gpu(lambda call: 100.0):
        status, _, shapes = run_benchmark(tmp_path, *options)
        assert status == 0
        assert shapes[0]["config"] == {
            "block_heads": 16,
            "block_rows": 16,
            "num_warps": 4,
            "num_stages": 1,
            "splits": 2,
            "kernel": "triton",
        }
        assert shapes[0]["best_peer"] is None
        with mock.patch.object(bench.kernels, "triton_sparse_mla", wrong):
            status, printed, _ = run_benchmark(tmp_path, *options)
    assert status == 1
    assert "WRONG: fp8_ds_mla H=2 T=1" in printed


def place(cache: str, heads: int, few: bool, *times: tuple[float, int]):
    """A place of the table with a candidate for each (time, registers spilled)."""
    from benchmarks.tune_sparse_mla import TOKENS, Candidate, KernelConfig, Place

    candidates = []
    for number, (us, spills) in enumerate(times):
        candidate = Candidate(KernelConfig(16, 16 << number, 4, 2), spills=spills)
        candidate.us = dict.fromkeys(TOKENS[few], us)
        candidates.append(candidate)
    return Place(cache, heads, few, candidates)


@in_interpreter
def test_printed_entries_are_those_of_the_table():
    from benchmarks.tune_sparse_mla import entries
    from vllm.v1.attention.ops.sparse_mla import tuning

    places = [
        place("model", 16, True, (3.0, 0), (2.0, 0)),
        # The fastest spills, the second does not.
        place("model", 16, False, (1.0, 21), (2.0, 20), (3.0, 0)),
        place("model", 128, True, (1.0, 0)),
        place("model", 128, False, (1.0, 21)),
        place("fp8_ds_mla", 128, True, (1.0, 0)),
        place("fp8_ds_mla", 128, False, (2.0, 0)),
    ]
    text = entries(places, "small")
    assert "# 128 heads: not measured" in text
    rows = eval(f"[{text}]", vars(tuning))
    got = [
        (row.device, row.cache, row.max_heads, row.few_tokens, row.config.block_rows)
        for row in rows
    ]
    assert got == [
        ("small", "model", 16, True, 32),
        ("small", "model", 16, False, 32),
        ("small", "fp8_ds_mla", 128, True, 16),
        ("small", "fp8_ds_mla", 128, False, 16),
    ]


@in_interpreter
def test_the_tuner_tries_what_the_table_has():
    from benchmarks.sparse_mla_timing import row_bytes
    from benchmarks.tune_sparse_mla import configurations
    from vllm.v1.attention.ops.sparse_mla.tuning import table

    for row in table():
        limit = row.device.shared_memory
        tried = list(configurations(row.max_heads, row_bytes(row.cache), limit))
        assert replace(row.config, splits=1) in tried, str(row)
        assert len(tried) == len(set(tried)) < 200


@in_interpreter
def test_the_tuner_drops_what_is_wrong_or_does_not_fit():
    import benchmarks.tune_sparse_mla as tuner

    launched: list[Any] = []
    right = tuner.kernels.triton_sparse_mla

    def kernel(config, **call):
        launched.append(config)
        out, lse = right(**call, config=config)
        return (out * 2 if config.block_rows == 32 else out), lse

    @contextlib.contextmanager
    def compile_only():
        """Of what is launched, 64 rows are too many, and one stage spills."""
        found: list[Any] = []
        yield found
        config = launched[-1]
        shared = 101_377 if config.block_rows == 64 else 101_376
        found.append(
            SimpleNamespace(
                _init_handles=lambda: None,
                metadata=SimpleNamespace(shared=shared),
                n_regs=99,
                n_spills=30 if config.num_stages == 1 else 0,
            )
        )

    shapes = [(64, 2), (32, 2), (16, 1), (16, 3), (16, 2)]
    candidates = [
        tuner.Candidate(tuner.KernelConfig(16, rows, 4, stages))
        for rows, stages in shapes
    ]
    place = tuner.Place("model", 2, True, candidates)
    create = functools.partial(tuner.Workload.create, dtype=torch.float16)
    changes = {
        "TOKENS": {True: (1, 2)},
        "TOPK": 64,
        "compile_only": compile_only,
        "Workload": SimpleNamespace(create=create),
    }
    times = {1: 5.0, 2: 7.0, 3: 6.0}
    with (
        pretended_gpu(lambda call: times[launched[-1].num_stages]),
        mock.patch.multiple(tuner, **changes),
        mock.patch.object(tuner.kernels, "triton_sparse_mla", kernel),
    ):
        tuner.tune(place, SimpleNamespace(workers=1), 101_376, 300.0)
        best = place.best
        assert place.ranked == [candidates[2], candidates[3], candidates[4]]
        assert best is candidates[3], "the fastest of them spills"
    status = [candidate.status for candidate in candidates]
    assert status[0] == "too much shared memory"
    assert status[1].startswith("wrong: error 1.0")
    assert status[2:] == ["measured"] * 3
    assert sorted(best.us) == [1, 2]


@in_interpreter
def test_the_tuner_splits_as_serving_does():
    import benchmarks.tune_sparse_mla as tuner
    from vllm.v1.attention.ops.sparse_mla import tuning

    row = next(row for row in tuning.table() if row.few_tokens)
    assert row.device == "small"
    case = tuner.Case(row.max_heads, 1, 2048, row.cache)
    capability = (8, 9)
    with mock.patch.object(tuner.kernels, "_device", lambda device: (capability, 64)):
        want = tuning.choose_config(capability, case.heads, 1, case.topk, row.cache, 64)
        assert tuner.served(row.config, case) == want
        assert want.splits > 1
