# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Find seeds of tiny models whose greedy tokens do not hang on rounding.

A random model has near-ties at the edge of the top-k, in the router and between
logits; there two correct engines may take different turns. A seed is taken if
transformers gives the same tokens after its weights were disturbed by fifty
float32 roundings. No engine under test takes part in the choice.

    python tools/find_seeds.py F32 Q4_K ...
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from tests.helpers.hf_reference import HfReference  # noqa: E402
from tests.helpers.tiny_prompts import STEPS, make_prompts  # noqa: E402
from tiny_glm_dsa import TinySpec, write_tiny_glm_dsa  # noqa: E402

RELATIVE_NOISE = 3e-6
DRAWS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="+")
    parser.add_argument("--tries", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for weight_type in args.types:
        seeds = (s for s in range(args.tries) if is_unambiguous(weight_type, s))
        print(f'"{weight_type}": {next(seeds, None)},', flush=True)


def is_unambiguous(weight_type: str, seed: int) -> bool:
    """Whether disturbed weights give the same tokens for all prompts."""
    with tempfile.TemporaryDirectory() as scratch:
        spec = TinySpec(weight_type=weight_type, seed=seed)
        reference = HfReference(write_tiny_glm_dsa(Path(scratch, "t.gguf"), spec)[0])
    prompts = make_prompts()[::-1]
    expected = [reference.generate(prompt, STEPS) for prompt in prompts]
    original = {k: v.clone() for k, v in reference.model.state_dict().items()}
    for draw in range(DRAWS):
        generator = torch.Generator().manual_seed(draw)
        with torch.no_grad():
            for name, value in reference.model.state_dict().items():
                noise = torch.randn(value.shape, generator=generator)
                value.copy_(original[name] * (1 + RELATIVE_NOISE * noise))
        for prompt, tokens in zip(prompts, expected, strict=True):
            if reference.generate(prompt, STEPS) != tokens:
                return False
    return True


if __name__ == "__main__":
    main()
