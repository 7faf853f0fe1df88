# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Products with GGUF blocks compile for all devices, and hardly spill registers."""

import re

import pytest
import torch

from tests.helpers.real_triton import compiling, stack_bytes, with_compiler
from tests.overlay.quantization.triton_gguf_cases import kind_of

# What one block may have on the devices with the least shared memory.
SHARED = 101_376
# Two registers, of one type on one device; tiles that spill none took up to 1.4 times
# as long on an H200.
STACK = 8
TYPES = ("Q4_K", "Q8_0", "Q6_K", "IQ2_XXS")
CASES = [(device, name) for device in (90, 120) for name in TYPES]
CASES += [(device, name) for device in (80, 89) for name in ("Q4_K", "IQ2_XXS")]
EXPERTS = 8


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8)


def compile_linear(name: str, tokens: int, dtype: torch.dtype) -> None:
    from vllm.model_executor.layers.quantization.gguf.triton_linear import triton_linear

    kind = kind_of(name)
    x, out = (
        torch.empty(tokens, 6144, dtype=dtype),
        torch.empty(tokens, 64, dtype=dtype),
    )
    blocks = bytes_of(64, kind.row_bytes(6144))
    triton_linear(x, blocks, kind, out, chunk_weights=1 << 24, parts=2)


def compile_moe(name: str, tokens: int, dtype: torch.dtype) -> None:
    from vllm.model_executor.layers.quantization.gguf import triton_moe

    kind = kind_of(name)
    w13 = bytes_of(EXPERTS, 2 * 256 * kind.row_bytes(6144))
    w2 = bytes_of(EXPERTS, 6144 * kind.row_bytes(256))
    experts = triton_moe.Experts(w13, w2, kind, kind, kind, 256, EXPERTS)
    ids = torch.zeros(tokens, EXPERTS, dtype=torch.int64)
    x = torch.empty(tokens, 6144, dtype=dtype)
    triton_moe.triton_experts(x, experts, torch.empty(tokens, EXPERTS), ids)


def check(kernels: list, device: int) -> None:
    for kernel in kernels:
        assert f".target sm_{device}" in kernel.asm["ptx"]
        assert kernel.metadata.shared <= SHARED, kernel.metadata.name
        assert stack_bytes(kernel.asm["cubin"]) <= STACK, kernel.metadata.name


@with_compiler
@pytest.mark.parametrize(("device", "name"), CASES)
def test_matrices(device, name):
    from vllm.model_executor.layers.quantization.gguf.triton_linear import MANY_TOKENS

    with compiling(device) as kernels:
        for tokens in (1, 2, 16, 32, MANY_TOKENS):
            compile_linear(name, tokens, torch.bfloat16)
    # Each is a product of parts and their sum.
    assert len(kernels) == 10
    check(kernels, device)


@with_compiler
@pytest.mark.parametrize(("device", "name"), CASES)
def test_experts(device, name):
    from vllm.model_executor.layers.quantization.gguf.triton_moe import moe_tile

    # As many tokens as slots of each of the experts.
    sizes = (1, 9, 32, 64, 80)
    assert [moe_tile(size).tokens for size in sizes[1:]] == [16, 32, 64, 128]
    with compiling(device) as kernels:
        for tokens in sizes:
            compile_moe(name, tokens, torch.bfloat16)
    assert len(kernels) == 2 + 4 * 4
    check(kernels, device)


@with_compiler
@pytest.mark.parametrize("device", [80, 120])
def test_float16_and_float32(device):
    with compiling(device) as kernels:
        for dtype in (torch.float16, torch.float32):
            for tokens in (1, 16):
                compile_linear("Q4_K", tokens, dtype)
                compile_moe("Q4_K", tokens, dtype)
    assert len(kernels) == 2 * (2 + 2 + 2 + 4)


@with_compiler
@pytest.mark.parametrize("name", TYPES)
def test_loops_for_few_tokens_do_not_use_shared_memory(name):
    """Weights and values are in the same threads; only sums go from warp to warp."""
    with compiling(90) as kernels:
        compile_linear(name, 1, torch.bfloat16)
        compile_moe(name, 1, torch.bfloat16)
    for kernel in (kernels[0], *kernels[2:4]):
        body = kernel.asm["ttgir"].split("scf.for", 1)[1].split("tt.reduce")[0]
        assert "tt.load" in body
        assert "convert_layout" not in body and "ttg.local" not in body


@with_compiler
@pytest.mark.parametrize("device", [80, 90])
def test_neighbors_in_a_thread_share_what_they_read(device):
    """A thread decodes 16 neighbors: their codebook and scales are few loads."""
    with compiling(device) as kernels:
        compile_linear("IQ2_XXS", 16, torch.bfloat16)
    loads = re.findall(r"ld\.global\.nc", kernels[0].asm["ptx"])
    # 32 weights for a thread; without `in_runs` 5 or 6 for each.
    assert 0 < len(loads) <= 32
