# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""How the doctor spreads a model, beside what the loader and the layers refuse."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.overlay.doctor.glm5 import write_glm5
from vllm.model_executor.model_loader import gguf_loader
from vllm.transformers_utils.gguf.doctor import diagnosis, engine
from vllm.transformers_utils.gguf.doctor.split import (
    Split,
    aligned_layers,
    local_experts,
    uneven_parts,
)
from vllm.transformers_utils.gguf.errors import GGUFError
from vllm.transformers_utils.gguf.ggml_types import GGML_TYPES_BY_NAME, GGMLType
from vllm.transformers_utils.gguf.plan import LoadPlan, make_plan
from vllm.transformers_utils.gguf.reader import open_gguf
from vllm.transformers_utils.gguf.serving import stage_error


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> LoadPlan:
    with open_gguf(write_glm5(tmp_path_factory.mktemp("glm5"))) as file:
        return make_plan(file)


def refused_by_loader(plan: LoadPlan, first: int) -> str | None:
    model: Any = SimpleNamespace(model=SimpleNamespace(start_layer=first))
    try:
        gguf_loader._check_stage(model, plan.config)
    except GGUFError as error:
        return str(error)
    return None


def test_a_stage_may_begin_where_the_loader_lets_it(plan: LoadPlan) -> None:
    answers = [stage_error(plan.config, first) for first in range(78)]
    assert answers == [refused_by_loader(plan, first) for first in range(78)]
    assert [first for first, why in enumerate(answers) if why is None] == [
        *(0, 1, 2),
        *range(6, 78, 4),
    ]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6, 8])
def test_stages_are_made_to_begin_at_an_indexer(plan: LoadPlan, stages: int) -> None:
    layers = aligned_layers(plan.config, stages)
    assert layers is not None
    assert len(layers) == stages
    assert sum(layers) == 78
    split = Split(1, stages, False, layers)
    for stage in range(stages):
        assert stage_error(plan.config, split.first_layer(stage)) is None
        assert split.stage_of(split.first_layer(stage)) == stage
    assert split.stage_of(78) == stages - 1
    assert max(layers) - min(layers) <= 4


def test_there_may_be_too_few_indexers_for_the_stages(plan: LoadPlan) -> None:
    few = replace(plan.config, indexer_full=(True, *[False] * 77))
    assert aligned_layers(few, 2) is None


@pytest.mark.parametrize("experts", [False, True], ids=["alone", "with-experts"])
@pytest.mark.parametrize("degree", [1, 2, 4, 8, 16, 32, 64])
def test_a_cut_is_told_as_the_layers_tell_it(
    plan: LoadPlan, degree: int, experts: bool
) -> None:
    types: Mapping[str, GGMLType] = plan.block_types()
    found = engine.cut_error(
        diagnosis._representatives(types), plan.config, degree, experts=experts
    )
    assert found == engine.cut_error(types, plan.config, degree, experts=experts)
    assert (found is not None) == (degree > 8 and not experts)


def test_types_may_change_from_layer_to_layer(plan: LoadPlan) -> None:
    types = plan.block_types()
    types["model.layers.3.mlp.experts.down_proj"] = GGML_TYPES_BY_NAME["Q8_0"]
    found = engine.cut_error(
        diagnosis._representatives(types), plan.config, 16, experts=False
    )
    assert found == engine.cut_error(types, plan.config, 16, experts=False)
    assert str(found).startswith("model.layers.4.mlp.experts.down_proj: ")


def test_parts_must_be_equal(plan: LoadPlan) -> None:
    assert uneven_parts(plan.config, 8, experts=False) == []
    assert uneven_parts(plan.config, 3, experts=False) == [
        "64 attention heads",
        "154880 rows of the padded vocabulary",
        "2048 columns of the shared experts",
        "2048 columns of the routed experts",
    ]


def test_the_fullest_rank_counts(plan: LoadPlan) -> None:
    split = Split(6, 1, True, (78,))
    assert local_experts(plan.config, split) == 43
    assert local_experts(plan.config, replace(split, experts=False)) == 256


def test_vllm_deals_out_the_layers(
    plan: LoadPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.default_layers(plan.config, 4) == (19, 20, 20, 19)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "38,40")
    assert engine.default_layers(plan.config, 2) == (38, 40)
    with pytest.raises(ValueError, match="does not match"):
        engine.default_layers(plan.config, 3)


def test_layers_that_are_alike_are_asked_about_once(plan: LoadPlan) -> None:
    types = plan.block_types()
    assert len(diagnosis._representatives(types)) < 40 < 700 < len(types)
