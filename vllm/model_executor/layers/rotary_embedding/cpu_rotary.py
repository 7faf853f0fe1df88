# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Rotary embedding of per-head tensors on the CPU."""

from collections.abc import Callable

import torch

Rotate = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None],
    tuple[torch.Tensor, torch.Tensor | None],
]


def rotate_flattened(
    rotate: Rotate,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate [tokens, heads, head_size] tensors in place, by way of 2-D ones.

    The compiled CPU operation is right for contiguous [tokens, heads * head_size]
    tensors only: of 3-D ones it rotates wrong rows, and it writes outside of strided
    ones. `rotate` is that operation; it works in place, and so does this function.
    """
    flat_query = _flatten(query)
    flat_key = None if key is None else _flatten(key)
    rotate(positions, flat_query, flat_key)
    _restore(query, flat_query)
    if key is not None and flat_key is not None:
        _restore(key, flat_key)
    return query, key


def _flatten(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(tensor.shape[0], -1).contiguous()


def _restore(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
