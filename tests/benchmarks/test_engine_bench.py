# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The benchmark of the engine without a GPU: files, settings, arithmetic, processes.

Speeds that are tested come from made-up clocks; those of the CPU mean nothing.
"""

import dataclasses
import itertools
import json
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest import mock

import pytest
import torch

import benchmarks.engine as bench
from benchmarks.engine_run import (
    Job,
    Workload,
    digest,
    fill,
    first_logprob,
    holding,
    log_facts,
    measure,
    prompts,
)
from benchmarks.engine_settings import (
    BACKENDS,
    CACHES,
    DRAFTS,
    GROUPS,
    INDEXERS,
    Limits,
    parse_setting,
    parse_settings,
)
from benchmarks.engine_table import cell, equal_tokens, remarks, table
from tests.helpers.cuda_tree import in_cuda_tree

LIMITS = Limits(context=4416, requests=32)
EVERY_WORD = [
    "+".join(words)
    for words in itertools.chain(
        itertools.product(["bf16", "gguf"], BACKENDS),
        itertools.product(["bf16"], BACKENDS, CACHES, ["eager"]),
        itertools.product(["bf16", "gguf"], DRAFTS, INDEXERS),
    )
]


# Settings


def test_words_say_how_the_engine_runs() -> None:
    setting = parse_setting("bf16+triton+fp8_ds_mla+eager+mtp3+triton_indexer")
    options = setting.options(Path("model"), LIMITS)
    assert options["attention_backend"] == "TRITON_MLA_SPARSE"
    assert options["kv_cache_dtype"] == "fp8_ds_mla"
    assert options["enforce_eager"] is True
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    assert options["speculative_config"] == drafts
    assert options["load_format"] == "random_weights"
    assert setting.environment()["VLLM_DSA_INDEXER"] == "triton"
    plain = parse_setting("gguf")
    options = plain.options(Path("model"), LIMITS)
    left_to_vllm = {"attention_backend", "speculative_config", "load_format"}
    assert not left_to_vllm & options.keys()
    assert "kv_cache_memory_bytes" not in options
    assert (options["kv_cache_dtype"], options["enforce_eager"]) == ("auto", False)
    assert "VLLM_DSA_INDEXER" not in plain.environment()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fp8", "begins with 'fp8'; expected bf16 or gguf"),
        ("bf16+fast", "unknown word 'fast'; expected triton"),
        ("bf16+triton+fa", "'fa' repeats or contradicts"),
        ("bf16+mtp1+mtp3", "'mtp3' repeats or contradicts"),
        ("bf16+eager+eager", "'eager' repeats or contradicts"),
    ],
)
def test_a_name_that_says_nothing_clear_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_setting(name)


def test_groups_stand_for_settings_each_once() -> None:
    names = [one.name for one in parse_settings(["backends", "bf16+triton", "drafts"])]
    assert names == [*GROUPS["backends"], "bf16+mtp1", "bf16+mtp3", "bf16+mtp5"]
    assert len(parse_settings(GROUPS)) == len({*itertools.chain(*GROUPS.values())})


def check_options(model: Path, limits: Limits, but: tuple[str, ...] = ()) -> None:
    """That `EngineArgs` of the vLLM at hand has all options and knows their values,
    of all settings but those with certain backends."""
    from vllm.config.cache import CacheDType
    from vllm.config.speculative import RejectionSampleMethod, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    known = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    for setting in parse_settings([*GROUPS, *EVERY_WORD]):
        if setting.backend in but:
            continue
        options = setting.options(model, limits)
        args = EngineArgs(**options)
        if setting.backend is not None:
            assert AttentionBackendEnum[args.attention_backend].get_path()
        assert args.kv_cache_dtype in get_args(CacheDType)
        drafts = args.speculative_config or {}
        assert drafts.keys() <= known
        if "rejection_sample_method" in drafts:
            methods = get_args(RejectionSampleMethod)
            assert drafts["rejection_sample_method"] in methods
            rates = SpeculativeConfig._resolve_synthetic_acceptance_rates(
                drafts["num_speculative_tokens"],
                None,
                drafts["synthetic_acceptance_length"],
            )
            assert sum(rates) == pytest.approx(limits.accepted * setting.mtp)


@pytest.mark.parametrize("accepted", [None, 0.0, 0.7, 1.0])
def test_the_installed_release_takes_every_setting(
    tmp_path: Path, accepted: float | None
) -> None:
    limits = dataclasses.replace(LIMITS, accepted=accepted, kv_bytes=1 << 30)
    # The fork registers this one over the CUDA release only.
    check_options(tmp_path, limits, but=("TRITON_MLA_SPARSE",))


@in_cuda_tree
def test_the_cuda_release_takes_every_setting(tmp_path: Path) -> None:
    check_options(tmp_path, dataclasses.replace(LIMITS, accepted=0.7))


def test_memory_and_context_are_what_the_workloads_need(tmp_path: Path) -> None:
    told = ["--run", "bf16,bf16+mtp3", "--contexts", "4096,120000", "--together", "2"]
    jobs = list(bench.jobs(bench.arguments([*told, "--tiny"]), tmp_path))
    assert jobs[0].workloads == (
        Workload(1, 4096),
        Workload(1, 120_000),
        Workload(32, 4096),
    )
    limits = jobs[0].limits
    assert limits.context >= 120_000 + 256
    assert (limits.requests, limits.memory_share) == (32, 0.45)
    assert limits.kv_bytes == 4 << 30
    assert jobs[0].lock == jobs[1].lock is not None
    layers = [
        json.loads((Path(job.model) / "config.json").read_text())[
            "num_nextn_predict_layers"
        ]
        for job in jobs
    ]
    assert layers == [0, 1], "weights of an MTP block only where it drafts"
    alone = bench.limits(bench.arguments(["--run", "bf16", "--requests", "0"]))
    assert (alone.kv_bytes, alone.memory_share, alone.requests) == (None, 0.9, 1)
    with pytest.raises(ValueError, match="gguf needs a file: give --write or --file"):
        list(bench.jobs(bench.arguments(["--run", "gguf"]), tmp_path))


# Measuring


class MadeUp:
    """An engine with a clock: 1,000 tokens of prompts and 50 steps in a second."""

    def __init__(self, compile_s: float = 0.0) -> None:
        self.now, self.compile_s, self.calls = 0.0, compile_s, 0

    def generate(self, given: list[list[int]], count: int) -> list[list[int]]:
        self.now += sum(map(len, given)) / 1000 + (count - 1) / 50 + self.compile_s
        self.compile_s = 0.0
        self.calls += 1
        return [[tokens[0]] * count for tokens in given]

    def clock(self) -> float:
        return self.now


def test_speeds_are_those_of_the_engine_without_what_it_compiles() -> None:
    engine = MadeUp(compile_s=7.0)
    workload = Workload(4, 100)
    speeds = measure(
        engine.generate, workload, 1024, out=26, repeats=2, clock=engine.clock
    )
    assert engine.calls == 4
    assert speeds.prefill == pytest.approx(1000)
    assert speeds.decode == pytest.approx(4 * 50)
    assert speeds.repeatable
    assert speeds.seconds[0] == pytest.approx([7.4, 0.4])
    given = prompts(workload, 1024)
    assert speeds.tokens == [[tokens[0]] * 16 for tokens in given]
    assert speeds.digest == digest([[tokens[0]] * 26 for tokens in given])


def test_noise_is_no_speed_and_other_tokens_are_seen() -> None:
    engine = MadeUp()
    made = iter(range(9))

    def generate(given: list[list[int]], count: int) -> list[list[int]]:
        engine.now += 1.0 / count
        return [[next(made)] * count for _ in given]

    speeds = measure(
        generate, Workload(1, 8), 1024, out=4, repeats=2, clock=engine.clock
    )
    assert speeds.decode is None
    assert not speeds.repeatable


def test_speeds_of_wrong_numbers_are_refused() -> None:
    def answering(*logprobs: float) -> Any:
        each = [{7: SimpleNamespace(logprob=one)} for one in logprobs]
        made = SimpleNamespace(outputs=[SimpleNamespace(logprobs=each)])
        return SimpleNamespace(generate=lambda *_, **__: [made])

    assert first_logprob(answering(-2.0, -1.0), 1024, 2) == -2.0
    for wrong in (math.nan, -math.inf):
        with pytest.raises(ValueError, match="expected finite numbers: the weights"):
            first_logprob(answering(-2.0, wrong), 1024, 2)


def test_prompts_are_the_same_every_time_and_hold_plain_tokens() -> None:
    workload = Workload(3, 500)
    once, again = prompts(workload, 1024), prompts(workload, 1024)
    assert once == again
    assert once[0] != once[1]
    every = [token for tokens in once for token in tokens]
    assert len(every) == 1500
    assert min(every) >= 300
    assert max(every) < 1024 - 60
    assert digest(once) != digest(once[::-1])


def test_made_up_weights_depend_on_the_name_and_keep_sizes() -> None:
    def filled(name: str, *shape: int) -> torch.Tensor:
        values = torch.empty(shape, dtype=torch.bfloat16)
        fill(name, values)
        return values.float()

    one = filled("model.layers.1.mlp.experts.w13_weight", 4, 256, 512)
    assert one.std().item() == pytest.approx(1 / math.sqrt(512), rel=0.02)
    assert torch.equal(
        one, filled("model.layers.1.mlp.experts.w13_weight", 4, 256, 512)
    )
    assert not torch.equal(
        one, filled("model.layers.2.mlp.experts.w13_weight", 4, 256, 512)
    )
    assert filled("embed_tokens.weight", 64, 512).std().item() == pytest.approx(
        0.1, rel=0.02
    )
    assert filled("k_norm.weight", 512).mean().item() == pytest.approx(1, abs=0.01)
    for name in ("k_norm.bias", "gate.e_score_correction_bias"):
        assert filled(name, 512).abs().max().item() < 0.1


def test_nothing_is_timed_while_engines_start(tmp_path: Path) -> None:
    lock = str(tmp_path / "lock")
    timing = threading.Event()

    def time_alone() -> None:
        with holding(lock, alone=True):
            timing.set()

    waiting = threading.Thread(target=time_alone)
    with holding(lock, alone=False), holding(lock, alone=False):
        waiting.start()
        assert not timing.wait(0.2)
    assert timing.wait(10)
    waiting.join()
    with holding(None, alone=True), holding(None, alone=True):
        pass


SAID = (
    "INFO [model_runner.py:425] Model loading took 58.25 GiB memory and 31.5 seconds",
    "WARNING [moe.py:1166] Using default MoE config. Performance might be sub-optimal!",
    "WARNING [moe.py:1166] Using default MoE config. Performance might be sub-optimal!",
    "INFO [cuda.py:448] Using FLASHMLA_SPARSE attention backend.",
    "INFO [utils.py:1148] GPU KV cache size: 7,112,936 tokens, Maximum concurrency 1x",
    "WARNING [vllm.py:1703] Enforce eager set, disabling CUDAGraphs",
)
LOG = "".join(
    "(Main pid=7) " + line.replace(" [", " 11-30 20:30:58 [", 1) + "\n" for line in SAID
)
LOG += "/usr/x.py:138: FutureWarning: `reduce_op` is deprecated\n"


def test_the_log_tells_memory_choices_and_warnings() -> None:
    facts = log_facts(LOG)
    assert facts["weights_gib"] == 58.25
    assert facts["load_s"] == 31.5
    assert facts["kv_tokens"] == 7_112_936
    assert "Using FLASHMLA_SPARSE attention backend." in facts["choices"]
    assert facts["warnings"] == [
        "Using default MoE config. Performance might be sub-optimal!",
        "Enforce eager set, disabling CUDAGraphs",
        "FutureWarning: `reduce_op` is deprecated",
    ]
    nothing = log_facts("no such lines")
    assert nothing["kv_tokens"] is nothing["weights_gib"] is nothing["load_s"] is None


# The table


def result(name: str, prefill: float, decode: float | None, **more: Any) -> dict:
    speeds = {
        "workload": {"requests": 2, "prompt": 8},
        "out": 4,
        "prefill": prefill,
        "decode": decode,
        "digest": "0",
        "repeatable": True,
        "tokens": [[1, 2, 3], [4, 5, 6]],
        "seconds": [[9.0, 1.0, 1.05], [9.0, 2.0, 2.1]],
    }
    return {
        "setting": name,
        "start_s": 12.3,
        "weights_gib": 58.25,
        "parameters_gib": 50.0,
        "kv_tokens": 1_000_000,
        "warnings": [],
        "drafts": {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0},
        "speeds": [speeds],
    } | more


def rows(text: str) -> list[list[str]]:
    return [
        [part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines()
    ]


def test_ratios_are_to_the_first_setting_that_ran() -> None:
    failed = {"setting": "bf16+fa", "error": "exit status 1; no kernel"}
    drafts = {"drafts": 10, "draft_tokens": 30, "accepted_tokens": 15}
    other = result("bf16+triton", 1500.0, None, drafts=drafts, weights_gib=None)
    other["speeds"][0]["tokens"] = [[1, 2, 9], [7, 5, 6]]
    text = table([failed, result("bf16", 3000.0, 50.5), other], [Workload(2, 8)])
    head, _, *lines = rows(text)
    assert all(len(line) == len(head) for line in lines)
    assert lines[0][1] == "failed: exit status 1; no kernel"
    first, second = (dict(zip(head, line, strict=True)) for line in lines[1:])
    assert first["in/s 2x8"] == "3,000"
    assert first["out/s 2x8"] == "50.5"
    assert first["weights GiB"] == "58.25"
    assert second["in/s 2x8"] == "1,500 (0.50)"
    assert second["out/s 2x8"] == ""
    assert second["weights GiB"] == "50.00"
    assert second["tokens a step"] == "2.50"
    assert (second["first"], second["alike"]) == ("50%", "1.0")
    assert (first["first"], first["alike"], first["tokens a step"]) == ("", "", "")
    assert cell(200.0, 100.0) == "200 (2.00)"


def test_equal_answers_are_equal_to_their_end() -> None:
    one = result("a", 1.0, 1.0)
    assert equal_tokens(one, one) == (1.0, 3.0)


def test_a_setting_that_stopped_has_the_workloads_before() -> None:
    full, part = result("a", 2.0, 2.0), result("b", 3.0, 3.0, stopped="no memory")
    second = json.loads(json.dumps(full["speeds"][0]))
    second["workload"]["prompt"] = 99
    full["speeds"].append(second)
    text = table([full, part], [Workload(2, 8), Workload(2, 99)])
    head, _, _, line = rows(text)
    cells = dict(zip(head, line, strict=True))
    assert cells["in/s 2x8"] == "3.0 (1.50)"
    assert cells["in/s 2x99"] == ""
    assert cells["first"] == "100%"


def test_remarks_say_what_spoils_a_number() -> None:
    assert remarks(result("a", 1.0, 1.0)) == []
    bad = result("a", 1.0, 1.0, kv_tokens=23, warnings=log_facts(LOG)["warnings"])
    bad["speeds"][0] |= {"repeatable": False, "decode": None}
    bad["speeds"][0]["tokens"] = [[0, 0, 0], [4, 5, 6]]
    bad["stopped"] = "no memory"
    bad["speeds"][0]["seconds"][1] = [9.0, 2.0, 2.5]
    assert remarks(bad) == [
        "stopped: no memory",
        "slow? Using default MoE config. Performance might be sub-optimal!",
        "2x8 needs 24 tokens of cache and there are 23: requests waited",
        "2x8: more tokens took no longer, out/s is noise",
        "2x8: 1 answers are one token again and again",
        "2x8 gave other tokens when repeated",
        "2x8 took 2.000 to 2.500 s: something else was running",
    ]
    assert remarks({"setting": "a", "error": "x"}) == []


# Processes


def tiny_main(tmp_path: Path, *told: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and results of the benchmark on the tiny shape."""
    found = tmp_path / "found.jsonl"
    small = ("--contexts", "100", "--requests", "3", "--prompt", "70", "--out", "6")
    more = ("--kv-gib", "0.1", "--batched-tokens", "128", "--json", str(found))
    status = bench.main([*told, *small, *more, "--tiny", "--layers", "2"])
    return status, [json.loads(line) for line in found.read_text().splitlines()]


def test_the_cpu_engine_answers_with_both_kinds_of_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ("--run", "gguf+eager,bf16+eager+mtp2", "--together", "2")
    told = ("--write", str(tmp_path / "tiny.gguf"), *run)
    status, results = tiny_main(tmp_path, *told, "--logs", str(tmp_path / "logs"))
    printed = capsys.readouterr().out
    assert status == 0, printed
    by_name = {one["setting"]: one for one in results}
    for one in by_name.values():
        # A uniform choice of 1,024 has -6.9, one that is certain 0.
        assert -6.5 < one["first_logprob"] < -1.0
        assert one["kv_tokens"] > 1000
        sizes = [(x["workload"]["requests"], len(x["tokens"])) for x in one["speeds"]]
        assert sizes == [(1, 1), (3, 3)]
        for speeds in one["speeds"]:
            assert speeds["prefill"] > 0
            assert speeds["repeatable"]
            assert {len(tokens) for tokens in speeds["tokens"]} == {6}
            assert len({*speeds["tokens"][0]}) > 2, "no token for ever"
    gguf_file, made_up = by_name["gguf+eager"], by_name["bf16+eager+mtp2"]
    assert gguf_file["speeds"][0]["digest"] != made_up["speeds"][0]["digest"]
    assert gguf_file["parameters_gib"] == pytest.approx(made_up["parameters_gib"])
    assert "| gguf+eager |" in printed
    assert "| bf16+eager+mtp2 |" in printed
    assert gguf_file["drafts"]["drafts"] == 0
    drafts = made_up["drafts"]
    assert drafts["draft_tokens"] == 2 * drafts["drafts"] > 0


def test_a_setting_that_fails_says_why(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(60))
    job = Job("gguf", str(bad), 1024, (Workload(1, 8),), LIMITS, 4, 1)
    found = bench.run_job(job, tmp_path, 120)
    assert found["error"].startswith("exit status 1; ")
    assert "bad.gguf" in found["error"]
    assert "Traceback" in found["log"]


@pytest.mark.parametrize(
    ("shell", "key", "message"),
    [
        (
            'cp found.json "$4"; echo "CudaError: full"; exit 3',
            "stopped",
            "exit status 3",
        ),
        ('cp found.json "$4"; exec sleep 60', "stopped", "no result within 1 s"),
        (
            'cp nothing.json "$4"; echo "CudaError: full"; exit 3',
            "error",
            "exit status 3",
        ),
        ("exec sleep 60", "error", "no result within 1 s; it printed nothing"),
    ],
    ids=["breaks", "hangs", "breaks at once", "hangs at once"],
)
def test_what_was_timed_before_the_end_counts(
    tmp_path: Path, shell: str, key: str, message: str
) -> None:
    some = result("bf16", 3.0, 3.0)
    for name, speeds in (("found", some["speeds"]), ("nothing", [])):
        text = json.dumps(some | {"speeds": speeds})
        (tmp_path / f"{name}.json").write_text(text)
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\ncd {tmp_path}\n{shell}\n")
    script.chmod(0o755)
    job = Job("bf16", "model", 1024, (Workload(2, 8),), LIMITS, 4, 1)
    with mock.patch.object(bench.sys, "executable", str(script)):
        found = bench.run_job(job, tmp_path, 1.0)
    assert message in found[key]
    assert found["process_s"] < 30, "what hangs is ended"
    assert ("CudaError: full" in found[key]) == ("exit status" in message)
    assert {"error", "stopped"} & found.keys() == {key}
    assert bool(found["speeds"]) == (key == "stopped")


def test_no_setting_starts_when_the_time_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, results = tiny_main(tmp_path, "--run", "bf16,bf16+fa", "--within", "1e-9")
    assert status == 1
    assert [one["error"] for one in results] == ["no time was left"] * 2
    assert "failed: no time was left" in capsys.readouterr().out


def test_a_wrong_name_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--run", "bf16+fast"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmarks.engine: error: bf16+fast: unknown word")
    with pytest.raises(SystemExit):
        bench.main([])
