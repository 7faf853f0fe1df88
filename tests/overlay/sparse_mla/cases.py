# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Inputs for sparse MLA kernels, a float64 reference for them, and the comparison.

Shared by the tests in the interpreter, the checks on a GPU and the benchmarks, so it
needs torch alone. Cache rows are packed and unpacked here from the description of the
layouts, independently of the code under test.
"""

import functools
import math
from dataclasses import dataclass

import torch

LATENT = 512
E4M3_MAX = 448.0
# One row of fp8_ds_mla: 512 e4m3 codes, four float32 scales, 64 bfloat16 values.
GROUPS, SCALES_AT, ROPE_AT, DS_MLA_BYTES = 4, 512, 528, 656
PER_TENSOR_SCALE = 0.0173

# Relative error of the output, the worst token; absolute error of its logarithm.
OUT_BOUND = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-5}
QUANTIZED_BOUND = 4e-3
UNQUANTIZED_BOUND = 2e-2
LSE_BOUND = 2e-3


@dataclass(frozen=True)
class Case:
    """A kernel call at one shape; `cache` is "model", "fp8" or "fp8_ds_mla"."""

    heads: int
    tokens: int
    topk: int
    cache: str = "model"
    dtype: torch.dtype = torch.bfloat16
    rope: int = 64
    rows: int = 8192
    # Where a token's entries select nothing: "full", "gaps", "tail", "one", "empty";
    # "mixed" goes through all of them.
    pattern: str = "mixed"
    counts: bool = False
    layout: str = "tensor"
    seed: int = 0

    def __str__(self) -> str:
        parts = [f"H{self.heads}", f"T{self.tokens}", f"K{self.topk}", self.cache]
        parts += [str(self.dtype).removeprefix("torch."), f"rope{self.rope}"]
        parts += [self.pattern, self.layout] + ["counts"] * self.counts
        return "-".join(parts)


@dataclass(frozen=True)
class Inputs:
    """Arguments of a call, and what they stand for."""

    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    rows: torch.Tensor
    indices: torch.Tensor
    counts: torch.Tensor | None
    scale: float
    kv_scale: torch.Tensor | None
    cache: str
    rope: int

    def call(self) -> dict[str, object]:
        """Arguments of `triton_sparse_mla` by name."""
        names = ("q", "rows", "indices", "counts", "scale", "kv_scale")
        return {name: getattr(self, name) for name in names}

    @property
    def joined_q(self) -> torch.Tensor:
        return self.q if isinstance(self.q, torch.Tensor) else torch.cat(self.q, -1)

    @property
    def dtype(self) -> torch.dtype:
        return self.joined_q.dtype

    @property
    def chosen(self) -> torch.Tensor:
        """[T, K] bool: the entries that select a row."""
        chosen = self.indices >= 0
        if self.counts is not None:
            places = torch.arange(self.indices.shape[1], device=self.indices.device)
            chosen &= places < self.counts.unsqueeze(1)
        return chosen


def pack_fp8(values: torch.Tensor, scale: float) -> torch.Tensor:
    """e4m3 codes [R, width] of `values` / `scale`, as uint8."""
    codes = (values.float() / scale).clamp(-E4M3_MAX, E4M3_MAX)
    return codes.to(torch.float8_e4m3fn).view(torch.uint8)


def pack_fp8_ds_mla(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows [R, 656] uint8 of `values` [R, 512 or 576] with `scales` [R, 4].

    Without rotated values their bytes are NaN: nobody may read them.
    """
    rows = torch.full(
        (len(values), DS_MLA_BYTES), 0xFF, dtype=torch.uint8, device=values.device
    )
    latent = values[:, :LATENT].float().unflatten(1, (GROUPS, -1))
    codes = (latent / scales.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    rows[:, :SCALES_AT] = codes.to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
    rows[:, SCALES_AT:ROPE_AT] = scales.float().contiguous().view(torch.uint8)
    if values.shape[1] > LATENT:
        rope = values[:, LATENT:].to(torch.bfloat16).contiguous()
        rows[:, ROPE_AT:] = rope.view(torch.uint8)
    return rows


def unpack(
    rows: torch.Tensor, cache: str, kv_scale: torch.Tensor | None, rope: int
) -> torch.Tensor:
    """Values [..., 512 + rope] in float64 of gathered cache rows [..., width]."""
    if cache == "model":
        return rows.double()
    if cache == "fp8":
        assert kv_scale is not None
        return rows.view(torch.float8_e4m3fn).float().double() * kv_scale.double()
    codes = rows[..., :SCALES_AT].contiguous().view(torch.float8_e4m3fn)
    scales = rows[..., SCALES_AT:ROPE_AT].contiguous().view(torch.float32)
    latent = codes.float().double().unflatten(-1, (GROUPS, -1))
    latent = (latent * scales.double().unsqueeze(-1)).flatten(-2)
    if not rope:
        return latent
    rotated = rows[..., ROPE_AT:].contiguous().view(torch.bfloat16)
    return torch.cat((latent, rotated.double()), -1)


def attention(
    inputs: Inputs, tokens: slice = slice(None), values: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [t, heads, 512] and natural log-sum-exp [t, heads] in float64.

    Args:
        tokens: the part of the batch to compute.
        values: [R, width] to use in place of what the cache holds.
    """
    q, indices, chosen = inputs.joined_q[tokens], inputs.indices[tokens], inputs.chosen
    chosen = chosen[tokens]
    width = LATENT + inputs.rope
    step = max(1, 2**26 // (indices.shape[1] * width))
    outs, lses = [], []
    for start in range(0, len(q), step):
        part = slice(start, start + step)
        mask = chosen[part]
        where = indices[part].long().masked_fill(~mask, 0)
        if values is None:
            # Bytes of other types can be gathered on every device; float8 can't.
            rows = inputs.rows
            rows = rows.view(torch.uint8) if inputs.cache != "model" else rows
            keys = unpack(rows[where], inputs.cache, inputs.kv_scale, inputs.rope)
        else:
            keys = values[where].double()
        keys = keys.masked_fill(~mask.unsqueeze(-1), 0.0)
        scores = q[part].double() @ keys.transpose(1, 2) * inputs.scale
        scores = scores.masked_fill(~mask.unsqueeze(1), -math.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.clamp(min=-1e300).unsqueeze(-1)).exp()
        outs.append(weights @ keys[..., :LATENT])
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


@functools.lru_cache(maxsize=8)
def _pool(
    cache: str, dtype: torch.dtype, rope: int, rows: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [rows, 512 + rope] and the cache rows made of them.

    Rows have a direction in common, as latent rows do: an average over rows without one
    would be as small as its rounding.
    """
    generator = torch.Generator(device).manual_seed(rows + rope)
    shape = (rows, LATENT + rope)
    values = torch.randn(shape, generator=generator, device=device)
    values += torch.randn(shape[1], generator=generator, device=device)
    if cache == "model":
        values = values.to(dtype)
        return values, values
    if cache == "fp8":
        return values, pack_fp8(values, PER_TENSOR_SCALE)
    amax = values[:, :LATENT].unflatten(1, (GROUPS, -1)).abs().amax(-1)
    # Not powers of two, and not the tightest ones either.
    spread = torch.rand(amax.shape, generator=generator, device=device) + 1
    return values, pack_fp8_ds_mla(values, amax * spread / E4M3_MAX)


PATTERNS = ("full", "gaps", "tail", "one", "empty")


def _indices(case: Case, generator: torch.Generator, device: str) -> torch.Tensor:
    """[T, K] int32. Row 0 is never selected, and what is not is any negative number."""
    shape = (case.tokens, case.topk)
    low = 1 if case.rows > 1 else 0
    options = {"generator": generator, "device": device}
    indices = torch.randint(low, case.rows, shape, dtype=torch.int32, **options)
    negative = torch.randint(-(2**31), 0, shape, dtype=torch.int32, **options)
    negative[:, ::2] = -1
    place = torch.arange(case.topk, device=device).expand(shape)
    chance = torch.rand(shape, **options)
    only = torch.randint(0, case.topk, (case.tokens, 1), **options)
    keep = {
        "full": place >= 0,
        "gaps": chance < 0.7,
        "tail": place < -(-case.topk // 3),
        "one": place == only,
        "empty": place < 0,
    }
    if case.pattern == "mixed":
        kind = (torch.arange(case.tokens, device=device) + case.seed) % len(PATTERNS)
        stacked = torch.stack([keep[name] for name in PATTERNS])
        kept = stacked.gather(0, kind.view(1, -1, 1).expand(1, *shape))[0]
    else:
        kept = keep[case.pattern]
    return torch.where(kept, indices, negative)


def _counts(case: Case, indices: torch.Tensor, generator: torch.Generator):
    """Counts [T]; whatever lies beyond them in `indices` becomes garbage, in place."""
    device = indices.device
    counts = torch.randint(
        0,
        case.topk + 1,
        (case.tokens,),
        dtype=torch.int32,
        generator=generator,
        device=device,
    )
    counts[0] = case.topk
    junk = torch.tensor(
        [2**31 - 1, case.rows, 0, -1, -(2**31), 1], dtype=torch.int32, device=device
    )
    place = torch.arange(case.topk, device=device).expand(indices.shape)
    beyond = place >= counts.unsqueeze(1)
    indices[beyond] = junk[place[beyond] % len(junk)]
    return counts


def _layout(q: torch.Tensor, layout: str):
    """`q` [T, H, width] again, as another memory layout; gaps hold NaN."""
    tokens, heads, width = q.shape
    if layout == "tensor":
        return q
    if layout == "tuple":
        return q[..., :LATENT].contiguous(), q[..., LATENT:].contiguous()
    if layout == "views":
        return q[..., :LATENT], q[..., LATENT:]
    if layout == "strided":
        wide = q.new_full((tokens, heads + 3, width + 40), math.nan)
        wide[:, 1 : 1 + heads, 8 : 8 + width] = q
        return wide[:, 1 : 1 + heads, 8 : 8 + width]
    assert layout == "heads-first", layout
    return q.transpose(0, 1).contiguous().transpose(0, 1)


def poison_unselected(inputs: Inputs, byte: int = 0xFF) -> None:
    """Overwrite every row that nobody selects, in place.

    Bytes 0xFF are NaN in every type that a row holds.
    """
    unused = torch.ones(len(inputs.rows), dtype=torch.bool, device=inputs.rows.device)
    unused[inputs.indices[inputs.chosen].long()] = False
    inputs.rows.view(torch.uint8)[unused] = byte


def make(
    case: Case, device: str = "cpu", *, poison: bool = True
) -> tuple[Inputs, torch.Tensor]:
    """Inputs of `case`, and the values [R, 512 + rope] before quantization.

    Every row that is not selected holds NaN, unless `poison` is false.
    """
    generator = torch.Generator(device).manual_seed(case.seed)
    values, rows = _pool(case.cache, case.dtype, case.rope, case.rows, device)
    width = LATENT + case.rope
    q = torch.randn(
        (case.tokens, case.heads, width), generator=generator, device=device
    ).to(case.dtype)
    indices = _indices(case, generator, device)
    counts = _counts(case, indices, generator) if case.counts else None
    kv_scale = None
    if case.cache == "fp8":
        kv_scale = torch.tensor(PER_TENSOR_SCALE, device=device)
    inputs = Inputs(
        q=_layout(q, case.layout),
        rows=rows.clone() if poison else rows,
        indices=indices,
        counts=counts,
        # Scores with a standard deviation of 1.
        scale=math.sqrt(0.5 / width),
        kv_scale=kv_scale,
        cache=case.cache,
        rope=case.rope,
    )
    if poison:
        poison_unselected(inputs)
    return inputs, values


def out_bound(inputs: Inputs) -> float:
    """Bound of the output's error against what the cache really holds."""
    bound = OUT_BOUND[inputs.dtype]
    if inputs.cache == "model" or inputs.dtype == torch.float32:
        return bound
    return max(bound, QUANTIZED_BOUND)


def lse_bound(inputs: Inputs) -> float | torch.Tensor:
    """Bound of the log-sum-exp's error: one for all tokens, or one for each, [T, 1].

    Values of quantized rows that are rounded to bfloat16 move a score by 1.1e-3 of its
    size (standard deviation). Only tokens with many rows average that away.
    """
    if inputs.cache == "model" or inputs.dtype != torch.bfloat16:
        return LSE_BOUND
    few = inputs.chosen.sum(1, keepdim=True) < 64
    return torch.where(few, 4 * LSE_BOUND, LSE_BOUND)


@dataclass
class Errors:
    """Worst errors of the calls compared so far, and what is wrong with them."""

    out: float = 0.0
    lse: float = 0.0
    compared: int = 0
    problems: list[str] | None = None

    def __post_init__(self) -> None:
        self.problems = [] if self.problems is None else self.problems

    def add(
        self,
        name: str,
        got: tuple[torch.Tensor, torch.Tensor],
        want: tuple[torch.Tensor, torch.Tensor],
        bound: float,
        lse_bound: float | torch.Tensor,
    ) -> None:
        """Compare output and log-sum-exp of a call, token by token."""
        self.compared += 1
        (out, lse), (want_out, want_lse) = got, want
        if out.shape != want_out.shape or lse.shape != want_lse.shape:
            self.problems.append(f"{name}: shapes {out.shape} {lse.shape}")
            return
        if not bool(out.isfinite().all()) or bool(lse.isnan().any()):
            bad = (~out.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
            self.problems.append(f"{name}: NaN or Inf in the output of tokens {bad}")
            return
        empty = want_lse.isinf()
        if not torch.equal(lse.isinf(), empty) or bool((out[empty] != 0).any()):
            self.problems.append(f"{name}: tokens without rows are not 0 and -inf")
            return
        norm = want_out.flatten(1).norm(dim=1)
        error = (out.double() - want_out).flatten(1).norm(dim=1) / norm.clamp(min=1e-30)
        distance = (lse.double() - want_lse).masked_fill(empty, 0.0).abs()
        worst, far = float(error.max()), float(distance.max())
        excess = distance - lse_bound
        self.out, self.lse = max(self.out, worst), max(self.lse, far)
        if worst > bound:
            self.problems.append(
                f"{name}: output error {worst:.2e} > {bound:.0e}, token "
                f"{int(error.argmax())}"
            )
        if bool((excess > 0).any()):
            self.problems.append(
                f"{name}: lse error {far:.2e}, {float(excess.max()):.1e} above its "
                f"bound at flat index {int(excess.argmax())}"
            )

    def compare(
        self, name: str, got: tuple[torch.Tensor, torch.Tensor], inputs: Inputs
    ) -> None:
        """Compare a call's result with what the cache really holds."""
        self.add(name, got, attention(inputs), out_bound(inputs), lse_bound(inputs))

    def expect(self, name: str, condition: bool) -> None:
        self.compared += 1
        if not condition:
            self.problems.append(name)
