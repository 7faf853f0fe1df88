# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""One way of spreading a model over a machine: what it takes, and whether it fits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vllm.transformers_utils.gguf.doctor import memory
from vllm.transformers_utils.gguf.doctor.engine import Attention
from vllm.transformers_utils.gguf.doctor.machine import GIB, Machine
from vllm.transformers_utils.gguf.doctor.memory import CacheFormat, Load
from vllm.transformers_utils.gguf.doctor.split import Split
from vllm.transformers_utils.gguf.doctor.weights import (
    StageWeights,
    Storage,
    stage_weights,
)
from vllm.transformers_utils.gguf.plan import LoadPlan

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
CACHE_OPTIONS = {
    "cuda": ("auto", "bfloat16", "fp8", "fp8_ds_mla"),
    "cpu": ("auto", "bfloat16", "float16"),
}
# Tried in this order where the user left the cache open.
_PREFERRED = ("auto", "fp8_ds_mla", "fp8")
# Memory that is neither weights, cache nor computed here. See docs/design/doctor.md.
OVERHEAD = {"cuda": 4 * GIB, "cpu": int(0.65 * GIB)}


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for; None and 0 leave it open.

    `length` is --max-model-len, `cache_memory` --kv-cache-memory-bytes, `draft_tokens`
    the number of tokens that the MTP block drafts. `keep_blocks` asks for
    --quantization gguf_native, which is the default on GPUs.
    """

    tensor: int | None = None
    pipeline: int | None = None
    experts: bool = False
    length: int | None = None
    cache_dtype: str | None = None
    dtype: str = "bfloat16"
    keep_blocks: bool = False
    draft_tokens: int = 0
    utilization: float = 0.92
    cache_memory: int | None = None
    batched_tokens: int | None = None
    overhead: int | None = None
    tokenizer: str | None = None


@dataclass(frozen=True, slots=True)
class CacheRow:
    """What one value of --kv-cache-dtype gives.

    `token_bytes` is per token on the fullest stage. `tokens` is the capacity that
    vLLM's log would tell at the chosen length, `longest` the longest request.
    """

    attention: Attention
    format: CacheFormat | None
    token_bytes: int
    tokens: int
    longest: int


@dataclass(slots=True)
class Trial:
    """A split, what its ranks hold, and what is wrong with it.

    `length` and `option` are what would be served; None if nothing fits.
    """

    split: Split
    weights: tuple[StageWeights, ...]
    buffers: dict[str, int] = field(default_factory=dict)
    overhead: int = 0
    budget: int = 0
    caches: tuple[CacheRow, ...] = ()
    option: str | None = None
    length: int | None = None
    errors: list[str] = field(default_factory=list)

    @property
    def chosen(self) -> CacheRow | None:
        return next(
            (row for row in self.caches if row.attention.option == self.option), None
        )


class Trier:
    """Tries splits of one model on one machine; `select` tells the attention backend
    for a split and a value of --kv-cache-dtype."""

    def __init__(
        self,
        plan: LoadPlan,
        machine: Machine,
        request: Request,
        select: Callable[[Split, str], Attention],
    ) -> None:
        self._plan = plan
        self._config = plan.config
        self._machine = machine
        self._request = request
        self._select = select
        self._drafts = request.draft_tokens > 0
        keep = request.keep_blocks or machine.kind == "cuda"
        self._storage = Storage(keep, DTYPE_BYTES[request.dtype])
        self._block = memory.BLOCK_TOKENS[machine.kind]
        self._expert_blocks = keep and any(
            weight.blocks and weight.kind == "experts" for weight in plan.main
        )

    def try_split(self, split: Split, errors: list[str]) -> Trial:
        """What `split` gives. `errors` tell why it cannot run at all, if so."""
        if errors:
            return Trial(split, (), errors=errors)
        weights = stage_weights(self._plan, split, self._storage, drafts=self._drafts)
        overhead = self._request.overhead
        # An explicit size of the cache makes vLLM ignore the utilization.
        explicit = self._request.cache_memory is not None
        utilization = 1.0 if explicit else self._request.utilization
        trial = Trial(
            split,
            weights,
            overhead=OVERHEAD[self._machine.kind] if overhead is None else overhead,
            budget=int(self._machine.memory * utilization),
        )
        attention = {option: self._select(split, option) for option in self._options()}
        self._choose(trial, attention)
        length = trial.length or self._request.length or self._block
        trial.caches = tuple(
            self._row(trial, found, length) for found in attention.values()
        )
        chosen = attention[trial.option or self._request.cache_dtype or "auto"]
        trial.buffers = self._buffers(split, length, chosen)
        return trial

    def _options(self) -> tuple[str, ...]:
        options = CACHE_OPTIONS[self._machine.kind]
        wanted = self._request.cache_dtype
        return options if wanted in (None, *options) else (*options, str(wanted))

    def _choose(self, trial: Trial, attention: Mapping[str, Attention]) -> None:
        """Set option and length of `trial`, or add what is wrong."""
        wanted = self._request.cache_dtype
        options = [wanted] if wanted else [o for o in _PREFERRED if o in attention]
        usable = [option for option in options if attention[option].cache is not None]
        if not usable:
            trial.errors.append(_no_backend(attention[options[0]]))
            return
        asked = self._request.length
        context = self._config.max_position_embeddings
        if asked is not None and asked > context:
            trial.errors.append(
                f"--max-model-len {asked} is more than the {context} of the file"
            )
            return
        for option in usable:
            longest = self._longest(trial, attention[option], asked or context)
            if longest and (asked is None or longest >= asked):
                trial.option = option
                trial.length = asked or _rounded(longest, context, self._block)
                return
        trial.errors.append(self._no_memory(trial, attention[usable[-1]]))

    def _longest(self, trial: Trial, attention: Attention, limit: int) -> int:
        """The largest --max-model-len up to `limit` of which one request fits."""
        # Beyond 256k vLLM makes its workspace smaller, so each side has its own limit.
        turn = memory.LONG_CONTEXT
        for low, high in ((turn + 1, limit), (1, min(limit, turn))):
            if low > high or not self._fits(trial, attention, low):
                continue
            while low < high:
                middle = (low + high + 1) // 2
                if self._fits(trial, attention, middle):
                    low = middle
                else:
                    high = middle - 1
            return low
        return 0

    def _fits(self, trial: Trial, attention: Attention, length: int) -> bool:
        blocks = self._blocks(trial, attention, length)
        return memory.longest_request(blocks, self._block) >= length

    def _row(self, trial: Trial, attention: Attention, length: int) -> CacheRow:
        if attention.cache is None:
            return CacheRow(attention, None, 0, 0, 0)
        cache = self._format(attention)
        blocks = self._blocks(trial, attention, length)
        context = self._config.max_position_embeddings
        return CacheRow(
            attention,
            cache,
            max(self._token_bytes(trial.split, cache)),
            memory.capacity(blocks, self._block, length),
            self._longest(trial, attention, context),
        )

    def _blocks(self, trial: Trial, attention: Attention, length: int) -> int:
        cache = self._format(attention)
        per_token = self._token_bytes(trial.split, cache)
        room = self.available(trial, attention, length)
        return memory.count_blocks(room, per_token, self._block)

    def available(
        self, trial: Trial, attention: Attention, length: int
    ) -> tuple[int, ...]:
        """Bytes for the cache on each stage."""
        explicit = self._request.cache_memory
        rest = sum(self._buffers(trial.split, length, attention).values())
        free = tuple(
            trial.budget - stage.total - rest - trial.overhead
            for stage in trial.weights
        )
        if explicit is None:
            return free
        return tuple(explicit if explicit <= room else 0 for room in free)

    def _buffers(
        self, split: Split, length: int, attention: Attention
    ) -> dict[str, int]:
        if attention.cache is None:
            return {}
        machine, request = self._machine, self._request
        load = Load(
            length,
            request.batched_tokens or memory.default_batched_tokens(machine),
            self._storage.dtype_bytes,
            attention.backend,
            self._format(attention),
            self._expert_blocks,
        )
        return memory.buffers(
            self._config, machine.kind, split, load, drafts=self._drafts
        )

    def _format(self, attention: Attention) -> CacheFormat:
        assert attention.cache is not None
        return memory.cache_format(
            self._config,
            self._machine.kind,
            attention.cache,
            self._storage.dtype_bytes,
        )

    def _token_bytes(self, split: Split, cache: CacheFormat) -> tuple[int, ...]:
        return memory.token_bytes(self._config, split, cache, drafts=self._drafts)

    def _no_memory(self, trial: Trial, attention: Attention) -> str:
        context = self._config.max_position_embeddings
        length = self._request.length or self._block
        rest = sum(self._buffers(trial.split, length, attention).values())
        worst = max(stage.total for stage in trial.weights)
        need = (worst + rest + trial.overhead) / GIB
        where = "each GPU" if self._machine.kind == "cuda" else "the host"
        longest = self._longest(trial, attention, context)
        if longest:
            return (
                f"--max-model-len {length} does not fit: the longest that does is "
                f"{longest}, with --kv-cache-dtype {attention.option}"
            )
        return (
            f"{trial.split.name} does not fit: {where} needs {need:.1f} GiB without "
            f"any cache, of which weights are {worst / GIB:.1f}, and has "
            f"{trial.budget / GIB:.1f} to use"
        )


def _rounded(longest: int, context: int, block: int) -> int:
    """A length that is easy to type, with a little room for what was not foreseen."""
    if longest >= context:
        return context
    step = 1024 if longest >= 8192 else block
    return longest // step * step or longest


def _no_backend(attention: Attention) -> str:
    reasons = "; ".join(
        f"{name}: {', '.join(why)}" for name, why in attention.rejected.items()
    )
    return (
        f"no attention backend takes --kv-cache-dtype {attention.option} here "
        f"({reasons})"
    )
