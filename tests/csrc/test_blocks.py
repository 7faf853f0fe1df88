# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Decoding of blocks in CUDA C++, compiled for the host: gguf-py's weights, bit by bit.

The kernels call the same functions; only a few instructions are written twice, for
either side.
"""

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.ggml_quantize import random_blocks
from tests.helpers.gguf_random import expected_weights, random_bytes
from vllm.model_executor.layers.quantization.gguf.cuda_extension import (
    CUDA_TYPES,
    alignment,
)
from vllm.model_executor.layers.quantization.gguf.triton_decode import tables
from vllm.transformers_utils.gguf.ggml_types import GGML_TYPES_BY_NAME

_SOURCE = Path(__file__).parents[2] / "csrc/gguf/decode_on_host.cpp"
_COLUMNS = 512


def _compile(folder: Path, *more: str) -> ctypes.CDLL:
    target = folder / "decode.so"
    options = ["-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
    options += ["-ffp-contract=off", *more]
    command = ["g++", *options, "-shared", "-fPIC", str(_SOURCE), "-o", str(target)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(target))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return _compile(tmp_path_factory.mktemp("csrc"))


@pytest.fixture(scope="module")
def strict_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """One that says on stderr what the C++ standard leaves undefined."""
    folder = tmp_path_factory.mktemp("strict")
    return _compile(folder, "-fsanitize=undefined", "-static-libubsan")


def _decode(library: ctypes.CDLL, type_name: str, blocks: np.ndarray) -> np.ndarray:
    kind = GGML_TYPES_BY_NAME[type_name]
    table = tables(kind, torch.device("cpu")).numpy()
    weights = np.full(len(blocks) * _COLUMNS, np.nan, dtype=np.float32)
    args = (np.ascontiguousarray(blocks), table, weights)
    raw, codebook, out = (ctypes.c_void_p(a.ctypes.data) for a in args)
    # First without a row, to ask for the columns of a run.
    columns = library.decode_blocks(kind.id, raw, ctypes.c_int64(0), codebook, out)
    assert columns and _COLUMNS % columns == 0
    runs = ctypes.c_int64(weights.size // columns)
    library.decode_blocks(kind.id, raw, runs, codebook, out)
    return weights.reshape(len(blocks), _COLUMNS)


@pytest.mark.parametrize("source", ["ggml", "random bytes"])
@pytest.mark.parametrize("type_name", sorted(CUDA_TYPES))
def test_weights_are_those_of_gguf_py(
    library: ctypes.CDLL, type_name: str, source: str
) -> None:
    kind = GGML_TYPES_BY_NAME[type_name]
    if source == "ggml":
        blocks = torch.from_numpy(random_blocks(type_name, 16, _COLUMNS).copy())
    else:
        blocks = random_bytes(kind, 64, _COLUMNS, seed=5)
    expected = expected_weights(kind, blocks)
    found = torch.from_numpy(_decode(library, type_name, blocks.numpy()))
    assert expected.unique().numel() > 8
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("type_name", sorted(CUDA_TYPES))
def test_numbers_are_read_where_blocks_may_begin(
    strict_library: ctypes.CDLL, capfd: pytest.CaptureFixture[str], type_name: str
) -> None:
    """A device does not read a number at another address than a multiple of its size,
    nor shift by any count."""
    kind = GGML_TYPES_BY_NAME[type_name]
    blocks = random_bytes(kind, 16, _COLUMNS, seed=6)
    room = np.zeros(blocks.numel() + 64, dtype=np.uint8)
    # As far from a multiple of 32 as a block may be: no more is ever promised.
    start = -room.ctypes.data % 32 + alignment(kind)
    moved = room[start : start + blocks.numel()].reshape(blocks.shape)
    moved[:] = blocks.numpy()
    found = torch.from_numpy(_decode(strict_library, type_name, moved))
    assert torch.equal(found, expected_weights(kind, blocks))
    assert capfd.readouterr().err == ""


def test_other_types_are_refused(library: ctypes.CDLL) -> None:
    kind = GGML_TYPES_BY_NAME["TQ1_0"]
    assert library.decode_blocks(kind.id, None, ctypes.c_int64(0), None, None) == 0
