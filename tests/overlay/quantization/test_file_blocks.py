# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Blocks that are read when a layer says which part it needs, against whole tensors."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.gguf_weights import file_experts, file_tensor
from tests.helpers.gguf_writer import Tensor, write_gguf
from tests.overlay.quantization import test_embedding as tables
from tests.overlay.quantization import test_moe as experts
from vllm.model_executor.layers.linear import MergedColumnParallelLinear
from vllm.model_executor.layers.quantization.gguf.config import GGUFConfig
from vllm.model_executor.layers.quantization.gguf.layout import lay_out, load_shard
from vllm.model_executor.model_loader.gguf import file_blocks
from vllm.model_executor.model_loader.gguf.file_blocks import BlockReader, lane_maker
from vllm.model_executor.model_loader.gguf.spans import Span
from vllm.model_executor.model_loader.gguf.transport import CudaLane, HostLane
from vllm.transformers_utils.gguf.errors import GGUFError
from vllm.transformers_utils.gguf.ggml_types import GGML_TYPES_BY_NAME
from vllm.transformers_utils.gguf.reader import GGUFFile, open_gguf

pytestmark = pytest.mark.usefixtures("vllm_layers")

EXPERTS, ROWS, COLUMNS = 4, 64, 2048
KIND = GGML_TYPES_BY_NAME["Q4_K"]


@pytest.fixture
def stack() -> torch.Tensor:
    return file_experts("Q4_K", EXPERTS, ROWS, COLUMNS)


@pytest.fixture
def file(stack: torch.Tensor, tmp_path: Path) -> Iterator[GGUFFile]:
    yield from opened(tmp_path / "a.gguf", {"stack": ("Q4_K", COLUMNS, stack)})


def opened(
    path: Path, tensors: dict[str, tuple[str, int, torch.Tensor]]
) -> Iterator[GGUFFile]:
    """The file of tensors: name -> (type, columns, blocks)."""
    written = [
        Tensor(name, (columns, *blocks.shape[-2::-1]), kind, blocks.numpy().tobytes())
        for name, (kind, columns, blocks) in tensors.items()
    ]
    write_gguf(path, {"general.architecture": "x"}, written)
    with open_gguf(path) as file:
        yield file


@pytest.fixture(params=["mapped", "threads"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Targets are loaded as on the CPU, or as on another device."""
    if request.param == "threads":
        through_threads(monkeypatch)
    return request.param


def through_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load parameters on the CPU as if they were on another device."""

    def read_into(self: BlockReader, span: Span, target: torch.Tensor) -> None:
        self._shards.add(span.shard)
        self._transport(target.device).order(span, target)

    monkeypatch.setattr(BlockReader, "read_into", read_into)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_every_rank_gets_what_it_cuts_from_a_whole_tensor(
    cut: str, parts: int, way: str, file: GGUFFile, stack: torch.Tensor
) -> None:
    row_parts, column_parts = (parts, 1) if cut == "rows" else (1, parts)
    (shard,) = lay_out([KIND], [ROWS // row_parts], COLUMNS // column_parts, "x")
    options = {"row_parts": row_parts, "column_parts": column_parts, "what": "x"}
    for rank in range(parts):
        found, expected = (shard.view(torch.zeros(shard.nbytes).byte()) for _ in "ab")
        with BlockReader(file) as reader:
            blocks = reader.matrix(file.tensors["stack"], 2)
            load_shard(found, shard, blocks, rank=rank, **options)
        load_shard(expected, shard, stack[2], rank=rank, **options)
        assert torch.equal(found, expected)


def test_ranks_read_their_rows_and_nothing_else(
    file: GGUFFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    through_threads(monkeypatch)
    read, places = os.preadv, []

    def noted(descriptor: int, buffers: list[Any], offset: int) -> int:
        count = read(descriptor, buffers, offset)
        places.append((offset, count))
        return count

    monkeypatch.setattr(os, "preadv", noted)
    (shard,) = lay_out([KIND], [ROWS // 4], COLUMNS, "x")
    options = {"row_parts": 4, "column_parts": 1, "rank": 3, "what": "x"}
    info = file.tensors["stack"]
    with BlockReader(file) as reader:
        target = shard.view(torch.empty(shard.nbytes, dtype=torch.uint8))
        load_shard(target, shard, reader.matrix(info, 1), **options)
    matrix = info.nbytes // EXPERTS
    assert places == [(info.offset + matrix + matrix * 3 // 4, matrix // 4)]


def test_experts_are_loaded_unread(way: str, tmp_path: Path) -> None:
    tensors = experts.stacked()
    sizes = {"w1": experts.HIDDEN, "w3": experts.HIDDEN, "w2": experts.INTERMEDIATE}
    kinds = dict(zip(tensors, experts.TYPES, strict=True))
    contents = {name: (kinds[name], sizes[name], tensors[name]) for name in tensors}
    layer = experts.make_experts()
    (file,) = opened(tmp_path / "a.gguf", contents)
    with file, BlockReader(file) as reader:
        for shard_id in tensors:
            param = experts.parameter_of(layer, shard_id)
            for expert in range(experts.EXPERTS):
                blocks = reader.matrix(file.tensors[shard_id], expert)
                assert param.weight_loader(
                    param,
                    blocks,
                    "",
                    shard_id=shard_id,
                    expert_id=expert,
                    return_success=True,
                )
    expected = experts.make_experts()
    experts.load(expected, tensors)
    assert torch.equal(layer.w13_qweight, expected.w13_qweight)
    assert torch.equal(layer.w2_qweight, expected.w2_qweight)


@pytest.mark.parametrize("rank", [0, 1])
def test_vocabulary_is_loaded_unread(
    rank: int, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables.on_rank(monkeypatch, rank, 2)
    blocks = file_tensor("Q4_K", tables.VOCAB, tables.HIDDEN)
    (file,) = opened(tmp_path / "a.gguf", {"t": ("Q4_K", tables.HIDDEN, blocks)})
    found, expected = tables.embedding(), tables.embedding()
    found.qweight.data.fill_(255)
    with file, BlockReader(file) as reader:
        unread = reader.matrix(file.tensors["t"])
        found.qweight.weight_loader(found.qweight, unread)
    expected.qweight.weight_loader(expected.qweight, blocks)
    assert torch.equal(found.qweight, expected.qweight)


def test_fused_projections_are_loaded_unread(way: str, tmp_path: Path) -> None:
    kinds = {"gate_proj": "Q8_0", "up_proj": "Q4_K"}
    blocks = {name: file_tensor(kind, 32, 256) for name, kind in kinds.items()}
    contents = {name: (kinds[name], 256, blocks[name]) for name in kinds}
    types = {f"mlp.{name}": GGML_TYPES_BY_NAME[kind] for name, kind in kinds.items()}
    layer = MergedColumnParallelLinear(
        256,
        [32, 32],
        bias=False,
        quant_config=GGUFConfig(types),
        prefix="mlp.gate_up_proj",
    )
    (file,) = opened(tmp_path / "a.gguf", contents)
    with file, BlockReader(file) as reader:
        for shard_id, name in enumerate(kinds):
            unread = reader.matrix(file.tensors[name])
            layer.qweight.weight_loader(layer.qweight, unread, shard_id)
    whole = torch.cat([part.flatten() for part in blocks.values()])
    assert torch.equal(layer.qweight.data, whole)


def test_some_rows_of_each_matrix_can_be_taken(
    way: str, file: GGUFFile, stack: torch.Tensor
) -> None:
    with BlockReader(file) as reader:
        unread = reader.matrix(file.tensors["stack"], 1, (16, 48))
        assert (unread.dim(), unread.dtype) == (2, torch.uint8)
        target = torch.empty(unread.shape, dtype=torch.uint8)
        unread.read_into(target)
    assert torch.equal(target, stack[1, 16:48])


def test_target_of_another_shape_is_refused(file: GGUFFile) -> None:
    with (
        pytest.raises(ValueError, match=r"stack: uint8 \[64, 1152\] .* \[1152, 64\]"),
        BlockReader(file) as reader,
    ):
        unread = reader.matrix(file.tensors["stack"])
        unread.read_into(torch.empty(1152, 64, dtype=torch.uint8))


def test_matrix_of_another_size_is_refused(file: GGUFFile) -> None:
    (shard,) = lay_out([KIND], [ROWS * 2], COLUMNS, "model.x")
    target = shard.view(torch.empty(shard.nbytes, dtype=torch.uint8))
    options = {"row_parts": 1, "column_parts": 1, "rank": 0, "what": "model.x"}
    with (
        pytest.raises(ValueError, match=r"model.x: .* \[128, 1152\]; .* \[64, 1152\]"),
        BlockReader(file) as reader,
    ):
        load_shard(target, shard, reader.matrix(file.tensors["stack"]), **options)


def test_file_that_changes_while_it_is_read_is_refused(
    way: str, file: GGUFFile
) -> None:
    def load() -> None:
        with BlockReader(file) as reader:
            unread = reader.matrix(file.tensors["stack"])
            unread.read_into(torch.empty(unread.shape, dtype=torch.uint8))
            os.utime(file.paths[0], ns=(1, 1))

    with pytest.raises(GGUFError, match="a.gguf: the file changed after its header"):
        load()


def test_error_of_the_block_comes_before_a_changed_file(file: GGUFFile) -> None:
    def load() -> None:
        with BlockReader(file) as reader:
            reader.matrix(file.tensors["stack"]).narrow(0, 0, 1).read_into(
                torch.empty(1, 1152, dtype=torch.uint8)
            )
            os.utime(file.paths[0], ns=(1, 1))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        load()


@pytest.mark.parametrize("can_pin", [True, False])
def test_lanes_fit_the_device(can_pin: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_blocks, "is_pin_memory_available", lambda: can_pin)
    cuda = lane_maker(torch.device("cuda", 0))
    if can_pin:
        assert cuda.func is CudaLane and cuda.args == (torch.device("cuda", 0),)
    else:
        assert cuda is HostLane
    assert lane_maker(torch.device("cpu")) is HostLane
