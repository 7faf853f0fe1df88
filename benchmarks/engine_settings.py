# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The settings of the engine that `benchmarks.engine` compares, by name.

A name is words with + between them, weights first: bf16+triton+fp8_ds_mla+mtp3.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOAD_FORMAT = "random_weights"
"""Of weights that are made up, see `benchmarks.engine_run`."""

EMBEDDING_SPREAD = 0.1
"""Of embeddings: as little as one layer's attention adds, so that it is heard."""

WEIGHTS = ("bf16", "gguf")
BACKENDS = {
    "triton": "TRITON_MLA_SPARSE",
    "flashmla": "FLASHMLA_SPARSE",
    "fa": "FLASH_ATTN_MLA_SPARSE",
    "flashinfer": "FLASHINFER_MLA_SPARSE",
    "flashinfer_sm120": "FLASHINFER_MLA_SPARSE_SM120",
}
CACHES = ("fp8", "fp8_ds_mla")
DRAFTS = {f"mtp{count}": count for count in range(1, 8)}
INDEXERS = {"triton_indexer": "triton", "deep_gemm": "deep_gemm"}

# In place of a name.
GROUPS = {
    "backends": ("bf16", "bf16+triton", "bf16+flashmla", "bf16+fa"),
    "caches": (
        *("bf16+flashmla", "bf16+flashmla+fp8_ds_mla"),
        *("bf16+triton", "bf16+triton+fp8", "bf16+triton+fp8_ds_mla"),
    ),
    "modes": ("bf16", "bf16+eager", "bf16+triton", "bf16+triton+eager"),
    "drafts": ("bf16", "bf16+mtp1", "bf16+mtp3", "bf16+mtp5"),
    "triton_drafts": (
        *("bf16+triton", "bf16+triton+mtp1"),
        *("bf16+triton+mtp3", "bf16+triton+mtp5"),
    ),
    "indexers": ("bf16+deep_gemm", "bf16+triton_indexer"),
    "gguf_modes": ("gguf", "gguf+eager", "gguf+triton"),
}


@dataclass(frozen=True)
class Setting:
    """How the engine runs. None leaves a choice to it.

    `mtp` is the number of drafted tokens; without `eager` it captures CUDA graphs.
    """

    name: str
    weights: str
    backend: str | None = None
    cache: str = "auto"
    eager: bool = False
    mtp: int = 0
    indexer: str | None = None

    def environment(self) -> dict[str, str]:
        """Variables that must be set before the engine starts."""
        variables = {
            # In one process, so that its memory and its log can be read.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if self.indexer is not None:
            variables["VLLM_DSA_INDEXER"] = self.indexer
        return variables

    def options(self, model: Path, limits: Limits) -> dict[str, Any]:
        """Arguments of `vllm.LLM` for `model`, a GGUF file or a model directory."""
        made: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "dtype": limits.dtype,
            "kv_cache_dtype": self.cache,
            "enforce_eager": self.eager,
            "max_model_len": limits.context,
            "max_num_seqs": limits.requests,
            "max_num_batched_tokens": limits.batched_tokens,
            "gpu_memory_utilization": limits.memory_share,
            # A prompt is given several times and must be computed each time.
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            "seed": 0,
        }
        if self.weights == "bf16":
            made["load_format"] = LOAD_FORMAT
        if self.backend is not None:
            made["attention_backend"] = self.backend
        if limits.kv_bytes is not None:
            made["kv_cache_memory_bytes"] = limits.kv_bytes
        if self.mtp:
            made["speculative_config"] = self._speculation(limits)
        return made

    def _speculation(self, limits: Limits) -> dict[str, Any]:
        made: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": self.mtp}
        if limits.accepted is not None:
            made["rejection_sample_method"] = "synthetic"
            made["synthetic_acceptance_length"] = 1 + limits.accepted * self.mtp
        return made


@dataclass(frozen=True)
class Limits:
    """What all settings of a comparison have in common.

    `context`, `requests` and `batched_tokens` are in tokens and requests;
    `memory_share` is the part of the GPU's memory that an engine may take, and
    `kv_bytes` what of it is the cache, None for all that is left. `accepted` is the
    share of drafted tokens that a sampler takes without looking at them, None to look.
    """

    context: int
    requests: int
    batched_tokens: int = 8192
    memory_share: float = 0.9
    kv_bytes: int | None = None
    accepted: float | None = None
    dtype: str = "bfloat16"


def parse_setting(name: str) -> Setting:
    """The setting called `name`.

    Raises:
        ValueError: a word is unknown, or says again what another one said.
    """
    weights, *words = name.split("+")
    if weights not in WEIGHTS:
        raise ValueError(
            f"{name}: begins with {weights!r}; expected {' or '.join(WEIGHTS)}, or "
            f"all of it one of {', '.join(GROUPS)}"
        )
    said: dict[str, Any] = {}
    for word in words:
        field, value = _meaning(name, word)
        if field in said:
            raise ValueError(f"{name}: {word!r} repeats or contradicts another word")
        said[field] = value
    return Setting(name, weights, **said)


def _meaning(name: str, word: str) -> tuple[str, Any]:
    """The field of `Setting` that `word` sets, and its value."""
    tables: dict[str, dict[str, Any]] = {
        "backend": BACKENDS,
        "mtp": DRAFTS,
        "indexer": INDEXERS,
    }
    for field, table in tables.items():
        if word in table:
            return field, table[word]
    if word in CACHES:
        return "cache", word
    if word == "eager":
        return "eager", True
    known = (*BACKENDS, *CACHES, "eager", *DRAFTS, *INDEXERS)
    raise ValueError(f"{name}: unknown word {word!r}; expected {', '.join(known)}")


def parse_settings(names: Iterable[str]) -> list[Setting]:
    """The settings that `names` of settings and groups stand for, each once, in order.

    Raises:
        ValueError: as `parse_setting`.
    """
    every = (one for name in names for one in GROUPS.get(name, (name,)))
    return [parse_setting(name) for name in dict.fromkeys(every)]
