# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What the fused operations share: rotation in kernels, checks in front of them."""

from typing import Any

import torch

from vllm.triton_utils import tl, triton


@triton.jit
def load_cos_sin(table_ptr, table_stride, position, HALF: tl.constexpr):
    """A position's `HALF` cosines and `HALF` sines, float32; the table holds both."""
    row = table_ptr + position.to(tl.int64) * table_stride
    pair = tl.arange(0, HALF)
    cos = tl.load(row + pair).to(tl.float32)
    sin = tl.load(row + HALF + pair).to(tl.float32)
    return cos, sin


@triton.jit
def rotate(x, y, cos, sin):
    """The points (x, y) turned by the angles."""
    return x * cos - y * sin, y * cos + x * sin


@triton.jit
def index_pairs(HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Where the two elements of each rotated pair are: next to each other or not."""
    pair = tl.arange(0, HALF)
    first = pair * 2 if INTERLEAVED else pair
    second = first + (1 if INTERLEAVED else HALF)
    return first, second


def check_rows(name: str, tensor: torch.Tensor, *shape: int | None) -> None:
    """ValueError unless `tensor` has the shape, None being any size, and dense rows."""
    sizes = tensor.shape
    fits = len(sizes) == len(shape)
    for size, wanted in zip(sizes, shape, strict=False):
        if wanted != size and wanted is not None:
            fits = False
    if not fits:
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(sizes)}, expected [{expected}].")
    if sizes[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has strides {tensor.stride()}, expected 1 in the last dimension."
        )


def check_power_of_two(name: str, size: int) -> None:
    """ValueError unless a Triton block can have this size, and be made of pairs."""
    if size < 2 or size & (size - 1):
        raise ValueError(f"{name} is {size}, expected a power of two from 2 on.")


def vector_argument(
    name: str, tensor: torch.Tensor | None, size: int | None
) -> dict[str, Any]:
    """The kernel argument `name`_ptr, checked; None is left to the kernel."""
    if tensor is not None:
        check_rows(name, tensor, size)
    return {f"{name}_ptr": tensor}


def rows_arguments(
    name: str, tensor: torch.Tensor | None, *shape: int | None
) -> dict[str, Any]:
    """The kernel arguments `name`_ptr and `name`_stride, which is that of rows."""
    if tensor is None:
        return {f"{name}_ptr": None, f"{name}_stride": 0}
    check_rows(name, tensor, *shape)
    return {f"{name}_ptr": tensor, f"{name}_stride": tensor.stride(0)}
