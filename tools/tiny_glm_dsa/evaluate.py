# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Whether a trained file needs its indexers: needles found with them and without.

transformers computes in float32 and answers greedily, once with the file's indexers and
once with every query reading the most recent tokens instead, as many as the top-k.

    python -m tools.tiny_glm_dsa.evaluate tests/assets/tiny-glm-dsa-trained.Q8_0.gguf
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality import share
from benchmarks.quality_engines import Transformers
from benchmarks.quality_material import NEEDLE_TOKENS, questions_of
from tools.tiny_glm_dsa.tasks import is_correct

CHOICES = ("indexer", "recent", "both")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=NEEDLE_TOKENS)
    parser.add_argument("--selection", default="both", choices=CHOICES)
    args = parser.parse_args()
    engine = Transformers(args.model)
    questions = questions_of("needle", args.questions, args.tokens)
    for selection in ("indexer", "recent"):
        if args.selection not in (selection, "both"):
            continue
        if selection == "recent":
            read_most_recent(engine.reference.model)
        right = []
        for question in questions:
            said = engine.answers([question], thinking=True)[0]
            right.append(is_correct(question, said))
            print(f"\r{selection}: {sum(right)} of {len(right)}", end="", flush=True)
        print(f"\n{selection}: {share(right)}")


def read_most_recent(model: Any) -> None:
    """Replace the indexers of a GlmMoeDsaForCausalLM."""
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.forward = MostRecent(layer.self_attn.indexer)


class MostRecent:
    """An indexer's forward that selects each query's own position and those before."""

    def __init__(self, indexer: Any) -> None:
        self.top_k = indexer.index_topk

    def __call__(
        self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        attention_mask = args[2]  # [batch, queries, keys]
        queries, keys = attention_mask.shape[-2:]
        place = torch.arange(keys - queries, keys)
        before = torch.arange(min(self.top_k, keys))
        # Near the beginning position 0 stands for those that are missing.
        chosen = (place[:, None] - before).clamp(min=0).to(torch.int32)
        return chosen.expand(hidden_states.shape[0], -1, -1)


if __name__ == "__main__":
    main()
