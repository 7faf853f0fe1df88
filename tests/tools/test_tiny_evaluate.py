# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The shipped model needs its indexers: with the most recent keys it finds nothing."""

from types import SimpleNamespace

import torch

from benchmarks.quality import MODEL
from benchmarks.quality_engines import Transformers
from benchmarks.quality_material import questions_of
from tools.tiny_glm_dsa.evaluate import MostRecent, read_most_recent
from tools.tiny_glm_dsa.tasks import is_correct

TOKENS = 400


def test_the_indexers_find_what_the_most_recent_keys_do_not_hold() -> None:
    questions = questions_of("needle", 4, TOKENS)
    engine = Transformers(MODEL)
    said = engine.answers(questions, thinking=True)
    assert list(map(is_correct, questions, said)) == [True] * 4
    read_most_recent(engine.reference.model)
    said = engine.answers(questions, thinking=True)
    assert list(map(is_correct, questions, said)) == [False] * 4


def test_most_recent_ends_at_the_query_and_begins_at_position_0() -> None:
    forward = MostRecent(SimpleNamespace(index_topk=3))
    hidden, mask = torch.zeros(2, 4, 8), torch.zeros(2, 4, 6)
    chosen = forward(hidden, None, None, mask)  # queries 2 to 5 of 6 keys
    rows = [[2, 1, 0], [3, 2, 1], [4, 3, 2], [5, 4, 3]]
    assert chosen.tolist() == [rows, rows]
    first = forward(hidden[:, :2], None, None, mask[:, :2, :2])
    assert first.tolist() == [[[0, 0], [1, 0]]] * 2
