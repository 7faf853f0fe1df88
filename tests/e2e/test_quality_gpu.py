# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The shipped tiny model on a GPU: a quantized cache costs a point at most.

Both servers run the file's weights in bfloat16. Of 700 held-out questions one is 0.14
points; the difference of two settings that answer as well has a 95 % interval of about
±1 point if 2 % of the answers differ. The release's sparse backends take a top-k only
that 128 divides, so both read 128 tokens.
"""

from pathlib import Path

import pytest
import torch

from benchmarks.quality import MODEL
from benchmarks.quality_engines import ServeOptions, vllm_server
from benchmarks.quality_material import questions_of
from benchmarks.quality_stats import paired
from requantize import requantize
from tools.tiny_glm_dsa.tasks import is_correct

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytestmark = pytest.mark.gpu

TASKS = ("copy", "sort", "add", "count", "story")
QUESTIONS = [
    *questions_of("needle", 200),
    *(question for task in TASKS for question in questions_of(task, 100)),
]
TOP_K = ("--hf-overrides", '{"index_topk": 128}')


def right_answers(model: Path, cache: str, folder: Path) -> list[bool]:
    options = ServeOptions(dtype="bfloat16", cache=cache, more=TOP_K)
    with vllm_server(model, folder / f"{cache}.log", options) as server:
        said = server.answers(QUESTIONS, thinking=True)
    return list(map(is_correct, QUESTIONS, said))


def test_fp8_ds_mla_loses_one_point_at_most(tmp_path: Path) -> None:
    model = tmp_path / "bf16.gguf"
    requantize(MODEL, model, "BF16")
    exact = right_answers(model, "auto", tmp_path)
    assert sum(exact[:200]) >= 160, "the model does not find its needles on this GPU"
    found = paired(exact, right_answers(model, "fp8_ds_mla", tmp_path))
    assert found.points <= 1, found
