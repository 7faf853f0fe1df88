# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What the doctor says about a file alone, on files of GLM-5's size."""

import time
from collections import Counter
from pathlib import Path

import pytest

from tests.overlay.doctor.glm5 import write_glm5
from vllm.transformers_utils.gguf.doctor.contents import (
    MTP_KIND,
    UNUSED_KIND,
    Contents,
    describe_contents,
    kinds,
)
from vllm.transformers_utils.gguf.doctor.diagnosis import diagnose
from vllm.transformers_utils.gguf.doctor.machine import GIB, Machine
from vllm.transformers_utils.gguf.doctor.trial import Request
from vllm.transformers_utils.gguf.plan import make_plan
from vllm.transformers_utils.gguf.reader import open_gguf

ALL_FULL = [True] * 78


@pytest.fixture(scope="module")
def glm53(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_glm5(tmp_path_factory.mktemp("glm53"), vocabulary=True)


@pytest.fixture(scope="module")
def contents(glm53: Path) -> Contents:
    with open_gguf(glm53) as file:
        return describe_contents(file, make_plan(file))


def test_model_layers_and_indexers_are_those_of_the_file(contents: Contents) -> None:
    assert contents.family == "GLM-5.3"
    assert contents.hidden_layers == 78
    assert contents.dense_layers == 3
    assert contents.mtp_layers == 1
    assert contents.indexer_layers == (0, 1, *range(2, 78, 4))
    assert contents.shares_indexers
    assert contents.parameters == 753_864_139_008


def test_every_byte_is_in_one_row_of_the_table(contents: Contents) -> None:
    rows = contents.quantization
    assert sum(row.bytes for row in rows) == contents.total_bytes
    assert sum(row.tensors for row in rows) == 1809
    tensors = Counter[str]()
    for row in rows:
        tensors[row.kind] += row.tensors
    # Of 78 layers 57 share an indexer, so 5 tensors of each are surplus.
    assert tensors[UNUSED_KIND] == 57 * 5
    assert tensors["indexer"] == 21 * 5
    assert tensors[MTP_KIND] == 15 + 8 + 4
    assert set(tensors) == set(kinds())
    experts = {
        row.type: row.tensors for row in rows if row.kind == "routed experts, down"
    }
    assert experts == {"Q5_K": 74, "Q6_K": 1}


@pytest.mark.parametrize(
    ("name", "types", "family"),
    [
        ("Glm-5.2", None, "GLM-5.2"),
        ("unnamed", None, "GLM-5.2 or GLM-5.3"),
        ("GLM-5.1", ALL_FULL, "GLM-5.1"),
        ("GLM-5", ALL_FULL, "GLM-5"),
        # The layers say that the name is wrong.
        ("GLM-5.3", ALL_FULL, "GLM-5 or GLM-5.1"),
    ],
    ids=["5.2", "no-name", "5.1", "5", "contradiction"],
)
def test_family(
    tmp_path: Path, name: str, types: list[bool] | None, family: str
) -> None:
    keys = {"general.name": name, "general.basename": name}
    if types is not None:
        keys["glm-dsa.attention.indexer.types"] = types  # type: ignore[assignment]
    with open_gguf(write_glm5(tmp_path, metadata=keys)) as file:
        assert describe_contents(file, make_plan(file)).family == family


def test_a_file_of_real_size_takes_less_than_two_seconds(glm53: Path) -> None:
    """Once vLLM is imported; as processor time, as other processes are running."""
    machine = Machine("cpu", 1, 1024 * GIB, None, "CPU", True)
    diagnose(glm53, machine, Request())
    started = time.thread_time()
    diagnose(glm53, machine, Request())
    assert time.thread_time() - started < 2
