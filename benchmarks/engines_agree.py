# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""How far vLLM and llama.cpp lie from transformers on tiny files of each weight type.

transformers computes in float32 on the dequantized weights of the same file and is the
reference. The KL divergence (median and mean over positions, in nats) and the share of
equal best tokens are printed as a Markdown table, apart for positions within the
indexer's top-k, where attention is dense, and beyond it.

    python -m benchmarks.engines_agree --engines llamacpp vllm
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tests.helpers.metrics import agreement

WRITER = Path(__file__).parents[1] / "examples" / "tiny_glm_dsa.py"
TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K"),
    *("IQ4_XS", "IQ3_XXS", "IQ2_XS", "MXFP4", "mixed"),
)
TOP_K = 64
LENGTH = 321
PROMPTS = 2
# Positions after which the next token is predicted: 0-based, so 63 sees 64 tokens.
WITHIN = (*range(0, TOP_K, 4), TOP_K - 1)
BEYOND = tuple(range(TOP_K + 15, LENGTH - 1, 15))

Logprobs = np.ndarray  # float64 [prompts, positions, vocab]
Engine = Callable[[Path, list[list[int]], list[int]], Logprobs]


def by_transformers(
    path: Path, prompts: list[list[int]], positions: list[int]
) -> Logprobs:
    from tests.helpers.hf_reference import HfReference

    reference = HfReference(path)
    return np.stack([reference.logprobs(prompt)[positions] for prompt in prompts])


def by_llamacpp(path: Path, prompts: list[list[int]], positions: list[int]) -> Logprobs:
    from tests.helpers.llamacpp_reference import LlamaCpp

    beginnings = [prompt[: at + 1] for prompt in prompts for at in positions]
    rows = LlamaCpp(path).next_logprobs(beginnings)
    return rows.reshape(len(prompts), len(positions), -1)


def by_vllm(path: Path, prompts: list[list[int]], positions: list[int]) -> Logprobs:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(path),
        dtype="float32",
        max_model_len=1024,
        max_logprobs=-1,
        enforce_eager=True,
        enable_prefix_caching=False,
    )
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1),
    )
    return np.array(
        [[_row(output.prompt_logprobs, at) for at in positions] for output in outputs]
    )


def _row(prompt_logprobs: list[Any], at: int) -> list[float]:
    """Log-probabilities by token id after position `at`: entry `at` + 1 has them."""
    entries = sorted(prompt_logprobs[at + 1].items())
    return [entry.logprob for _, entry in entries]


ENGINES: dict[str, Engine] = {"llamacpp": by_llamacpp, "vllm": by_vllm}


def in_own_process(
    engine: Engine, path: Path, prompts: list[list[int]], positions: list[int]
) -> Logprobs:
    """Engines bring thread pools and global state that must not meet."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(engine, path, prompts, positions).result()


def compare(weight_type: str, engines: list[str], style: str) -> str:
    """One row of the table."""
    rng = np.random.default_rng(0)
    # The named tokens and padding rows at the end of the vocabulary are left out.
    prompts = rng.integers(0, 480, (PROMPTS, LENGTH)).tolist()
    positions = [*WITHIN, *BEYOND]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        command = [sys.executable, str(WRITER), str(path), "--type", weight_type]
        command += ["--shared-indexers", style]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        reference = in_own_process(by_transformers, path, prompts, positions)
        cells = [weight_type]
        for name in engines:
            found = in_own_process(ENGINES[name], path, prompts, positions)
            split = len(WITHIN)
            for part in (slice(split), slice(split, None)):
                result = agreement(reference[:, part], found[:, part])
                # Rounding makes the KL of equal distributions slightly negative.
                median, mean = max(result.median_kl, 0.0), max(result.mean_kl, 0.0)
                cells += [f"{median:.1e}", f"{mean:.1e}", f"{result.top1:.0%}"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--types", nargs="+", default=TYPES)
    parser.add_argument(
        "--engines", nargs="+", choices=tuple(ENGINES), default=["llamacpp"]
    )
    parser.add_argument("--shared-indexers", default="none")
    options = parser.parse_args()
    columns = ["type"]
    for name in options.engines:
        for part in (f"up to {TOP_K}", f"beyond {TOP_K}"):
            columns += [f"{name} {part}: median KL", "mean KL", "top-1"]
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|", flush=True)
    for weight_type in options.types:
        row = compare(weight_type, options.engines, options.shared_indexers)
        print(row, flush=True)


if __name__ == "__main__":
    main()
