# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Train the tiny GLM-DSA model on one GPU, as the DSA paper does, and export it.

Dense attention first, on short and then longer sequences; then the indexers learn the
distribution of the attention while the rest goes on; at last attention is sparse, in
the first layers before the last ones, and everything is trained: the model by the loss
of the next token and the MTP block by its own, the indexers by their KL alone. Stages
are bounded by time, so a faster GPU sees more tokens.

    python -m tools.tiny_glm_dsa.train --out build/tiny

Stopped, it goes on from the last checkpoint when started again with the same --out.
tests/assets/README.md tells how the shipped file was made.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples")]

from tools.tiny_glm_dsa.corpus import batches, sequences  # noqa: E402
from tools.tiny_glm_dsa.export import SPEC, load_gguf, save_gguf  # noqa: E402
from tools.tiny_glm_dsa.model import (  # noqa: E402
    DENSE,
    HALF_SPARSE,
    SPARSE,
    WARM_UP,
    Block,
    Output,
    TinyGlm,
)

PEAK_RATE = 2e-3
WARM_UP_STEPS = 200
WEIGHT_DECAY = 0.05
MTP_WEIGHT = 0.3
BALANCE_RATE = 2e-3  # of the router's bias, per step
# Of the corpus's classes: cannot be guessed, ordinary text, answers.
CLASS_WEIGHTS = (0.02, 0.2, 1.0)
REPORT_SECONDS, SAVE_SECONDS = 10, 60


@dataclass(frozen=True)
class Stage:
    """`enough` is the share of right answer tokens, as a moving mean, at which the
    stage ends early."""

    mode: str
    length: int
    batch: int
    minutes: float
    enough: float = 1.0


STAGES = (
    Stage(DENSE, 256, 128, 3.0, 0.985),
    Stage(DENSE, 512, 64, 1.5, 0.985),
    Stage(WARM_UP, 1024, 32, 1.5),
    Stage(WARM_UP, 2048, 16, 2.0),
    Stage(HALF_SPARSE, 1024, 32, 1.5),
    Stage(SPARSE, 1024, 32, 0.75),
    Stage(SPARSE, 2048, 16, 3.0),
)
MINUTES = sum(stage.minutes for stage in STAGES)


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args)
    for number, stage in enumerate(STAGES):
        if number >= trainer.stage:
            trainer.run(number, stage)
    trainer.save()


class Trainer:
    """The model, its optimizer, and how far the training has come."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.args = args
        self.device = torch.device(args.device)
        self.model = TinyGlm(SPEC).to(self.device)
        if args.init:
            load_gguf(self.model, args.init)
        self.optimizer = torch.optim.AdamW(_groups(self.model), betas=(0.9, 0.95))
        self.stage, self.step, self.seconds_in_stage = args.stage, 0, 0.0
        self.tokens = 0
        self.started = time.monotonic()
        self.checkpoint = args.out / "checkpoint.pt"
        if self.checkpoint.exists():
            self._resume()

    def run(self, number: int, stage: Stage) -> None:
        """Train until the stage's time is over or its answers are good enough."""
        if number != self.stage:
            self.stage, self.seconds_in_stage = number, 0.0
        limit = stage.minutes / MINUTES * self.args.minutes * 60
        before, start = self.seconds_in_stage, time.monotonic()
        # The seed depends on the step: a resumed stage sees new text.
        seed = self.args.seed * 1_000_003 + number * 100_000 + self.step
        data = batches(seed, stage.length, stage.batch, self.args.workers)
        reported = saved = start
        right = _MovingMean()
        last = number == len(STAGES) - 1
        for ids, classes in _on_device(data, self.device):
            self.seconds_in_stage = before + time.monotonic() - start
            done = self.seconds_in_stage / limit
            if done >= 1 or right.value() >= stage.enough:
                break
            self._set_rate(done if last else 0.0)
            numbers = self._train_step(stage.mode, ids, classes)
            right.add(numbers["right"])
            self.step, self.tokens = self.step + 1, self.tokens + ids.numel()
            now = time.monotonic()
            if now - reported > REPORT_SECONDS:
                reported = now
                self.log(stage=number, **{k: float(v) for k, v in numbers.items()})
            if now - saved > SAVE_SECONDS:
                saved = now
                self.save()
        data.close()
        self.log(stage=number, over=stage.mode, length=stage.length)
        self.log(stage=number, **self.evaluate(stage, batch_count=4))

    def _train_step(self, mode: str, ids: Tensor, classes: Tensor) -> dict[str, Tensor]:
        # What a position selects counts as much as the token that it predicts.
        weights = F.pad(class_weights(classes)[:, 1:], (0, 1))
        with self.autocast():
            output = self.model(ids, mode, weights)
        loss, right = token_loss(output.logits, ids, classes, ahead=1)
        mtp_loss, mtp_right = token_loss(output.mtp_logits, ids, classes, ahead=2)
        self.optimizer.zero_grad(set_to_none=True)
        (loss + MTP_WEIGHT * mtp_loss + output.index_loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self._balance(output)
        return {
            "loss": loss.detach(),
            "mtp_loss": mtp_loss.detach(),
            "index_loss": output.index_loss.detach(),
            "right": right,
            "mtp_right": mtp_right,
            "norm": norm,
        }

    @torch.no_grad()
    def _balance(self, output: Output) -> None:
        """Raise the bias of experts with few tokens, lower that of others."""
        rate = BALANCE_RATE * self.optimizer.param_groups[0]["lr"] / PEAK_RATE
        blocks = [b for b in self.model.blk if isinstance(b, Block) and not b.dense]
        for block, load in zip(blocks, output.loads, strict=True):
            block.exp_probs_b.bias += rate * torch.sign(load.mean() - load)

    def _set_rate(self, done: float) -> None:
        """Constant after a warm-up; to zero along a cosine in the last stage."""
        scale = min(1.0, (self.step + 1) / WARM_UP_STEPS)
        scale *= 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        for group in self.optimizer.param_groups:
            group["lr"] = PEAK_RATE * scale

    @torch.no_grad()
    def evaluate(self, stage: Stage, batch_count: int) -> dict[str, float]:
        """Held-out loss and shares of right answer tokens and of whole answers.

        The answers are read with the right tokens before them; a whole one is right if
        all its tokens are, which is what greedy decoding gives.
        """
        data = _held_out(self.args.seed, stage, batch_count)
        sums: dict[str, float] = {}
        for ids, classes in _on_device(data, self.device):
            with self.autocast():
                output = self.model(ids, stage.mode)
            loss, right = token_loss(output.logits, ids, classes, ahead=1)
            _, mtp_right = token_loss(output.mtp_logits, ids, classes, ahead=2)
            numbers = {
                "test_loss": loss,
                "test_right": right,
                "test_mtp_right": mtp_right,
                "test_answers": whole_answers(output.logits, ids, classes),
                "test_index_loss": output.index_loss,
            }
            for key, value in numbers.items():
                sums[key] = sums.get(key, 0.0) + float(value) / batch_count
        return sums

    def autocast(self) -> torch.autocast:
        """bfloat16 on a GPU; on a CPU, where it is only slower, nothing."""
        kind = self.device.type
        return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")

    def save(self) -> None:
        """Write the checkpoint and the model's file, each in one step."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": [self.stage, self.step, self.seconds_in_stage, self.tokens],
        }
        fresh = self.checkpoint.with_suffix(".new")
        torch.save(state, fresh)
        fresh.replace(self.checkpoint)
        fresh = self.args.out / "model.new"
        save_gguf(self.model, fresh)
        fresh.replace(self.args.out / "model.gguf")

    def _resume(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        progress = state["progress"]
        self.stage, self.step, self.seconds_in_stage, self.tokens = progress
        self.log(resumed=str(self.checkpoint))

    def log(self, **numbers: Any) -> None:
        seconds = round(time.monotonic() - self.started)
        numbers = {"s": seconds, "step": self.step, "tokens": self.tokens, **numbers}
        line = json.dumps(
            {k: round(v, 4) if isinstance(v, float) else v for k, v in numbers.items()}
        )
        print(line, flush=True)
        with (self.args.out / "log.jsonl").open("a") as file:
            file.write(line + "\n")


class _MovingMean:
    """Of the last hundred or so values; 0 until fifty are there. Reads the GPU late."""

    def __init__(self) -> None:
        self.waiting: list[Tensor] = []
        self.mean, self.count = 0.0, 0

    def add(self, value: Tensor) -> None:
        self.waiting.append(value)
        if len(self.waiting) == 10:
            new = float(torch.stack(self.waiting).mean())
            share = max(0.1, 1 / (self.count + 1))
            self.mean += share * (new - self.mean)
            self.count += 1
            self.waiting.clear()

    def value(self) -> float:
        return self.mean if self.count >= 5 else 0.0


def token_loss(
    logits: Tensor, ids: Tensor, classes: Tensor, *, ahead: int
) -> tuple[Tensor, Tensor]:
    """Weighted mean cross entropy of the token `ahead`, and right answer tokens' share.

    Args:
        logits: [batch, length, vocab].
        ids: int64 [batch, length].
        classes: The class of each token, index of CLASS_WEIGHTS, [batch, length].
    """
    known = logits[:, :-ahead].float().flatten(0, 1)
    target = ids[:, ahead:].flatten()
    kind = classes[:, ahead:].flatten()
    weight = class_weights(kind)
    loss = F.cross_entropy(known, target, reduction="none")
    answer = (kind == 2).float()
    hits = (known.detach().argmax(-1) == target).float()
    right = (hits * answer).sum() / answer.sum().clamp(min=1)
    return (loss * weight).sum() / weight.sum(), right


def class_weights(classes: Tensor) -> Tensor:
    """CLASS_WEIGHTS of each class, float32."""
    return torch.tensor(CLASS_WEIGHTS, device=classes.device)[classes.long()]


def whole_answers(logits: Tensor, ids: Tensor, classes: Tensor) -> Tensor:
    """Share of runs of answer tokens that the model predicts without a mistake."""
    answer = classes[:, 1:] == 2
    wrong = (logits[:, :-1].argmax(-1) != ids[:, 1:]) & answer
    begins = answer & ~F.pad(answer[:, :-1], (1, 0))
    run = begins.flatten().cumsum(0)  # number of the run that a token belongs to
    bad = torch.zeros(int(run[-1]) + 1, device=ids.device)
    bad.index_add_(0, run, wrong.flatten().float())
    return 1 - (bad[1:] > 0).float().mean()


def _groups(model: TinyGlm) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": WEIGHT_DECAY, "lr": PEAK_RATE},
        {"params": vectors, "weight_decay": 0.0, "lr": PEAK_RATE},
    ]


def _held_out(
    seed: int, stage: Stage, count: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """`count` batches of held-out sequences, the same for a seed."""
    source = sequences(seed, stage.length, split="test")
    for _ in range(count):
        rows = [next(source) for _ in range(stage.batch)]
        yield np.stack([ids for ids, _ in rows]), np.stack([kind for _, kind in rows])


def _on_device(
    data: Iterator[tuple[np.ndarray, np.ndarray]], device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    for ids, classes in data:
        tensors = (torch.from_numpy(ids), torch.from_numpy(classes))
        if device.type == "cuda":
            tensors = tuple(t.pin_memory() for t in tensors)
        moved = [t.to(device, non_blocking=True) for t in tensors]
        yield moved[0].long(), moved[1]


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of results")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--init", type=Path, help="begin with this file's weights")
    parser.add_argument("--stage", type=int, default=0, help="begin with this stage")
    workers = max(1, (os.cpu_count() or 2) - 2)
    parser.add_argument("--workers", type=int, default=workers, help="make the text")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
