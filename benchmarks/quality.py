# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""How well the trained tiny model answers in vLLM, transformers and llama.cpp.

For each setting: right answers to held-out questions, perplexity of held-out text, KL
from transformers in float32 on the file's own weights, and for speculation with the MTP
block the accepted drafts. vLLM is asked through the OpenAI API of `vllm serve`. KL is a
lower bound: an engine reports its 20 likeliest tokens, all others count as one.

    python -m benchmarks.quality --types Q8_0 Q4_K --mtp 0 3 --questions 100

docs/quality.md explains the columns.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.quality_engines import (
    Engine,
    LlamaCpp,
    ServeOptions,
    Speculation,
    Transformers,
    VllmServer,
    vllm_server,
)
from benchmarks.quality_material import (
    NEEDLE_TOKENS,
    Material,
    check_vocabulary,
    make_material,
)
from benchmarks.quality_stats import kl_lower_bound, paired, perplexity, wilson
from tests.helpers.faults import FAULTS
from tools.tiny_glm_dsa.tasks import TASKS, is_correct

ROOT = Path(__file__).parents[1]
FLOAT32 = "float32"

sys.path.append(str(ROOT / "examples"))

from demo import MODEL  # noqa: E402
from requantize import requantize  # noqa: E402


@dataclass(frozen=True)
class Setting:
    """What is measured: an engine, a weight type, how vLLM runs, and a mistake that is
    made in transformers' model."""

    engine: str
    weights: str
    serve: ServeOptions = field(default_factory=ServeOptions)
    fault: str | None = None


@dataclass
class Result:
    """Of one setting; `right` has a flag for each question, by task, `unlike_first`
    counts the answers that differ from those of the first setting (thinking or not)."""

    setting: Setting
    thinking: bool
    right: dict[str, list[bool]]
    unlike_first: int
    perplexity: dict[str, float]
    kl: float
    speculation: Speculation
    seconds: float


@dataclass(frozen=True)
class Truth:
    """transformers' log-probabilities of `Material.texts` and `.conversations`."""

    texts: list[np.ndarray]
    conversations: list[np.ndarray]


def truth_of(model: Path, material: Material) -> Truth:
    reference = Transformers(model)
    return Truth(
        [reference.all_logprobs(ids) for ids in material.texts],
        [reference.all_logprobs(ids) for ids in material.conversations],
    )


def kept_truth(model: Path, material: Material, file: Path | None) -> Truth:
    """The truth from `file`, made first if it does not exist or is None.

    Raises:
        ValueError: the file is of other texts.
    """
    lengths = [len(ids) - 1 for ids in (*material.texts, *material.conversations)]
    if file is None or not file.exists():
        truth = truth_of(model, material)
        if file is not None:
            rows = np.concatenate([*truth.texts, *truth.conversations])
            np.savez_compressed(file, rows=rows.astype(np.float32), lengths=lengths)
        return truth
    with np.load(file) as kept:
        if kept["lengths"].tolist() != lengths:
            raise ValueError(f"{file} is of other texts; delete it to make it anew")
        each = np.split(kept["rows"].astype(np.float64), np.cumsum(lengths)[:-1])
    return Truth(each[: len(material.texts)], each[len(material.texts) :])


class Bench:
    """Measures settings on one file, whose variants it writes to `folder`."""

    def __init__(
        self, model: Path, material: Material, truth: Truth, folder: Path
    ) -> None:
        self.model, self.material, self.truth = model, material, truth
        self.folder = folder
        self.first: dict[bool, list[str]] = {}

    def measure(self, setting: Setting, thinking: Sequence[bool]) -> Iterator[Result]:
        """One result for thinking and one for not thinking, if asked for."""
        with self.engine(setting) as engine:
            # Text is scored before there are drafts, so that these are of answers.
            quality = self._text_quality(engine)
            for flag in thinking:
                yield self._answers(setting, engine, flag, *quality)

    def _answers(
        self,
        setting: Setting,
        engine: Engine,
        thinking: bool,
        perplexities: dict[str, float],
        kl: float,
    ) -> Result:
        drafts = _speculation(engine)
        start = time.monotonic()
        questions = self.material.questions
        said = engine.answers(questions, thinking=thinking)
        seconds = time.monotonic() - start
        right: dict[str, list[bool]] = {}
        for question, text in zip(questions, said, strict=True):
            right.setdefault(question.task, []).append(is_correct(question, text))
        first = self.first.setdefault(thinking, said)
        unlike = sum(a != b for a, b in zip(said, first, strict=True))
        return Result(
            setting,
            thinking,
            right,
            unlike,
            perplexities,
            kl,
            _speculation(engine).since(drafts),
            seconds,
        )

    def _text_quality(self, engine: Engine) -> tuple[dict[str, float], float]:
        """Perplexity of each kind of text, and the mean KL of all positions."""
        perplexities, divergences = {}, []
        for name in ("texts", "conversations"):
            sequences = getattr(self.material, name)
            of_tokens = []
            for ids, truth, rows in zip(
                sequences,
                getattr(self.truth, name),
                engine.logprobs(sequences),
                strict=True,
            ):
                # The second token, <sop>, always follows the first.
                of_tokens += [row[t] for t, row in zip(ids[2:], rows[1:], strict=True)]
                divergences += map(kl_lower_bound, truth[1:], rows[1:])
            perplexities[name] = perplexity(of_tokens)
        # Rounding makes that of equal distributions slightly negative.
        return perplexities, max(0.0, float(np.mean(divergences)))

    @contextmanager
    def engine(self, setting: Setting) -> Iterator[Engine]:
        path = self.folder / f"model.{setting.weights}.gguf"
        if not path.exists():
            requantize(self.model, path, setting.weights)
        if setting.engine == "vllm":
            with vllm_server(path, self.folder / "server.log", setting.serve) as server:
                yield server
        elif setting.engine == "llamacpp":
            yield LlamaCpp(path)
        else:
            yield Transformers(path, FAULTS[setting.fault] if setting.fault else None)


def _speculation(engine: Engine) -> Speculation:
    known = isinstance(engine, VllmServer)
    return engine.speculation() if known else Speculation()


def settings(options: argparse.Namespace) -> Iterator[Setting]:
    """Every combination that was asked for; other engines have no options of vLLM."""
    for engine, weights in product(options.engines, options.types):
        if engine != "vllm":
            yield Setting(engine, weights)
            if engine == "transformers":
                for fault in options.faults:
                    yield Setting(engine, weights, fault=fault)
            continue
        for dtype, cache, backend, mode, mtp in product(
            options.dtype,
            options.kv_cache_dtype,
            options.backend,
            options.execution,
            options.mtp,
        ):
            chosen = None if backend == "auto" else backend
            more = tuple(shlex.split(options.serve_options))
            serve = ServeOptions(dtype, cache, chosen, mode == "graph", mtp, more)
            yield Setting(engine, weights, serve)


COLUMNS = (
    *("engine", "weights", "dtype, cache", "run", "MTP", "think"),
    *("needle", "all questions", "mean of tasks", "text ppl", "talk ppl", "KL"),
    *("unlike first", "drafts accepted", "tokens a step", "s"),
)


def row(result: Result) -> list[str]:
    """The cells of a result under `COLUMNS`."""
    setting, serve = result.setting, result.setting.serve
    every = [flag for flags in result.right.values() for flag in flags]
    means = [sum(flags) / len(flags) for flags in result.right.values()]
    cells = [setting.engine, setting.weights]
    if setting.engine == "vllm":
        cells += [f"{serve.dtype}, {serve.cache}"]
        cells += [
            ("graph" if serve.graph else "eager")
            + (f", {serve.backend}" if serve.backend else "")
        ]
        cells += [str(serve.mtp)]
    else:
        cells += [f"{FLOAT32}, {FLOAT32}", setting.fault or "", "0"]
    cells += ["yes" if result.thinking else "no"]
    cells += [share(result.right.get("needle", [])), share(every)]
    cells += [f"{100 * sum(means) / len(means):.1f} %"]
    cells += [f"{result.perplexity[kind]:.4f}" for kind in ("texts", "conversations")]
    cells += [f"{result.kl:.1e}", f"{result.unlike_first} of {len(every)}"]
    drafts = result.speculation
    known = drafts.drafts > 0
    cells += [f"{100 * drafts.rate:.1f} %" if known else ""]
    cells += [f"{drafts.length:.2f}" if known else ""]
    return [*cells, f"{result.seconds:.0f}"]


def share(flags: Sequence[bool]) -> str:
    """Right answers in percent, their 95 % interval, and the number of questions."""
    if not flags:
        return ""
    low, high = wilson(sum(flags), len(flags))
    part = 100 * sum(flags) / len(flags)
    return f"{part:.1f} % ({100 * low:.1f} to {100 * high:.1f}; {len(flags)})"


def by_task(results: Sequence[Result]) -> Iterator[list[str]]:
    """Cells of the second table: the share of right answers of each task."""
    for result in results:
        yield [*row(result)[:6], *(share(flags) for flags in result.right.values())]


def line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def head(columns: Sequence[str]) -> str:
    return line(columns) + "\n" + "|---" * len(columns) + "|"


def comparison(results: Sequence[Result]) -> Iterator[str]:
    """Each result against the first, question by question."""
    flags = [[f for task in r.right.values() for f in task] for r in results]
    for result, found in zip(results[1:], flags[1:], strict=True):
        pair = paired(flags[0], found)
        yield (
            f"{' '.join(filter(None, row(result)[:6]))}: {pair.lost} lost, "
            f"{pair.won} won, {pair.points:.2f} ± {pair.half_width:.2f} points worse"
        )


def jsonable(result: Result) -> dict[str, Any]:
    """All of a result; answers as strings of 1, right, and 0, wrong."""
    made = asdict(result)
    made["right"] = {
        task: "".join("01"[flag] for flag in flags)
        for task, flags in result.right.items()
    }
    return made


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--model", type=Path, default=MODEL, help="default: the trained tiny model")
    engines = ("vllm", "transformers", "llamacpp")
    add("--engines", nargs="+", choices=engines, default=["vllm"])
    add("--types", nargs="+", default=["Q8_0"], help="ggml types of the weights")
    add("--dtype", nargs="+", default=[FLOAT32], help="of vLLM's activations")
    add("--kv-cache-dtype", nargs="+", default=["auto"])
    add("--backend", nargs="+", default=["auto"], help="--attention-backend")
    add("--execution", nargs="+", choices=("eager", "graph"), default=["eager"])
    add("--mtp", nargs="+", type=int, default=[0], help="drafted tokens; 0: none")
    add("--thinking", nargs="+", choices=("on", "off"), default=["on"])
    add("--serve-options", default="", help="more options of `vllm serve`, one string")
    add("--faults", nargs="+", default=[], choices=FAULTS, help="in transformers")
    add("--tasks", nargs="+", choices=TASKS, default=TASKS)
    add("--questions", type=int, default=100, help="of each task")
    add("--needles", type=int, help="of task needle, which takes longest")
    add("--needle-tokens", type=int, default=NEEDLE_TOKENS)
    add("--texts", type=int, default=32, help="paragraphs")
    add("--truth", type=Path, help="file to keep transformers' probabilities in")
    add("--json", type=Path, help="file to write all results to")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    check_vocabulary(options.model)
    material = make_material(
        options.questions,
        options.texts,
        options.tasks,
        options.needles,
        options.needle_tokens,
    )
    truth = kept_truth(options.model, material, options.truth)
    thinking = [flag == "on" for flag in options.thinking]
    results: list[Result] = []
    with TemporaryDirectory(prefix="vllm-quality-") as folder:
        bench = Bench(options.model, material, truth, Path(folder))
        for setting in settings(options):
            for result in bench.measure(setting, thinking):
                results.append(result)
                print(line(row(result)), flush=True)
                if options.json:
                    made = [jsonable(each) for each in results]
                    options.json.write_text(json.dumps(made, indent=1) + "\n")
    print("\n" + head(COLUMNS))
    print("\n".join(line(row(result)) for result in results))
    print("\n" + head([*COLUMNS[:6], *results[0].right]))
    print("\n".join(map(line, by_task(results))))
    print("\nAgainst the first row, on the same questions:\n")
    print("\n".join(comparison(results)))


if __name__ == "__main__":
    main()
