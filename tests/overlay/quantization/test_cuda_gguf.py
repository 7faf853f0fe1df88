# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Which products with GGUF blocks go to the CUDA C++ kernels, and to which of them."""

import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.overlay.quantization.cuda_gguf_fakes import (
    CSRC,
    FakeOps,
    schemas,
    types_of_header,
)
from tests.overlay.quantization.triton_gguf_cases import kind_of
from vllm.model_executor.layers.quantization.gguf import (
    cuda_extension,
    cuda_linear,
    cuda_moe,
    layout,
    moe,
    triton_linear,
    triton_moe,
)
from vllm.model_executor.layers.quantization.gguf.cuda_extension import CUDA_TYPES

GPU = torch.device("cuda", 0)
PLACES = {"Q4_K": 16, "IQ4_XS": 4, "Q4_1": 4, "Q8_0": 2, "IQ2_XXS": 2, "MXFP4": 1}


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> FakeOps:
    """The extension, as if it were there."""
    monkeypatch.setattr(cuda_extension, "is_available", lambda device: True)
    return FakeOps().install(monkeypatch.setattr)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Warnings of the extension, which nobody asked for yet."""
    texts: list[str] = []
    logger = types.SimpleNamespace(warning_once=lambda text, *a: texts.append(text % a))
    monkeypatch.setattr(cuda_extension, "logger", logger)
    monkeypatch.delitem(sys.modules, "vllm._glm_dsa_C", raising=False)
    cuda_extension.is_available.cache_clear()
    yield texts
    cuda_extension.is_available.cache_clear()


def tokens(count: int, columns: int = 256) -> torch.Tensor:
    return torch.zeros(count, columns, dtype=torch.bfloat16)


def blocks_of(name: str, rows: int = 3, columns: int = 256) -> torch.Tensor:
    return torch.zeros(rows, kind_of(name).row_bytes(columns), dtype=torch.uint8)


def experts_of(
    *names: str, count: int = 2, inner: int = 256, width: int = 256
) -> triton_moe.Experts:
    gate, up, down = (kind_of(name) for name in names)
    w13 = torch.zeros(
        count,
        inner * (gate.row_bytes(width) + up.row_bytes(width)),
        dtype=torch.uint8,
    )
    w2 = torch.zeros(count, width * down.row_bytes(inner), dtype=torch.uint8)
    return triton_moe.Experts(w13, w2, gate, up, down, inner, count)


def at(place: int, like: torch.Tensor, apart: int = 0) -> torch.Tensor:
    """A tensor of bytes like another, `place` bytes on, rows `apart`."""
    rows, size = like.shape
    room = torch.zeros(16 + place + rows * (size + apart), dtype=torch.uint8)
    room = room[-room.data_ptr() % 16 + place :]
    return room[: rows * (size + apart)].view(rows, -1)[:, :size]


def takes_linear(x: torch.Tensor, blocks: torch.Tensor, name: str) -> bool:
    return cuda_linear.takes_linear(x, blocks, kind_of(name))


def test_types_are_those_of_the_header() -> None:
    assert {name for _, name in types_of_header()} == CUDA_TYPES
    for number, name in types_of_header():
        assert kind_of(name).id == number


def test_alignment_and_runs_are_those_of_the_header(tmp_path: Path) -> None:
    source, program = tmp_path / "print.cpp", tmp_path / "print"
    source.write_text(
        """
        #include <cstdio>
        #include "gguf/types.cuh"
        #define LINE(NUMBER, T) \\
          std::printf("%s %d %d %d\\n", #T, vllm_glm_dsa::T::ALIGN, \\
                      vllm_glm_dsa::T::COLUMNS, vllm_glm_dsa::T::BYTES);
        int main() { GGUF_TYPES(LINE) }
        """
    )
    command = ["g++", "-std=c++17", f"-I{CSRC}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True)
    lines = [line.split() for line in printed.stdout.splitlines()]
    assert {name for name, *_ in lines} == CUDA_TYPES
    for name, align, columns, size in lines:
        kind = kind_of(name)
        assert cuda_extension.alignment(kind) == int(align), name
        assert cuda_extension._RUN % int(columns) == 0, name
        assert kind.row_bytes(int(columns)) == int(size), name


def test_constants_are_those_of_the_headers() -> None:
    text = "".join((CSRC / "gguf" / n).read_text() for n in ("tiles.h", "skinny.h"))
    found = dict(re.findall(r"constexpr int (\w+) = (\d+);", text))
    ours = {
        "SMALL_TILE": cuda_extension.SMALL_TILE,
        "LARGE_TILE": cuda_extension.LARGE_TILE,
        "MAX_TOP_K": cuda_moe.MAX_TOP_K,
    }
    assert ours == {name: int(found[name]) for name in ours}


def test_every_operator_is_implemented_for_cuda() -> None:
    text = (CSRC / "bindings.cpp").read_text("utf-8")
    implemented = re.findall(r"m\.impl\(\"(\w+)\"", text)
    assert sorted(implemented) == sorted(schemas())


@pytest.mark.parametrize("name", sorted(CUDA_TYPES))
def test_all_types_of_the_header_are_taken(ops: FakeOps, name: str) -> None:
    assert takes_linear(tokens(1), blocks_of(name), name)
    x, ids = tokens(1), torch.zeros(1, 2, dtype=torch.int64)
    assert cuda_moe.takes_experts(x, experts_of(name, name, name), ids)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "TQ1_0", "TQ2_0", "NVFP4"])
def test_other_types_are_not(ops: FakeOps, name: str) -> None:
    assert not takes_linear(tokens(1), blocks_of(name), name)
    x, ids = tokens(1), torch.zeros(1, 2, dtype=torch.int64)
    assert not cuda_moe.takes_experts(x, experts_of(name, name, "Q8_0"), ids)
    assert not cuda_moe.takes_experts(x, experts_of("Q8_0", "Q8_0", name), ids)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes_are_not(ops: FakeOps, dtype: torch.dtype) -> None:
    x, ids = tokens(1).to(dtype), torch.zeros(1, 2, dtype=torch.int64)
    assert not takes_linear(x, blocks_of("Q8_0"), "Q8_0")
    assert not cuda_moe.takes_experts(x, experts_of(*["Q8_0"] * 3), ids)


@pytest.mark.parametrize("columns", [128, 384, 800])
def test_rows_that_end_within_a_run_are_not(ops: FakeOps, columns: int) -> None:
    x, ids = tokens(1, columns), torch.zeros(1, 2, dtype=torch.int64)
    assert not takes_linear(x, blocks_of("Q8_0", 3, columns), "Q8_0")
    of = ["Q8_0"] * 3
    assert not cuda_moe.takes_experts(x, experts_of(*of, width=columns), ids)
    assert not cuda_moe.takes_experts(tokens(1), experts_of(*of, inner=columns), ids)


@pytest.mark.parametrize(("name", "multiple"), PLACES.items())
def test_rows_begin_where_their_type_can_be_read(
    ops: FakeOps, name: str, multiple: int
) -> None:
    x = tokens(1)
    for place in range(17):
        fits = place % multiple == 0
        assert takes_linear(x, at(place, blocks_of(name)), name) == fits
        assert takes_linear(x, at(0, blocks_of(name), place), name) == fits


@pytest.mark.parametrize(("name", "multiple"), PLACES.items())
def test_experts_begin_where_their_types_can_be_read(
    ops: FakeOps, name: str, multiple: int
) -> None:
    x, ids = tokens(1), torch.zeros(1, 2, dtype=torch.int64)
    of = experts_of(name, name, name)
    for place in range(17):
        fits = place % multiple == 0
        for which in ("w13", "w2"):
            for moved in (
                at(place, getattr(of, which)),
                at(0, getattr(of, which), place),
            ):
                found = cuda_moe.takes_experts(x, replace(of, **{which: moved}), ids)
                assert found == fits, (place, which)


def test_tokens_begin_where_16_bytes_can_be_copied(ops: FakeOps) -> None:
    wide, ids = tokens(4, 264), torch.zeros(4, 2, dtype=torch.int64)
    blocks, of = blocks_of("Q8_0"), experts_of(*["Q8_0"] * 3)
    bad = (wide[:, 4:260], tokens(4, 260)[:, :256], tokens(4, 512)[:, ::2])
    for x in (wide[:, :256], wide[:, 8:]):
        assert takes_linear(x, blocks, "Q8_0")
        assert cuda_moe.takes_experts(x, of, ids)
    for x in bad:
        assert not takes_linear(x, blocks, "Q8_0")
        assert not cuda_moe.takes_experts(x, of, ids)


def test_gate_and_up_are_of_one_type(ops: FakeOps) -> None:
    x, ids = tokens(1), torch.zeros(1, 2, dtype=torch.int64)
    assert cuda_moe.takes_experts(x, experts_of("Q4_K", "Q4_K", "IQ2_XXS"), ids)
    # Of as many bytes, even.
    assert not cuda_moe.takes_experts(x, experts_of("Q4_K", "IQ4_NL", "Q4_K"), ids)


def test_numbers_of_tokens_choices_and_rows(ops: FakeOps) -> None:
    most = cuda_linear.MANY_TOKENS
    for count, taken in ((0, False), (1, True), (most, True), (most + 1, False)):
        assert takes_linear(tokens(count), blocks_of("Q8_0"), "Q8_0") == taken
    assert not takes_linear(tokens(1), blocks_of("Q8_0", 0), "Q8_0")
    of = experts_of(*["Q8_0"] * 3)
    sizes = ((0, 2), (1, 0), (1, 33), (1, 1), (1, 32), (most + 1, 2))
    found = [
        cuda_moe.takes_experts(tokens(n), of, torch.zeros(n, k, dtype=torch.int64))
        for n, k in sizes
    ]
    assert found == [False, False, False, True, True, True]
    none = experts_of(*["Q8_0"] * 3, count=0)
    ids = torch.full((1, 2), -1)
    assert not cuda_moe.takes_experts(tokens(1), none, ids)


@pytest.mark.parametrize(
    ("count", "called"),
    [
        (1, ("skinny_linear", None)),
        (16, ("skinny_linear", None)),
        (17, ("tiles_linear", 32)),
        (64, ("tiles_linear", 32)),
        (65, ("tiles_linear", 128)),
        (768, ("tiles_linear", 128)),
        (769, None),
    ],
)
def test_matrix_by_number_of_tokens(
    ops: FakeOps,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    called: tuple[str, int | None] | None,
) -> None:
    """By the operator of the layer; two matrices of one type are one."""
    to_triton: list[int] = []

    def triton(x: torch.Tensor, *args: object, **kwargs: object) -> None:
        to_triton.append(len(x))

    monkeypatch.setattr(triton_linear, "triton_linear", triton)
    kinds = [kind_of(name) for name in ("Q8_0", "Q8_0", "TQ2_0")]
    blocks = torch.cat([blocks_of(kind.name).flatten() for kind in kinds])
    x = torch.ones(count, 256, dtype=torch.bfloat16)
    blocks[: 2 * 3 * 272].view(6, 8, 34)[..., :2] = torch.tensor([0, 0x3C])
    blocks[: 2 * 3 * 272].view(6, 8, 34)[:, 0, 2] = torch.arange(1, 7)
    out = layout._linear_on_gpu(x, blocks, [kind.id for kind in kinds], [3, 3, 3])
    assert ops.sizes() == ([called] if called else [])
    assert to_triton == [count] * (1 if called else 2)
    if called:
        want = torch.arange(1, 7, dtype=torch.bfloat16).expand(count, 6)
        assert torch.equal(out[:, :6], want)


@pytest.mark.parametrize(
    ("count", "calls"),
    [
        (12, [("skinny_experts", None)]),
        (13, [("tiles_experts", 32)] * 2),
        (640, [("tiles_experts", 32)] * 2),
        (641, [("tiles_experts", 128)] * 2),
    ],
)
def test_experts_by_number_of_slots(
    ops: FakeOps,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    calls: list[tuple[str, int | None]],
) -> None:
    """16 experts on all ranks, of which this one has two."""
    tiles: list[int] = []

    def sort_slots(ids: torch.Tensor, experts: int, tile: int) -> tuple:
        tiles.append(tile)
        none = torch.zeros(4, dtype=torch.int32)
        return torch.arange(ids.numel()), none, 1

    monkeypatch.setattr(cuda_moe, "sort_slots", sort_slots)
    monkeypatch.setattr(cuda_moe, "sum_slots", lambda *args: None)
    of = experts_of("Q4_K", "Q4_K", "Q8_0")
    ids = torch.full((count, 1), -1)
    types_of = [kind.id for kind in (of.gate, of.up, of.down)]
    args = (torch.rand(count, 1), ids, types_of, of.intermediate, 16)
    moe._experts_on_gpu(tokens(count), of.w13, of.w2, *args)
    assert ops.sizes() == calls
    assert set(tiles) == {tile for _, tile in calls if tile}


def test_what_does_not_fit_is_left_to_triton(
    ops: FakeOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def triton_experts(x: torch.Tensor, *args: object) -> torch.Tensor:
        found.append(x.dtype)
        return x

    monkeypatch.setattr(triton_moe, "triton_experts", triton_experts)
    of = experts_of(*["Q8_0"] * 3)
    types_of = [kind.id for kind in (of.gate, of.up, of.down)]
    args = (torch.rand(1, 1), torch.zeros(1, 1, dtype=torch.int64), types_of, 256, 2)
    moe._experts_on_gpu(tokens(1).half(), of.w13, of.w2, *args)
    assert found == [torch.float16] and ops.calls == []


def test_without_the_extension_one_warning_says_what_to_do(said: list[str]) -> None:
    x = tokens(1).to("meta")
    for _ in range(3):
        assert not cuda_extension.is_available(GPU)
        assert not cuda_extension.fits(x, kind_of("Q8_0"), 256, 0)
    first = said[0]
    # One for each device that is asked about: here the GPU, and that of `x`.
    assert said == [first, first]
    assert "cannot be imported (No module named 'vllm._glm_dsa_C')" in first
    assert "nvcc" in first and "VLLM_GLM_DSA_CUDA_ARCHS" in first


@pytest.mark.parametrize("has_code", [True, False])
def test_device_without_code_is_a_warning_too(
    said: list[str], monkeypatch: pytest.MonkeyPatch, has_code: bool
) -> None:
    asked: list[int] = []

    def has_kernels(device: int) -> bool:
        asked.append(device)
        return has_code

    module = types.ModuleType("vllm._glm_dsa_C")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    operators = torch.ops.vllm_glm_dsa
    monkeypatch.setattr(operators, "gguf_has_kernels", has_kernels, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    for _ in range(2):
        assert cuda_extension.is_available(torch.device("cuda", 3)) == has_code
    assert asked == [3]
    assert len(said) == (not has_code)
    assert all("no code for compute capability 7.5. Triton" in text for text in said)


def test_fits_asks_for_the_extension_last(said: list[str]) -> None:
    """What no kernel takes is no reason to warn."""
    assert not cuda_extension.fits(tokens(1).half(), kind_of("Q8_0"), 256, 0)
    assert not cuda_extension.fits(tokens(1), kind_of("F16"), 256, 0)
    assert not cuda_extension.fits(tokens(1), kind_of("Q8_0"), 128, 0)
    assert not cuda_extension.fits(tokens(1), kind_of("Q8_0"), 256, 1)
    assert said == []
