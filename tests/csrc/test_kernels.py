# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The CUDA C++ kernels on GGUF blocks, run on the host, against float64.

`simt.h` switches between the threads of a block, so this is the kernels' own code but
for five functions. It cannot show what only a GPU does: see tests/gpu.
"""

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.ggml_quantize import random_blocks
from tests.helpers.gguf_random import expected_weights
from vllm.model_executor.layers.quantization.gguf.cuda_extension import (
    CUDA_TYPES,
    LARGE_TILE,
    SMALL_TILE,
    alignment,
)
from vllm.model_executor.layers.quantization.gguf.triton_decode import tables
from vllm.transformers_utils.gguf.ggml_types import GGML_TYPES_BY_NAME, GGMLType

_ROOT = Path(__file__).parents[2]
_CPU = torch.device("cpu")
# Relative errors. Tiles round scales, minima and weights, most of all minima, which are
# larger than the weights.
_FEW, _TILES, _TILES_HIDDEN = 2.5e-3, 6e-3, 9e-3
_LINEAR, _GATE_UP, _DOWN = range(3)
# Copies at once or late, threads forwards or backwards.
_ORDERS = (0, 3)
# What one type of a group shows, its neighbors show too, but for decoding, of which
# test_blocks.py tests all.
_SOME_TYPES = ("Q4_K", "Q6_K", "Q8_0", "IQ2_XXS", "IQ1_M", "MXFP4")


class _Skinny(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("blocks", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("row_stride", "expert_stride")),
        ("up_offset", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("ids", "router", "table", "out")),
        ("out_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("tokens", "rows", "columns", "top_k")),
        *((name, ctypes.c_int) for name in ("row_warps", "stages")),
    ]


class _Tiles(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("blocks", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("row_stride", "expert_stride")),
        ("up_offset", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("order", "tiles", "table", "out")),
        ("out_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("tokens", "rows", "columns", "top_k")),
        ("max_tiles", ctypes.c_int),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("csrc") / "kernels.so"
    here = _ROOT / "tests/csrc"
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
    command += [f"-I{_ROOT / 'csrc'}", f"-I{here / 'stand_ins'}", "-shared", "-fPIC"]
    source = here / "kernels_on_host.cpp"
    subprocess.run([*command, str(source), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def _shifted(values: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy that begins `offset` bytes behind a multiple of 64, with room around."""
    data = values.contiguous().view(torch.uint8).flatten()
    room = torch.full((data.numel() + 256,), 0xFF, dtype=torch.uint8)
    start = -room.data_ptr() % 64 + offset
    place = room[start : start + data.numel()]
    place.copy_(data)
    return place.view(values.dtype).view(values.shape)


def _blocks(kind: GGMLType, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(random_blocks(kind.name, rows, columns, seed).copy())


def _x(tokens: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=generator).bfloat16()
    return _shifted(x, 0)


def _nan(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=torch.bfloat16)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def _fill(args: Any, kind: GGMLType, **values: Any) -> Any:
    """Set fields; tensors give their address, and are kept alive by `args`."""
    values["table"] = tables(kind, _CPU)
    args.kept = values
    for name, value in values.items():
        is_tensor = isinstance(value, torch.Tensor)
        setattr(args, name, value.data_ptr() if is_tensor else value)
    return args


def _offsets(kind: GGMLType) -> Iterator[int]:
    """Bytes by which blocks may begin behind a multiple of 64."""
    step = alignment(kind)
    return iter((0,) if step == 16 else (0, 7 * step))


@pytest.mark.parametrize("order", _ORDERS)
@pytest.mark.parametrize(
    ("tokens", "row_warps", "stages"), [(1, 1, 2), (1, 4, 3), (7, 2, 2), (9, 8, 3)]
)
@pytest.mark.parametrize("type_name", _SOME_TYPES)
def test_few_tokens(
    library: ctypes.CDLL,
    type_name: str,
    tokens: int,
    row_warps: int,
    stages: int,
    order: int,
) -> None:
    kind = GGML_TYPES_BY_NAME[type_name]
    rows, columns = 37, 1280
    blocks, x = _blocks(kind, rows, columns), _x(tokens, columns)
    expected = x.double() @ expected_weights(kind, blocks).double().T
    for offset in _offsets(kind):
        out = _nan(tokens + 1, rows)
        moved = _shifted(blocks, offset)
        args = _fill(
            _Skinny(),
            kind,
            **{"x": x, "x_stride": columns, "blocks": moved},
            **{"row_stride": blocks.shape[1], "out": out, "out_stride": rows},
            **{"tokens": tokens, "rows": rows, "columns": columns},
            **{"row_warps": row_warps, "stages": stages},
        )
        assert library.run_skinny(kind.id, _LINEAR, ctypes.byref(args), order) == 0
        assert _error(out[:tokens], expected) < _FEW
        assert out[tokens].isnan().all()


@pytest.mark.parametrize("type_name", sorted(CUDA_TYPES))
def test_few_tokens_of_all_types(library: ctypes.CDLL, type_name: str) -> None:
    for tokens in (1, 2):
        test_few_tokens(library, type_name, tokens, 1, 2, order=3)


def _experts(
    kind: GGMLType, tokens: int, hidden: int, inner: int, top_k: int
) -> dict[str, torch.Tensor]:
    """Four experts; some slots have none, with a router weight of NaN."""
    generator = torch.Generator().manual_seed(1)
    count = 4
    gate_up = _blocks(kind, count * 2 * inner, hidden, seed=1)
    down = _blocks(kind, count * hidden, inner, seed=2)
    ids = torch.stack(
        [torch.randperm(count, generator=generator)[:top_k] for _ in range(tokens)]
    )
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    router = torch.rand(tokens, top_k, generator=generator)
    router[ids < 0] = float("nan")
    weights = expected_weights(kind, gate_up).double().view(count, 2 * inner, hidden)
    return {
        **{"ids": ids, "router": router, "weights": weights},
        "w13": _shifted(gate_up, 0).view(count, -1),
        "w2": _shifted(down, 0).view(count, -1),
        "down": expected_weights(kind, down).double().view(count, hidden, inner),
    }


def _hidden(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    gate, up = (weights @ x.double()).chunk(2)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("order", _ORDERS)
@pytest.mark.parametrize("type_name", _SOME_TYPES)
def test_experts_of_few_slots(library: ctypes.CDLL, type_name: str, order: int) -> None:
    kind = GGML_TYPES_BY_NAME[type_name]
    tokens, width, inner, top_k = 3, 512, 256, 3
    data = _experts(kind, tokens, width, inner, top_k)
    x, ids = _x(tokens, width), data["ids"]
    hidden, out = _shifted(_nan(tokens * top_k, inner), 0), _nan(tokens, width)
    w13, w2 = data["w13"], data["w2"]
    common = {"ids": ids, "router": data["router"], "tokens": tokens, "top_k": top_k}
    common |= {"row_warps": 2, "stages": 2 + order % 2}
    args = _fill(
        _Skinny(),
        kind,
        **common,
        **{"x": x, "x_stride": width, "blocks": w13, "expert_stride": w13.shape[1]},
        **{"row_stride": w13.shape[1] // (2 * inner), "up_offset": w13.shape[1] // 2},
        **{"out": hidden, "out_stride": inner, "rows": inner, "columns": width},
    )
    assert library.run_skinny(kind.id, _GATE_UP, ctypes.byref(args), order) == 0
    expected = torch.zeros(tokens, width, dtype=torch.double)
    for slot, expert in enumerate(ids.flatten().tolist()):
        if expert < 0:
            assert hidden[slot].isnan().all()
            continue
        wanted = _hidden(x[slot // top_k], data["weights"][expert])
        assert _error(hidden[slot], wanted) < 3e-3
        value = data["down"][expert] @ hidden[slot].double()
        expected[slot // top_k] += value * data["router"].flatten()[slot].double()
    args = _fill(
        _Skinny(),
        kind,
        **common,
        **{"x": hidden, "x_stride": inner, "blocks": w2, "expert_stride": w2.shape[1]},
        **{"row_stride": w2.shape[1] // width, "out": out, "out_stride": width},
        **{"rows": width, "columns": inner},
    )
    assert library.run_skinny(kind.id, _DOWN, ctypes.byref(args), order) == 0
    assert _error(out, expected) < _FEW


@pytest.mark.parametrize("order", _ORDERS)
@pytest.mark.parametrize(("tile", "tokens"), [(SMALL_TILE, 45), (LARGE_TILE, 131)])
@pytest.mark.parametrize("type_name", ["Q4_K", "Q6_K", "Q8_0", "IQ1_M"])
def test_tiles(
    library: ctypes.CDLL, type_name: str, tile: int, tokens: int, order: int
) -> None:
    kind = GGML_TYPES_BY_NAME[type_name]
    rows, columns = 141, 512
    blocks, x = _blocks(kind, rows, columns), _x(tokens, columns)
    expected = x.double() @ expected_weights(kind, blocks).double().T
    out = _nan(tokens + 1, rows)
    args = _fill(
        _Tiles(),
        kind,
        **{"x": x, "x_stride": columns, "blocks": _shifted(blocks, alignment(kind))},
        **{"row_stride": blocks.shape[1], "out": out, "out_stride": rows},
        **{"tokens": tokens, "rows": rows, "columns": columns},
    )
    assert library.run_tiles(kind.id, _LINEAR, tile, ctypes.byref(args), order) == 0
    assert _error(out[:tokens], expected) < _TILES
    assert out[tokens].isnan().all()


@pytest.mark.parametrize("type_name", sorted(CUDA_TYPES))
def test_tiles_of_all_types(library: ctypes.CDLL, type_name: str) -> None:
    test_tiles(library, type_name, SMALL_TILE, 9, order=3)


def _sorted_slots(ids: torch.Tensor, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `sort_slots` gives them, with two tiles more than there are."""
    slots = ids.flatten().numpy()
    order = np.argsort(np.where(slots < 0, 99, slots), kind="stable")
    found, start = [], 0
    for expert in range(4):
        end = start + int((slots == expert).sum())
        found += [(expert, first, end) for first in range(start, end, tile)]
        start = end
    table = np.full((3, len(found) + 2), -1)
    table[:, : len(found)] = np.array(found).T
    tiles = torch.from_numpy(np.append(table.flatten(), len(found)).astype(np.int32))
    return torch.from_numpy(order), tiles


@pytest.mark.parametrize("order", _ORDERS)
@pytest.mark.parametrize(("tile", "tokens"), [(SMALL_TILE, 50), (LARGE_TILE, 180)])
@pytest.mark.parametrize("type_name", ["Q4_K", "Q8_0"])
def test_experts_of_many_slots(
    library: ctypes.CDLL, type_name: str, tile: int, tokens: int, order: int
) -> None:
    kind = GGML_TYPES_BY_NAME[type_name]
    width, inner, top_k = 512, 256, 3
    data = _experts(kind, tokens, width, inner, top_k)
    x, ids, w13, w2 = _x(tokens, width), data["ids"], data["w13"], data["w2"]
    places, tiles = _sorted_slots(ids, tile)
    slots = ids.numel()
    common = {"order": places, "tiles": tiles, "max_tiles": (len(tiles) - 1) // 3}
    hidden, out = _shifted(_nan(slots, inner), 0), _nan(slots, width)
    args = _fill(
        _Tiles(),
        kind,
        **common,
        **{"x": x, "x_stride": width, "blocks": w13, "expert_stride": w13.shape[1]},
        **{"row_stride": w13.shape[1] // (2 * inner), "up_offset": w13.shape[1] // 2},
        **{"out": hidden, "out_stride": inner, "rows": inner, "columns": width},
        top_k=top_k,
    )
    assert library.run_tiles(kind.id, _GATE_UP, tile, ctypes.byref(args), order) == 0
    args = _fill(
        _Tiles(),
        kind,
        **common,
        **{"x": hidden, "x_stride": inner, "blocks": w2, "expert_stride": w2.shape[1]},
        **{"row_stride": w2.shape[1] // width, "out": out, "out_stride": width},
        **{"rows": width, "columns": inner},
    )
    assert library.run_tiles(kind.id, _DOWN, tile, ctypes.byref(args), order) == 0
    chosen = ids.flatten()[places]
    assert hidden[chosen < 0].isnan().all() and out[places[chosen < 0]].isnan().all()
    for expert in range(4):
        mine = chosen == expert
        tokens_of = places[mine] // top_k
        wanted = torch.stack(
            [_hidden(x[t], data["weights"][expert]) for t in tokens_of]
        )
        assert _error(hidden[mine], wanted) < _TILES_HIDDEN
        wanted = hidden[mine].double() @ data["down"][expert].T
        assert _error(out[places[mine]], wanted) < _TILES
