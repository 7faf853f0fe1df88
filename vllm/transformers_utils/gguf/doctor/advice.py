# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What to tell the user beyond the facts: problems, warnings, and the command."""

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from vllm.transformers_utils.gguf.doctor.contents import UNUSED_KIND, Contents
from vllm.transformers_utils.gguf.doctor.engine import Indexer
from vllm.transformers_utils.gguf.doctor.layers import FLOAT_TYPES, LayerPath
from vllm.transformers_utils.gguf.doctor.machine import GIB, Machine
from vllm.transformers_utils.gguf.doctor.trial import Request, Trial

PARTITION = "VLLM_PP_LAYER_PARTITION"
LEVELS = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """`level` is "error" if it keeps the model from running."""

    level: Literal["error", "warning", "note"]
    text: str


def serve_command(path: str, machine: Machine, request: Request, trial: Trial) -> str:
    """The command line that serves the file as it was found to fit."""
    split, chosen = trial.split, trial.chosen
    words = ["vllm", "serve", path]
    if request.tokenizer:
        words += ["--tokenizer", request.tokenizer]
    if machine.kind == "cpu" and request.keep_blocks:
        words += ["--quantization", "gguf_native"]
    if split.tensor > 1:
        words += ["--tensor-parallel-size", str(split.tensor)]
    if split.pipeline > 1:
        words += ["--pipeline-parallel-size", str(split.pipeline)]
    if split.experts:
        words.append("--enable-expert-parallel")
    words += ["--max-model-len", str(trial.length)]
    if chosen is not None and chosen.attention.option != "auto":
        words += ["--kv-cache-dtype", chosen.attention.option]
    words += _given_options(request)
    prefix = ""
    if split.pipeline > 1 and PARTITION not in os.environ:
        prefix = f"{PARTITION}={','.join(map(str, split.layers))} "
    return prefix + shlex.join(words)


def _given_options(request: Request) -> Iterator[str]:
    if request.dtype != "bfloat16":
        yield from ("--dtype", request.dtype)
    if request.utilization != Request().utilization:
        yield from ("--gpu-memory-utilization", str(request.utilization))
    if request.cache_memory is not None:
        yield from ("--kv-cache-memory-bytes", str(request.cache_memory))
    if request.batched_tokens is not None:
        yield from ("--max-num-batched-tokens", str(request.batched_tokens))
    if request.draft_tokens:
        method = {"method": "mtp", "num_speculative_tokens": request.draft_tokens}
        yield from ("--speculative-config", json.dumps(method))


def file_findings(contents: Contents, drafts: bool) -> Iterator[Finding]:
    """What there is to say about the file alone."""
    unused = sum(row.bytes for row in contents.quantization if row.kind == UNUSED_KIND)
    if unused:
        yield Finding(
            "note",
            f"{unused / GIB:.2f} GiB of the file are not loaded: copies of indexers "
            "on layers that share one, and the like",
        )
    if contents.mtp_layers and not drafts:
        yield Finding(
            "note",
            "the MTP block is not loaded unless it drafts; --mtp 1 shows what that "
            "takes",
        )


def machine_findings(
    machine: Machine,
    request: Request,
    trial: Trial,
    indexer: Indexer | None,
    paths: Sequence[LayerPath],
) -> Iterator[Finding]:
    """What keeps the model from running on the machine, or should be known."""
    for text in trial.errors:
        yield Finding("error", text)
    if indexer is not None and indexer.path is None:
        yield Finding("error", f"no indexer runs here: {indexer.reason}")
    if machine.kind == "cuda":
        yield from _gpu_findings(machine, trial, indexer)
    elif not request.keep_blocks and any(set(p.types) - FLOAT_TYPES for p in paths):
        yield Finding(
            "note",
            "the CPU computes on dequantized weights; --quantization gguf_native keeps "
            "the blocks, which takes less memory and more time",
        )
    if trial.weights and request.overhead is None:
        parts = {
            "cpu": "the process itself",
            "cuda": "CUDA context, NCCL, activations and graphs, and were not measured",
        }
        yield Finding(
            "note",
            f"{trial.overhead / GIB:.2f} GiB are assumed for {parts[machine.kind]}; "
            "--overhead changes that",
        )


def _gpu_findings(
    machine: Machine, trial: Trial, indexer: Indexer | None
) -> Iterator[Finding]:
    if indexer is None:
        yield Finding(
            "warning",
            "which backend and indexer run was not told: "
            + (
                "--capability X.Y gives the compute capability"
                if machine.capability is None
                else "the CPU build has no GPU selector, the CUDA build's doctor has"
            ),
        )
    if not machine.here and any(row.attention.rejected for row in trial.caches):
        yield Finding(
            "note",
            "this was asked where these GPUs are not: a backend that was rejected for "
            "a missing package or device may be preferred there",
        )
    chosen = trial.chosen
    if chosen is not None and chosen.format is not None:
        quantized = chosen.format.name != "model"
        if chosen.attention.option == "auto" and quantized:
            yield Finding(
                "note",
                f"--kv-cache-dtype auto means {chosen.format.name} for "
                f"{chosen.attention.backend} here",
            )
