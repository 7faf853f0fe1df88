# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Results of `benchmarks.engine` as tables beside those of the first setting."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from benchmarks.engine_run import Workload

Result = Mapping[str, Any]

# In warnings: something works, but not as fast as it could.
_SLOW = re.compile(
    r"slow|sub-?optimal|fall(ing|s)? ?back|not (available|supported|installed|found)"
    r"|disabl|eager|performance|default MoE config|without CUDA graph",
    re.I,
)
# About what the benchmark itself asks for.
_ASKED_FOR = re.compile(r"enforce.eager|skip_tokenizer_init", re.I)


def table(results: Sequence[Result], workloads: Sequence[Workload]) -> str:
    """Markdown, one row a result: memory and speeds, with the ratio to the first one.

    `first` and `alike` compare greedy tokens with the first result's: the share of
    requests with an equal first token, and the mean number of equal tokens at the
    beginning of an answer, of those that are kept.
    """
    columns = ["setting", "start s", "weights GiB", "KV tokens"]
    for workload in workloads:
        columns += [f"in/s {workload.name}", f"out/s {workload.name}"]
    columns += ["tokens a step", "first", "alike"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    good = [result for result in results if "error" not in result]
    for result in results:
        cells = [result["setting"]]
        if "error" in result:
            cells += [f"failed: {result['error']}"] + [""] * (len(columns) - 2)
        else:
            cells += _cells(result, good[0], workloads)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cells(
    result: Result, base: Result, workloads: Sequence[Workload]
) -> Iterator[str]:
    weights = result["weights_gib"] or result["parameters_gib"]
    yield f"{result['start_s']:.0f}"
    yield f"{weights:.2f}"
    yield f"{result['kv_tokens']:,}" if result["kv_tokens"] else ""
    for workload in workloads:
        for key in ("prefill", "decode"):
            speed, other = (speed_of(one, workload, key) for one in (result, base))
            yield cell(speed, None if result is base else other)
    yield f"{steps(result):.2f}" if result["drafts"]["drafts"] else ""
    if result is base:
        yield from ("", "")
    else:
        first, alike = equal_tokens(base, result)
        yield f"{first:.0%}"
        yield f"{alike:.1f}"


def speed_of(result: Result, workload: Workload, key: str) -> float | None:
    """Tokens per second, None if that was not measured."""
    for one in result["speeds"]:
        if Workload(**one["workload"]) == workload:
            speed: float | None = one[key]
            return speed
    return None


def cell(speed: float | None, base: float | None) -> str:
    """A speed, and in parentheses how many times the base it is."""
    if speed is None:
        return ""
    number = f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"
    return number if base is None else f"{number} ({speed / base:.2f})"


def steps(result: Result) -> float:
    """Mean number of tokens that a step of speculative decoding gives."""
    drafts = result["drafts"]
    made: int = drafts["accepted_tokens"]
    return 1 + made / drafts["drafts"] if drafts["drafts"] else 1.0


def equal_tokens(base: Result, result: Result) -> tuple[float, float]:
    """Share of requests with an equal first token, and mean length of equal beginnings.

    Near ties are decided by rounding, so that tokens of right engines differ here and
    there, and then all that follow.
    """
    # Both have the same workloads, but one may have stopped before the last.
    pairs = [
        (ours, theirs)
        for one, other in zip(result["speeds"], base["speeds"], strict=False)
        for ours, theirs in zip(one["tokens"], other["tokens"], strict=True)
    ]
    lengths = [
        sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(*pair, strict=True)))
        for pair in pairs
    ]
    return sum(map(bool, lengths)) / len(lengths), sum(lengths) / len(lengths)


def remarks(result: Result) -> list[str]:
    """What a reader must know of a result: slow ways taken, caches too small, noise."""
    if "error" in result:
        return []
    said = [f"stopped: {result['stopped']}"] if "stopped" in result else []
    said += [
        f"slow? {text}"
        for text in result["warnings"]
        if _SLOW.search(text) and not _ASKED_FOR.search(text)
    ]
    for one in result["speeds"]:
        workload = Workload(**one["workload"])
        needed = workload.requests * (workload.prompt + one["out"])
        if result["kv_tokens"] and needed > result["kv_tokens"]:
            said.append(
                f"{workload.name} needs {needed:,} tokens of cache and there are "
                f"{result['kv_tokens']:,}: requests waited"
            )
        if one["decode"] is None:
            said.append(f"{workload.name}: more tokens took no longer, out/s is noise")
        same = sum(len(set(tokens)) == 1 < len(tokens) for tokens in one["tokens"])
        if same:
            said.append(
                f"{workload.name}: {same} answers are one token again and again"
            )
        if not one["repeatable"]:
            said.append(f"{workload.name} gave other tokens when repeated")
        said += _spread(workload, one["seconds"])
    return said


def _spread(workload: Workload, seconds: Sequence[Sequence[float]]) -> Iterator[str]:
    """Repetitions that differ by more than a tenth; the first one compiles."""
    for times in seconds:
        later = times[1:]
        if len(later) > 1 and max(later) > 1.1 * min(later):
            yield (
                f"{workload.name} took {min(later):.3f} to {max(later):.3f} s: "
                "something else was running"
            )
