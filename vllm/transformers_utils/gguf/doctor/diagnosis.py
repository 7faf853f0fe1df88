# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Everything that the doctor has to say about one file on one machine."""

import functools
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from vllm.transformers_utils.gguf.doctor import engine
from vllm.transformers_utils.gguf.doctor.advice import (
    LEVELS,
    PARTITION,
    Finding,
    file_findings,
    machine_findings,
    serve_command,
)
from vllm.transformers_utils.gguf.doctor.contents import Contents, describe_contents
from vllm.transformers_utils.gguf.doctor.engine import Attention, Indexer
from vllm.transformers_utils.gguf.doctor.layers import LayerPath, layer_paths
from vllm.transformers_utils.gguf.doctor.machine import Machine
from vllm.transformers_utils.gguf.doctor.split import (
    Split,
    aligned_layers,
    uneven_parts,
)
from vllm.transformers_utils.gguf.doctor.trial import Request, Trial, Trier
from vllm.transformers_utils.gguf.errors import GGUFError
from vllm.transformers_utils.gguf.ggml_types import GGMLType
from vllm.transformers_utils.gguf.glm_dsa import GlmDsaConfig
from vllm.transformers_utils.gguf.plan import LoadPlan, make_plan
from vllm.transformers_utils.gguf.reader import open_gguf
from vllm.transformers_utils.gguf.serving import (
    check_speculation,
    draft_error,
    stage_error,
)
from vllm.transformers_utils.gguf.tokenizer import tokenizer_files

_DEGREES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class DegreeRow:
    """Whether a tensor-parallel degree works: an empty string, or why it does not;
    alone, and with expert parallelism."""

    degree: int
    alone: str
    with_experts: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The answers. Without a machine there are only those about the file.

    `runs` is None without a machine. `command` is None where nothing would run.
    """

    path: str
    contents: Contents
    degrees: tuple[DegreeRow, ...]
    paths: tuple[LayerPath, ...]
    machine: Machine | None
    trial: Trial | None
    indexer: Indexer | None
    findings: tuple[Finding, ...]
    command: str | None

    @property
    def runs(self) -> bool | None:
        if self.machine is None:
            return None
        return all(finding.level != "error" for finding in self.findings)


def diagnose(path: str | Path, machine: Machine | None, request: Request) -> Diagnosis:
    """Examine the GGUF file at `path`, of which any shard may be named.

    Raises GGUFError for a file that `vllm serve` refuses, and ValueError for a
    VLLM_PP_LAYER_PARTITION that does not fit the model.
    """
    with engine.device_of(machine):
        plan, contents = _read(path, request)
        device = machine.kind if machine is not None else engine.build_kind()
        keep = device == "cuda" or request.keep_blocks
        drafts = request.draft_tokens > 0
        types = _representatives(plan.block_types()) if keep else {}
        paths = layer_paths(
            plan, device, request.dtype, keep_blocks=keep, drafts=drafts
        )
        refusals = functools.cache(functools.partial(_refusals, plan.config, types))
        degrees = _degree_rows(refusals, machine, request)
        found = [*file_findings(contents, drafts)]
        trial, indexer, command = None, None, None
        if machine is not None:
            indexer = _indexer(machine)
            trial = _best_trial(plan, machine, request, refusals)
            found = [
                *machine_findings(machine, request, trial, indexer, paths),
                *found,
            ]
            if all(finding.level != "error" for finding in found):
                command = serve_command(str(path), machine, request, trial)
    return Diagnosis(
        path=str(path),
        contents=contents,
        degrees=degrees,
        paths=paths,
        machine=machine,
        trial=trial,
        indexer=indexer,
        findings=tuple(sorted(found, key=lambda item: LEVELS.index(item.level))),
        command=command,
    )


def _read(path: str | Path, request: Request) -> tuple[LoadPlan, Contents]:
    """What `prepare_model` would read and refuse, without writing its directory."""
    with _no_collector(), open_gguf(path) as file:
        plan = make_plan(file)
        if request.tokenizer is None:
            try:
                tokenizer_files(file.metadata)
            except GGUFError as error:
                raise GGUFError(f"{file.paths[0]}: {error}") from error
        contents = describe_contents(file, plan)
    if request.draft_tokens:
        options = SimpleNamespace(
            speculative_config={"method": "mtp"},
            spec_method=None,
            # Stages are the trial's matter: the file is fine.
            pipeline_parallel_size=1,
        )
        check_speculation(str(path), options, plan.config)
    return plan, contents


@contextmanager
def _no_collector() -> Iterator[None]:
    """The half million strings of a vocabulary are no cycles: without looking for some
    it is read in half the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _representatives(types: Mapping[str, GGMLType]) -> dict[str, GGMLType]:
    """The first module of each name and type: layers repeat, and so do their cuts."""
    first: dict[tuple[str, str], str] = {}
    for module, kind in types.items():
        suffix = module.partition(".layers.")[2].partition(".")[2] or module
        first.setdefault((suffix, kind.name), module)
    return {module: types[module] for module in first.values()}


def _refusals(
    config: GlmDsaConfig, types: Mapping[str, GGMLType], degree: int, experts: bool
) -> tuple[str, ...]:
    """Why a tensor-parallel degree cannot run."""
    found = [
        f"{part} cannot be cut into {degree} equal parts"
        for part in uneven_parts(config, degree, experts=experts)
    ]
    cut = engine.cut_error(types, config, degree, experts=experts)
    return (*found, *([cut] if cut else []))


def _degree_rows(
    refusals: Callable[[int, bool], tuple[str, ...]],
    machine: Machine | None,
    request: Request,
) -> tuple[DegreeRow, ...]:
    degrees = {*_DEGREES, request.tensor or 1, machine.devices if machine else 1}
    return tuple(
        DegreeRow(
            degree,
            "; ".join(refusals(degree, False)),
            "; ".join(refusals(degree, True)),
        )
        for degree in sorted(degrees)
    )


def _indexer(machine: Machine) -> Indexer | None:
    if machine.kind == "cpu":
        return engine.cpu_indexer()
    if machine.capability is None or engine.build_kind() == "cpu":
        return None
    return engine.cuda_indexer(machine)


def _best_trial(
    plan: LoadPlan,
    machine: Machine,
    request: Request,
    refusals: Callable[[int, bool], tuple[str, ...]],
) -> Trial:
    """The first way to spread the model that runs, else the first with its errors."""
    selected = functools.cache(
        functools.partial(_select, plan.config, machine, request.dtype)
    )
    trier = Trier(
        plan,
        machine,
        request,
        # Only the number of heads matters to the selector, not where layers are.
        lambda split, option: selected(split.tensor, option),
    )
    first: Trial | None = None
    for tensor, pipeline, experts in _candidates(machine, request):
        split, errors = _spread(plan.config, tensor, pipeline, experts)
        errors += refusals(tensor, experts)
        errors += _machine_errors(plan.config, split, machine, request)
        if request.draft_tokens and (error := draft_error(pipeline)):
            errors.append(error)
        trial = trier.try_split(split, errors)
        if not trial.errors:
            return trial
        first = first or trial
    assert first is not None
    return first


def _candidates(machine: Machine, request: Request) -> Iterator[tuple[int, int, bool]]:
    """Tensor and pipeline degrees and expert parallelism, in the order to try."""
    if machine.kind == "cpu" or request.tensor or request.pipeline:
        yield request.tensor or 1, request.pipeline or 1, request.experts
        return
    whole = machine.devices
    power = 1 << (whole.bit_length() - 1)
    for devices in dict.fromkeys((whole, power)):
        for stages in range(1, devices + 1):
            if devices % stages:
                continue
            if not request.experts:
                yield devices // stages, stages, False
            if devices > stages:
                yield devices // stages, stages, True


def _spread(
    config: GlmDsaConfig, tensor: int, pipeline: int, experts: bool
) -> tuple[Split, list[str]]:
    """The layers of each stage: vLLM's own choice, unless a stage would begin wrongly
    and the user has not chosen."""
    if pipeline > config.num_hidden_layers:
        split = Split(tensor, pipeline, experts, (0,) * pipeline)
        return split, [
            f"{config.num_hidden_layers} layers are fewer than {pipeline} stages"
        ]
    split = Split(tensor, pipeline, experts, engine.default_layers(config, pipeline))
    found = [stage_error(config, split.first_layer(i)) for i in range(pipeline)]
    errors = [error for error in found if error is not None]
    layers = aligned_layers(config, pipeline)
    if not errors or layers is None or PARTITION in os.environ:
        return split, errors
    return Split(tensor, pipeline, experts, layers), []


def _machine_errors(
    config: GlmDsaConfig, split: Split, machine: Machine, request: Request
) -> list[str]:
    if machine.kind == "cpu":
        error = engine.cpu_error(
            config,
            split,
            request.dtype,
            request.cache_dtype or "auto",
            request.keep_blocks,
        )
        return [error] if error else []
    if split.ranks > machine.devices:
        return [
            f"{split.name} needs {split.ranks} GPUs, but there are {machine.devices}"
        ]
    return []


def _select(
    config: GlmDsaConfig, machine: Machine, dtype: str, tensor: int, option: str
) -> Attention:
    if machine.kind == "cpu":
        return engine.cpu_attention(option)
    if machine.capability is None or engine.build_kind() == "cpu":
        # Nobody can tell the backend; the option itself tells the format.
        return Attention(option, None, option, {})
    split = Split(tensor, 1, False, (config.num_hidden_layers,))
    return engine.cuda_attention(config, machine, split, dtype, option)
