# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What the fused operations are made of, in float64 except where codes are exact."""

import torch

E4M3_MAX = 448.0


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`x` [..., dim] divided by its root mean square, times `weight`; float64."""
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def layer_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """`x` [..., dim] of mean 0 and variance 1, times `weight`, plus `bias`; float64."""
    x = x.double()
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return (x - mean) * (variance + eps).rsqrt() * weight.double() + bias.double()


def rotate_reference(
    x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """`x` [T, ..., dim] with its first n elements rotated, as pairs; float64.

    A pair is two neighbors if `interleaved`, else (i, i + n // 2). `table` [positions,
    n] has the cosines of the pairs, then their sines.
    """
    n = table.shape[-1]
    out = x.double().clone()
    row = table[positions].double().view(len(x), *[1] * (x.dim() - 2), n)
    cos, sin = row.split(n // 2, -1)
    first = slice(0, n, 2) if interleaved else slice(0, n // 2)
    second = slice(1, n, 2) if interleaved else slice(n // 2, n)
    a, b = x[..., first].double(), x[..., second].double()
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out


def e4m3_reference(x: torch.Tensor) -> torch.Tensor:
    """The nearest e4m3fn codes of `x`, saturated: uint8."""
    x = x.float().clamp(-E4M3_MAX, E4M3_MAX)
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def quantize_reference(
    x: torch.Tensor, smallest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., dim] and float32 scales [...] of the rows of `x`.

    A scale is the least power of two, `smallest` or more, by which a row fits.
    """
    largest = x.double().abs().amax(-1)
    exponent = (largest / E4M3_MAX).clamp(min=smallest).log2().ceil()
    scale = exponent.exp2()
    return e4m3_reference(x.double() / scale[..., None]), scale.float()
