# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The loading benchmark on small matrices, on the CPU."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import benchmarks.gguf_load as bench

MATRICES = {
    "ffn_gate_exps": (2048, 64, "Q4_K", False),
    "ffn_down_exps": (2048, 256, "Q5_K", True),
    "attn_output": (4096, 64, "Q8_0", True),
}


def run(folder: Path, *options: str) -> dict[str, Any]:
    path = folder / "found.json"
    command = ["gguf_load.py", "--gb", "0.004", "--device", "cpu", "--runs", "1"]
    command += ["--folder", str(folder), "--json", str(path), *options]
    with (
        mock.patch.object(sys, "argv", command),
        mock.patch.object(bench, "MATRICES", MATRICES),
    ):
        bench.main()
    assert [p.name for p in folder.iterdir()] == ["found.json"], (
        "the file is taken away"
    )
    return json.loads(path.read_text())


def test_everything_is_timed_and_set_in_relation(tmp_path: Path) -> None:
    found = run(tmp_path, "--threads", "1,2", "--parts", "1,8")
    names = {row["name"] for row in found["results"]}
    assert names == {"plain reads", "loaded", "mapped"}
    assert all(row["gb_per_s"] > 0 for row in found["results"])
    rows = [row for row in found["results"] if row["name"] == "loaded"]
    cached = {(row["threads"], row["parts"]): row for row in rows if not row["cold"]}
    assert set(cached) == {(1, 1), (2, 1), (1, 8), (2, 8)}
    assert cached[1, 1]["bytes"] == cached[1, 1]["read_bytes"]
    # Cuts along rows need the rows, whole rows need no more than they hold.
    assert cached[1, 8]["bytes"] < cached[1, 8]["read_bytes"] < cached[1, 1]["bytes"]
    for ratio in found["ratios"]:
        if not ratio["cold"]:
            assert ratio["of_one_thread"] >= ratio["of_the_best"] > 0


def test_ratio_is_of_the_same_cache_and_threads() -> None:
    report = bench.Report(Path("unused"), 1)
    report.rows = [
        {"name": "plain reads", "cold": cold, "threads": threads, "gb_per_s": rate}
        for cold, threads, rate in [(False, 1, 8), (False, 4, 10), (True, 1, 1)]
    ]
    row = {"name": "loaded", "threads": 4, "parts": 8, "gb_per_s": 4.5}
    row |= {"bytes": 10, "read_bytes": 20}
    report.rows += [{**row, "cold": False}, {**row, "cold": True}]
    warm, cold = bench.add_ratios(report)
    assert warm["read_gb_per_s"] == 9
    assert [warm[f"of_{name}"] for name in ("one_thread", "as_many_threads")] == [
        9 / 8,
        0.9,
    ]
    assert (cold["of_one_thread"], cold["of_as_many_threads"]) == (9, None)


def test_wrong_bytes_end_the_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    with mock.patch.object(bench, "MATRICES", MATRICES):
        bench.write_file(path, 4e6)
        with bench.open_gguf(path) as file:
            jobs = bench.make_jobs(file, 1, "cpu")
            bench.as_the_loader(file, jobs)
            bench.check(file, jobs)
            jobs[-1].target.add_(torch.ones((), dtype=torch.uint8))
            with pytest.raises(SystemExit, match="attn_output.* wrong bytes"):
                bench.check(file, jobs[-1:])


def test_kept_cache_gives_no_cold_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch.object(bench, "drop_cache", return_value=False):
        found = run(tmp_path, "--threads", "1")
    assert not any(row.get("cold") for row in found["results"])
    assert "keeps the file cached, no number" in capsys.readouterr().out
