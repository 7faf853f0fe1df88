# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""A diagnosis as text for people, and as JSON. docs/doctor.md describes both."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from vllm.transformers_utils.gguf.doctor.contents import Contents
from vllm.transformers_utils.gguf.doctor.diagnosis import DegreeRow, Diagnosis
from vllm.transformers_utils.gguf.doctor.machine import GIB
from vllm.transformers_utils.gguf.doctor.trial import CacheRow, Trial

SCHEMA = 1
"""Raised when a field changes its meaning or goes."""

_WIDTH = 88


def as_text(diagnosis: Diagnosis) -> str:
    """All of it, a section for each question."""
    sections = [
        list(_contents(diagnosis.contents)),
        list(_quantization(diagnosis.contents)),
        list(_degrees(diagnosis.degrees)),
    ]
    if diagnosis.machine is not None and diagnosis.trial is not None:
        sections += [
            list(_machine(diagnosis)),
            list(_memory(diagnosis.trial)),
            list(_caches(diagnosis.trial)),
            list(_paths(diagnosis)),
        ]
    sections.append([f"{item.level}: {item.text}" for item in diagnosis.findings])
    sections.append(list(_verdict(diagnosis)))
    wrapped = ["\n".join(_wrap(section)) for section in sections if section]
    return "\n\n".join(wrapped) + "\n"


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The same, of plain types: docs/doctor.md lists the fields."""
    trial = diagnosis.trial
    contents = asdict(diagnosis.contents)
    contents["shares_indexers"] = diagnosis.contents.shares_indexers
    return {
        "schema": SCHEMA,
        "path": diagnosis.path,
        "runs": diagnosis.runs,
        "command": diagnosis.command,
        "findings": [asdict(item) for item in diagnosis.findings],
        "contents": contents,
        "degrees": [asdict(row) for row in diagnosis.degrees],
        "layers": [asdict(row) for row in diagnosis.paths],
        "machine": asdict(diagnosis.machine) if diagnosis.machine else None,
        "indexer": asdict(diagnosis.indexer) if diagnosis.indexer else None,
        "split": asdict(trial.split) if trial else None,
        "memory": _memory_json(trial) if trial else None,
        "caches": [_cache_json(row, trial) for row in trial.caches] if trial else [],
    }


def error_json(path: str, message: str) -> dict[str, Any]:
    """What there is to say about a file that cannot be read."""
    return {
        "schema": SCHEMA,
        "path": path,
        "runs": False,
        "command": None,
        "findings": [{"level": "error", "text": message}],
    }


def _memory_json(trial: Trial) -> dict[str, Any]:
    return {
        "budget_bytes": trial.budget,
        "overhead_bytes": trial.overhead,
        "buffers_bytes": trial.buffers,
        "stages": [
            {"weights_bytes": stage.total, "parts_bytes": stage.parts}
            for stage in trial.weights
        ],
        "max_model_len": trial.length,
    }


def _cache_json(row: CacheRow, trial: Trial) -> dict[str, Any]:
    return {
        "option": row.attention.option,
        "chosen": row.attention.option == trial.option,
        "backend": row.attention.backend,
        "format": row.format.name if row.format else None,
        "token_bytes": row.token_bytes,
        "attention_bytes": row.format.attention_bytes if row.format else 0,
        "index_bytes": row.format.index_bytes if row.format else 0,
        "tokens": row.tokens,
        "longest_request": row.longest,
        "rejected": {name: list(why) for name, why in row.attention.rejected.items()},
    }


def _contents(contents: Contents) -> Iterator[str]:
    name = f", named {contents.name!r}" if contents.name else ""
    count = len(contents.files)
    yield (
        f"model     {contents.family}{name}; {_parameters(contents.parameters)} "
        f"parameters, {_gib(contents.total_bytes)} in {count} "
        + ("file" if count == 1 else "files")
    )
    moe = contents.hidden_layers - contents.dense_layers
    mtp = "with an MTP block" if contents.mtp_layers else "without an MTP block"
    yield (
        f"layers    {contents.hidden_layers}: {contents.dense_layers} dense, {moe} "
        f"with {contents.experts} experts of which {contents.experts_used} run; {mtp}"
    )
    if contents.shares_indexers:
        owners = f"in {len(contents.indexer_layers)} layers, shared by the others"
        owners += f": {_ranges(contents.indexer_layers)}"
    else:
        owners = "in every layer"
    yield f"indexer   {owners}; top-k {contents.index_topk:,}"
    yield f"context   {contents.context:,} tokens"


def _quantization(contents: Contents) -> Iterator[str]:
    yield "In the file"
    for kind, rows in groupby(contents.quantization, key=lambda row: row.kind):
        types = [f"{row.type} {_gib(row.bytes)} ({row.tensors})" for row in rows]
        yield f"  {kind:30}{', '.join(types)}"


def _degrees(rows: Sequence[DegreeRow]) -> Iterator[str]:
    yield "Tensor parallelism"
    for title, reasons in (
        ("alone", {row.degree: row.alone for row in rows}),
        ("with expert parallelism", {row.degree: row.with_experts for row in rows}),
    ):
        works = [str(degree) for degree, reason in reasons.items() if not reason]
        yield f"  {title + ':':26}{', '.join(works)}"
        for reason, degrees in _by_reason(reasons):
            yield f"    not {', '.join(map(str, degrees))}: {reason}"


def _by_reason(reasons: dict[int, str]) -> list[tuple[str, list[int]]]:
    """Each reason with its degrees; those that differ in the degree alone are told
    for the smallest."""
    groups: dict[str, tuple[str, list[int]]] = {}
    for degree, reason in reasons.items():
        if reason:
            key = reason.partition(" cannot be cut into ")[0].partition(" weights are")[
                0
            ]
            groups.setdefault(key, (reason, []))[1].append(degree)
    return list(groups.values())


def _machine(diagnosis: Diagnosis) -> Iterator[str]:
    assert diagnosis.machine is not None
    assert diagnosis.trial is not None
    split, indexer = diagnosis.trial.split, diagnosis.indexer
    yield f"machine   {diagnosis.machine.title}"
    stages = ""
    if split.pipeline > 1:
        stages = f", stages of {', '.join(map(str, split.layers))} layers"
    yield f"split     {split.name}{stages}"
    if indexer is not None:
        yield f"indexer   {indexer.path or 'none'}: {indexer.reason}"


def _memory(trial: Trial) -> Iterator[str]:
    stages = trial.weights
    if not stages:
        return
    unit, name = (GIB, "GiB") if stages[0].total >= GIB else (1 << 20, "MiB")

    def row(title: str, sizes: Iterable[int]) -> str:
        return _columns(title, (f"{size / unit:,.2f}" for size in sizes))

    yield f"Memory of a rank, {name}"
    if len(stages) > 1:
        yield _columns("stage", (str(i) for i in range(len(stages))))
    for part in dict.fromkeys(part for stage in stages for part in stage.parts):
        yield row(part, (stage.parts.get(part, 0) for stage in stages))
    yield row("weights", (stage.total for stage in stages))
    for title, size in trial.buffers.items():
        yield row(title, [size] * len(stages))
    yield row("assumed for the rest", [trial.overhead] * len(stages))
    rest = sum(trial.buffers.values()) + trial.overhead
    left = (trial.budget - stage.total - rest for stage in stages)
    yield row(f"left of {trial.budget / unit:,.2f}", left)


def _caches(trial: Trial) -> Iterator[str]:
    if not trial.caches:
        return
    length = f" at --max-model-len {trial.length:,}" if trial.length else ""
    yield f"Cache{length}"
    yield (
        f"    {'dtype':12}{'backend':29}{'format':11}{'B/token':>8}"
        f"{'tokens':>12}{'longest':>12}"
    )
    for row in trial.caches:
        mark = "*" if row.attention.option == trial.option else " "
        backend = row.attention.backend or (
            "none" if row.format is None else "not told"
        )
        form = row.format.name if row.format else ""
        yield (
            f"  {mark} {row.attention.option:12}{backend:29}{form:11}"
            f"{row.token_bytes:8,}{row.tokens:12,}{row.longest:12,}"
        )
    shown = trial.chosen or trial.caches[0]
    for name, reasons in shown.attention.rejected.items():
        yield f"    not {name}: {'; '.join(map(_short, reasons))}"


def _paths(diagnosis: Diagnosis) -> Iterator[str]:
    """Kinds of layers that are computed alike together."""
    yield "Layers"
    groups: dict[str, list[str]] = {}
    for layer in diagnosis.paths:
        text = f"{layer.kind} {', '.join(layer.types)}"
        if layer.reason:
            text += f" ({layer.reason})"
        groups.setdefault(layer.path, []).append(text)
    for path, layers in groups.items():
        yield f"  {path}: {'; '.join(layers)}"


def _verdict(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.runs is None:
        yield (
            "The file can be served. For a verdict about a machine: --gpus, "
            "--gpu-memory, --capability."
        )
    elif diagnosis.command is None:
        yield "This would not run."
    else:
        yield "To serve it:"
        yield diagnosis.command


def _columns(name: str, values: Iterable[str]) -> str:
    return f"  {name:26}" + "".join(f"{value:>12}" for value in values)


def _parameters(count: int) -> str:
    return (
        f"{count / 1e9:,.1f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"
    )


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.2f} MiB"


def _short(reason: str) -> str:
    return reason if len(reason) <= 100 else f"{reason[:97]}..."


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 6, 10 as "0-2, 6, 10"."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(
        str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found
    )


def _wrap(lines: Iterable[str]) -> Iterator[str]:
    """Break long lines between words, and indent what follows."""
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        while len(line) > _WIDTH and not line.startswith(("vllm serve ", "VLLM_")):
            at = line.rfind(" ", len(indent) + 1, _WIDTH + 1)
            if at < 0:
                break
            yield line[:at].rstrip()
            line = indent + line[at + 1 :]
        yield line
