# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Time the whole engine on a model of GLM-5's layer shapes, a few layers deep.

    python -m benchmarks.engine --write glm.gguf --run gguf,gguf+eager --json out.jsonl
    python -m benchmarks.engine --run backends,caches --contexts 4096,24000

A setting is words with + between them: weights (bf16, gguf), attention backend
(triton, flashmla, fa; else the selector's choice), cache (fp8, fp8_ds_mla; else that of
the activations), eager (else CUDA graphs), mtp1 to mtp7, indexer (triton_indexer,
deep_gemm; else the fork's choice); or the name of a group, see engine_settings.py. Each
runs in a process of its own. docs/engine.md explains the table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.engine_model import (
    MIXES,
    TINY,
    Shape,
    tensors,
    write_config,
    write_file,
)
from benchmarks.engine_run import Job, Workload, log_facts
from benchmarks.engine_settings import Limits, Setting, parse_settings
from benchmarks.engine_table import remarks, table

ROOT = Path(__file__).parents[1]
CACHE_GIB_TOGETHER = 4.0
MARGIN_TOKENS = 64
"""More than prompt and answer, which drafts may overrun."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write this GGUF")
    parser.add_argument("--types", choices=tuple(MIXES), default="mixed")
    parser.add_argument("--layers", type=int, default=4, help="the first is dense")
    parser.add_argument("--tiny", action="store_true", help="sizes to try on a CPU")
    parser.add_argument("--mtp", action="store_true", help="write an MTP block, too")
    parser.add_argument("--pattern", help="F or S per layer: own or shared indexer")
    parser.add_argument("--sizes", action="store_true", help="of tensors, not written")
    parser.add_argument("--run", metavar="NAMES", help="settings and groups, by commas")
    parser.add_argument("--file", type=Path, help="GGUF of gguf; default: --write")
    parser.add_argument("--contexts", default="4096,24000", help="prompts of 1 request")
    parser.add_argument(
        "--requests", type=int, default=32, help="at once, 0: leave out"
    )
    parser.add_argument("--prompt", type=int, default=4096, help="of each of them")
    parser.add_argument("--out", type=int, default=256, help="tokens to make")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--accepted", type=float, help="share of drafts, made up")
    parser.add_argument("--together", type=int, default=1, help="processes at once")
    parser.add_argument("--memory", type=float, default=0.9, help="of the GPU, in all")
    parser.add_argument("--kv-gib", type=float, help="default: what is left of it")
    parser.add_argument("--timeout", type=float, default=1800, help="s, of a process")
    parser.add_argument("--within", type=float, help="s, of all; the rest is left out")
    parser.add_argument("--json", type=Path, help="append results, one a line")
    parser.add_argument("--logs", type=Path, help="folder for what engines print")
    options = parser.parse_args(argv)
    if not (options.write or options.run or options.sizes):
        parser.error("nothing to do: give --write, --sizes or --run")
    options.file = options.file or options.write
    return options


def workloads(options: argparse.Namespace) -> tuple[Workload, ...]:
    """One request of each context, then many of one prompt."""
    alone = (
        Workload(1, int(tokens)) for tokens in options.contexts.split(",") if tokens
    )
    many = [Workload(options.requests, options.prompt)] if options.requests else []
    return (*alone, *many)


def limits(options: argparse.Namespace) -> Limits:
    """What the settings have in common; memory is shared evenly by `--together`."""
    work = workloads(options)
    kv_gib = options.kv_gib
    if kv_gib is None and options.together > 1:
        # Processes that start together cannot measure what is left.
        kv_gib = CACHE_GIB_TOGETHER
    return Limits(
        context=max(one.prompt for one in work) + options.out + MARGIN_TOKENS,
        requests=max(one.requests for one in work),
        batched_tokens=options.batched_tokens,
        memory_share=options.memory / options.together,
        kv_bytes=None if kv_gib is None else int(kv_gib * (1 << 30)),
        accepted=options.accepted,
    )


def shape(options: argparse.Namespace) -> Shape:
    return replace(
        TINY if options.tiny else Shape(),
        layers=options.layers,
        mtp=options.mtp,
        pattern=options.pattern,
    )


def jobs(options: argparse.Namespace, folder: Path) -> Iterator[Job]:
    """One for each setting; `folder` gets the configurations that they need.

    Raises:
        ValueError: a name is not a setting, or gguf was asked for without a file.
    """
    wanted: list[Setting] = parse_settings(options.run.split(","))
    common = limits(options)
    for setting in wanted:
        model = replace(shape(options), mtp=bool(setting.mtp))
        if setting.weights == "bf16":
            path = folder / f"config-mtp{int(model.mtp)}"
            if not path.exists():
                write_config(path, model)
        elif options.file is None:
            raise ValueError(f"{setting.name} needs a file: give --write or --file")
        else:
            path = options.file.absolute()
        yield Job(
            setting.name,
            str(path),
            model.vocab,
            workloads(options),
            common,
            options.out,
            options.repeats,
            str(folder / "lock") if options.together > 1 else None,
        )


def run_job(job: Job, folder: Path, timeout: float) -> dict[str, Any]:
    """The result of a process of its own; `error` is in it if that failed, `stopped`
    if it failed after some workloads were timed."""
    stem = job.setting.replace("+", "-")
    told, result, log = (folder / f"{stem}.{end}" for end in ("job", "json", "log"))
    job.write(told)
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.engine_run", str(told), str(result)]
    environment = os.environ | _environment(job)
    start = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            status: object = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = f"no result within {timeout:.0f} s"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    found: dict[str, Any] = {"setting": job.setting, "speeds": []}
    if result.exists():
        found = json.loads(result.read_text(encoding="utf-8")) | log_facts(text)
    if status != 0:
        reason = f"exit status {status}" if isinstance(status, int) else str(status)
        # With some workloads timed, those count.
        key = "stopped" if found["speeds"] else "error"
        found |= {key: f"{reason}; {_reason(text)}", "log": text[-8000:]}
    return found | {"process_s": time.monotonic() - start}


def _environment(job: Job) -> dict[str, str]:
    [setting] = parse_settings([job.setting])
    return setting.environment()


def _reason(log: str) -> str:
    """The last line of the log that tells an error, else the last one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line and "WARNING" not in line]
    return (errors or lines or ["it printed nothing"])[-1][:300]


def run_all(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The results of all settings in order; each is printed when it is there."""
    wanted = list(jobs(options, folder))
    end = time.monotonic() + (options.within or math.inf)

    def run(job: Job) -> dict[str, Any]:
        left = min(options.timeout, end - time.monotonic())
        if left > 0:
            return run_job(job, folder, left)
        return {"setting": job.setting, "error": "no time was left", "process_s": 0.0}

    found: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(options.together) as pool:
        running = [pool.submit(run, job) for job in wanted]
        for done in as_completed(running):
            result = done.result()
            found[result["setting"]] = result
            if options.json:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")
            print(f"{result['setting']}: {_summary(result)}", flush=True)
    return [found[job.setting] for job in wanted]


def _summary(result: dict[str, Any]) -> str:
    took = f"{result['process_s']:.0f} s in all"
    if "error" in result:
        return f"FAILED after {took}: {result['error']}"
    speeds = (
        f"{one['workload']['requests']}x{one['workload']['prompt']}"
        f" in {one['prefill']:,.0f}/s out {one['decode'] or 0:,.1f}/s"
        for one in result["speeds"]
    )
    return f"start {result['start_s']:.0f} s, {', '.join(speeds)}; {took}"


def print_sizes(options: argparse.Namespace) -> None:
    every = tensors(shape(options), MIXES[options.types])
    for tensor in every:
        print(
            f"{tensor.name!s:32s} {tensor.type!s:8s} {list(tensor.dims)!s:20s}"
            f" {tensor.nbytes:>14,}"
        )
    print(f"{len(every)} tensors, {sum(tensor.nbytes for tensor in every):,} bytes")


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if options.sizes:
        print_sizes(options)
    if options.write:
        start = time.monotonic()
        size = write_file(options.write, shape(options), MIXES[options.types])
        seconds = time.monotonic() - start
        print(f"{options.write}: {size:,} bytes in {seconds:.1f} s", flush=True)
    if not options.run:
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.logs or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            results = run_all(options, folder)
        except ValueError as error:
            print(f"benchmarks.engine: error: {error}", file=sys.stderr)
            return 2
    print(table(results, workloads(options)))
    for result in results:
        for text in remarks(result):
            print(f"{result['setting']}: {text}")
    failed = any({"error", "stopped"} & result.keys() for result in results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
