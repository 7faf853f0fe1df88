# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Which implementation of a fused operation a device gets."""

import functools
from collections.abc import Callable
from typing import Any

import torch

Operation = Callable[..., Any]


def portable_below_sm89(portable: Operation) -> Callable[[Operation], Operation]:
    """Decorate a release's operation: NVIDIA GPUs below SM89 run `portable` instead.

    Both get the same arguments; the first one is a tensor on the device.
    """

    def decorate(release: Operation) -> Operation:
        @functools.wraps(release)
        def run(positions: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            compiles_fp8 = _triton_compiles_fp8(positions.device.index or 0)
            operation = release if compiles_fp8 else portable
            return operation(positions, *args, **kwargs)

        return run

    return decorate


@functools.cache
def _triton_compiles_fp8(device_index: int) -> bool:
    from vllm.platforms import current_platform

    # Each GPU is asked: an RTX 3090 and an RTX 4090 may serve one model together.
    if not current_platform.is_cuda():
        return True
    return current_platform.has_device_capability(89, device_id=device_index)
