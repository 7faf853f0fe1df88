# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Start the engine with one setting and time it; `benchmarks.engine` starts this.

python -m benchmarks.engine_run JOB.json RESULT.json
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import random
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine_settings import (
    EMBEDDING_SPREAD,
    LOAD_FORMAT,
    Limits,
    parse_setting,
)

LINE_CHARS = 300
"""Of a line of the log, in the result."""
KEPT_TOKENS = 16
"""Of each answer, in the result."""
LOWEST_TOKEN = 300
# What the engine says at start that belongs to a result: the choice of kernels.
_CHOICES = re.compile(
    r"attention backend|MLA_SPARSE|DSA indexer|MoE backend|DeepGEMM|CUDA ?graph"
    r"|Model Runner|async",
    re.I,
)
# "(EngineCore pid=7) WARNING 11-30 20:30:58 [mla_attention.py:622] ..."
_LINE = re.compile(r"(INFO|WARNING|ERROR) \d\d-\d\d [\d:]{8} \[\S+\] (.*)")
_PYTHON_WARNING = re.compile(r"^\S+:\d+: (\w*Warning: .*)", re.M)
_LOADED = re.compile(r"Model loading took ([\d.]+) GiB memory and ([\d.]+) seconds")
_CACHE = re.compile(r"KV cache size: ([\d,]+) tokens")

Tokens = list[list[int]]
Generate = Callable[[Tokens, int], Tokens]
"""Prompts and the number of tokens to make for each -> those tokens."""


@dataclass(frozen=True)
class Workload:
    """So many requests at once, each with a prompt of so many tokens."""

    requests: int
    prompt: int

    @property
    def name(self) -> str:
        return f"{self.requests}x{self.prompt}"


@dataclass(frozen=True)
class Job:
    """What one process is told. `model` is the GGUF file, or the directory of a
    configuration; `lock` a file that processes which run together have in common."""

    setting: str
    model: str
    vocab: int
    workloads: tuple[Workload, ...]
    limits: Limits
    out: int
    repeats: int
    lock: str | None = None

    @staticmethod
    def read(path: Path) -> Job:
        told = json.loads(path.read_text(encoding="utf-8"))
        told["workloads"] = tuple(Workload(**one) for one in told["workloads"])
        return Job(**{**told, "limits": Limits(**told["limits"])})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


@dataclass
class Speeds:
    """Of one workload: tokens per second of all requests together.

    `decode` is that of all tokens but the first of each request. `tokens` is the
    beginning of every answer, `digest` a hash of all of them; `repeatable` tells
    whether each repetition gave the same. `seconds` are those of runs that make one
    token, then of those that make `out`.
    """

    workload: Workload
    out: int
    prefill: float
    decode: float | None
    digest: str
    repeatable: bool
    tokens: Tokens
    seconds: tuple[list[float], list[float]]


def log_facts(log: str) -> dict[str, Any]:
    """What only the engine's log tells: numbers, choices of kernels, warnings.

    A number that is not there is None. vLLM takes handlers off its loggers when it
    starts, so this reads what it printed.
    """
    said = [match.groups() for match in _LINE.finditer(log)]
    texts = dict.fromkeys(text[:LINE_CHARS] for _, text in said)
    warned = (text for level, text in said if level != "INFO")
    loaded, tokens = _LOADED.search(log), _CACHE.search(log)
    return {
        "weights_gib": float(loaded[1]) if loaded else None,
        "load_s": float(loaded[2]) if loaded else None,
        "kv_tokens": int(tokens[1].replace(",", "")) if tokens else None,
        "choices": [text for text in texts if _CHOICES.search(text)],
        "warnings": list(dict.fromkeys((*warned, *_PYTHON_WARNING.findall(log)))),
    }


def prompts(workload: Workload, vocab: int) -> Tokens:
    """The same random tokens in every run; no named ones and no single bytes."""
    rng = random.Random(workload.name)
    top = vocab - 60
    return [
        [rng.randrange(LOWEST_TOKEN, top) for _ in range(workload.prompt)]
        for _ in range(workload.requests)
    ]


def measure(
    generate: Generate,
    workload: Workload,
    vocab: int,
    *,
    out: int,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Speeds:
    """Time `workload` with one token out and with `out`; the best of `repeats` counts.

    The first repetition compiles what was not compiled at start.
    """
    given = prompts(workload, vocab)

    def timed(count: int) -> tuple[list[float], list[Tokens]]:
        seconds, made = [], []
        for _ in range(repeats):
            start = clock()
            made.append(generate(given, count))
            seconds.append(clock() - start)
        return seconds, made

    (short, _), (long, answers) = timed(1), timed(out)
    decoding = min(long) - min(short)
    last = answers[-1]
    return Speeds(
        workload,
        out,
        prefill=workload.requests * workload.prompt / min(short),
        # Noise can make the longer run the shorter one; then there is no speed.
        decode=workload.requests * (out - 1) / decoding if decoding > 0 else None,
        digest=digest(last),
        repeatable=all(answer == last for answer in answers),
        tokens=[tokens[:KEPT_TOKENS] for tokens in last],
        seconds=(short, long),
    )


def digest(answers: Tokens) -> str:
    """Twelve hexadecimal digits that differ for different tokens."""
    return hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:12]


@contextmanager
def holding(path: str | None, *, alone: bool) -> Iterator[None]:
    """Wait for the lock: many may start engines together, or one may time alone."""
    if path is None:
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def register_random_weights() -> None:
    """Make `LOAD_FORMAT` known: normal weights that keep the size of activations.

    vLLM's own dummy weights are so small that the router's bias chooses the same
    experts for every token, and that attention does not change the next token.
    """
    import torch

    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class RandomWeights(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            for name, parameter in model.named_parameters():
                if parameter.is_floating_point():
                    fill(name, parameter.data)

    register_model_loader(LOAD_FORMAT)(RandomWeights)


def fill(name: str, parameter: Any) -> None:
    """Fill one parameter, a tensor; the values depend on its name and shape only."""
    import torch

    generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
    if parameter.ndim < 2:
        # Norms are near 1, biases near 0.
        centre = 0.0 if "bias" in name else 1.0
        parameter.normal_(centre, 0.01, generator=generator)
        return
    columns = parameter.shape[-1]
    spread = EMBEDDING_SPREAD if "embed_tokens" in name else 1 / math.sqrt(columns)
    parameter.normal_(0.0, spread, generator=generator)


def run(job: Job) -> Iterator[dict[str, Any]]:
    """Start the engine and time every workload.

    Yields all that was found so far, but for what is in the log: before the first
    workload and after each one.
    """
    from vllm import LLM

    setting = parse_setting(job.setting)
    options = setting.options(Path(job.model), job.limits)
    if setting.weights == "bf16":
        register_random_weights()
    with holding(job.lock, alone=False):
        start = time.perf_counter()
        llm = LLM(**options)
        start_s = time.perf_counter() - start
    speeds: list[dict[str, Any]] = []
    found = {
        "setting": job.setting,
        "options": options,
        "environment": setting.environment(),
        "versions": versions(),
        "start_s": start_s,
        "parameters_gib": sum(llm.apply_model(_parameter_bytes)) / (1 << 30),
        "speeds": speeds,
    }
    with holding(job.lock, alone=True):
        found["first_logprob"] = first_logprob(llm, job.vocab, 1 if setting.mtp else 4)
        before = _drafts(llm)
        yield found | _counters(llm, before)
        for workload in job.workloads:
            one = measure(
                partial(generate, llm),
                workload,
                job.vocab,
                out=job.out,
                repeats=job.repeats,
            )
            speeds.append(asdict(one))
            yield found | _counters(llm, before)


def generate(llm: Any, given: Tokens, count: int) -> Tokens:
    """The `count` likeliest tokens after each prompt, no matter what ends a text."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, detokenize=False
    )
    inputs = [{"prompt_token_ids": tokens} for tokens in given]
    made = llm.generate(inputs, params, use_tqdm=False)
    return [list(request.outputs[0].token_ids) for request in made]


def first_logprob(llm: Any, vocab: int, count: int) -> float:
    """Log-probability of the likeliest token after a short prompt.

    Raises:
        ValueError: it, or that of one of the next `count` tokens, is not a number, so
            that nothing that follows means anything.
    """
    from vllm import SamplingParams

    [prompt] = prompts(Workload(1, 64), vocab)
    params = SamplingParams(
        temperature=0, max_tokens=count, logprobs=1, detokenize=False
    )
    [request] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    best = [
        max(one.logprob for one in entries.values())
        for entries in request.outputs[0].logprobs
    ]
    if not all(map(math.isfinite, best)):
        raise ValueError(
            f"log-probabilities are {best}; expected finite numbers: the weights or a "
            "kernel are wrong, and speeds would mean nothing"
        )
    return float(best[0])


def versions() -> dict[str, str]:
    import torch

    import vllm

    found = {"vllm": vllm.__version__, "torch": torch.__version__, "device": "cpu"}
    if torch.cuda.is_available():
        import triton

        found |= {
            "device": torch.cuda.get_device_name(),
            "triton": triton.__version__,
        }
    return found


def _parameter_bytes(model: Any) -> int:
    return sum(one.numel() * one.element_size() for one in model.parameters())


def _counters(llm: Any, before: dict[str, int]) -> dict[str, Any]:
    """Drafts since `before`, and the most memory that was taken, None on a CPU."""
    import torch

    peak = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None
    return {
        "peak_gib": peak / (1 << 30) if peak is not None else None,
        "drafts": {key: count - before[key] for key, count in _drafts(llm).items()},
    }


def _drafts(llm: Any) -> dict[str, int]:
    """Counters of speculation since the start, zeros without it."""
    counts = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 0)
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_num_")
        if name in counts:
            counts[name] += int(metric.value)
    return counts


def main() -> None:
    job, result = map(Path, sys.argv[1:])
    part = result.with_suffix(".part")
    for found in run(Job.read(job)):
        part.write_text(json.dumps(found), encoding="utf-8")
        part.replace(result)


if __name__ == "__main__":
    main()
