# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Inputs of the index logits, for the interpreter and for a GPU, and what is expected.

Keys that no query may see are NaN, in values or in scale, and so is all memory of the
results before they are computed.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from vllm.v1.attention.ops.dsa_indexer.reference import index_logits_reference

DIM, TOKEN_BYTES, NAN_CODE = 128, 132, 0x7F
FP8 = torch.float8_e4m3fn
OPS = "vllm.v1.attention.ops.dsa_indexer"
# What a logit may be off, relative to the sum of its terms' magnitudes: float32 sums
# of exact products, and sums in fp8 matrix units of SM90, which keep about 14 bits.
BOUND, FP8_MMA_BOUND = 1e-6, 1e-3


@dataclass(frozen=True)
class Prefill:
    """Queries that see the keys [start, end) of their range."""

    ranges: tuple[tuple[int, int], ...]
    heads: int = 32
    keys: int = 200
    exact: bool = True


@dataclass(frozen=True)
class Paged:
    """Requests that see so many keys with their last query.

    `lengths_as` is "query", "request" or "column". Requests share their first pages
    with the request before them if `shared`.
    """

    lengths: tuple[int, ...]
    next_n: int = 1
    heads: int = 32
    page: int = 64
    lengths_as: str = "query"
    shared: bool = False
    exact: bool = True


@dataclass
class Inputs:
    """Arguments of a call, and for each row its keys [n, 128] as float64."""

    call: dict[str, Any]
    keys: list[torch.Tensor]


def make_prefill(case: Prefill, device: str = "cpu") -> Inputs:
    make = torch.Generator().manual_seed(0)
    q = codes(make, case.exact, len(case.ranges), case.heads, DIM)
    keys = codes(make, case.exact, case.keys, DIM)
    scales = scale_values(make, case.exact, case.keys)
    values = keys.double() * scales.double()[:, None]
    seen = torch.zeros(case.keys, dtype=torch.bool)
    for start, end in case.ranges:
        seen[start:end] = True
    unseen = (~seen).nonzero().flatten()
    keys.view(torch.uint8)[unseen[::2]] = NAN_CODE
    scales[unseen[1::2]] = float("nan")
    starts, ends = torch.tensor(case.ranges, dtype=torch.int32).T
    call = {
        "q": q,
        "keys": keys,
        "scales": scales,
        "weights": weight_values(make, case.exact, len(case.ranges), case.heads),
        "starts": starts,
        "ends": ends,
        "width": max((e - s for s, e in case.ranges), default=0),
    }
    return Inputs(_to(call, device), [values[s:e] for s, e in case.ranges])


def make_paged(case: Paged, device: str = "cpu") -> Inputs:
    make = torch.Generator().manual_seed(0)
    requests, page = len(case.lengths), case.page
    rows = requests * case.next_n
    needed = [-(-length // page) for length in case.lengths]
    total = sum(needed) + 3
    cache = _poisoned_pages(total, page)
    table = torch.full((requests, max(needed) + 2), 2**30, dtype=torch.int32)
    free = torch.randperm(total, generator=make).tolist()
    content: dict[int, torch.Tensor] = {}
    seen: list[torch.Tensor] = []
    for request, length in enumerate(case.lengths):
        for number in range(needed[request]):
            count = min(page, length - number * page)
            before = case.lengths[request - 1] if request else 0
            if case.shared and number < min(before, length) // page:
                index = int(table[request - 1, number])
            else:
                index = free.pop()
                content[index] = _fill_page(make, case.exact, cache[index], count)
            table[request, number] = index
        pages = [content[int(table[request, n])] for n in range(needed[request])]
        seen.append(torch.cat([*pages, torch.empty(0, DIM).double()])[:length])
    ends = torch.tensor(case.lengths)[:, None] - torch.arange(case.next_n).flip(0)
    ends = ends.clamp(min=0).int()
    by_request = torch.tensor(case.lengths, dtype=torch.int32)
    lengths = {"query": ends, "request": by_request, "column": by_request[:, None]}
    call = {
        "q": codes(make, case.exact, requests, case.next_n, case.heads, DIM),
        "cache": cache,
        "weights": weight_values(make, case.exact, rows, case.heads),
        "lengths": lengths[case.lengths_as],
        "block_table": table,
        "width": max(case.lengths) + 5,
    }
    keys = [seen[row // case.next_n][: int(ends.flatten()[row])] for row in range(rows)]
    return Inputs(_to(call, device), keys)


def codes(make: torch.Generator, exact: bool, *shape: int) -> torch.Tensor:
    """e4m3 values: small integers, or all finite ones."""
    if exact:
        return torch.randint(-4, 5, shape, generator=make).float().to(FP8)
    magnitude = torch.randint(0, NAN_CODE, shape, generator=make)
    sign = torch.randint(0, 2, shape, generator=make) << 7
    return (magnitude | sign).to(torch.uint8).view(FP8)


def scale_values(make: torch.Generator, exact: bool, *shape: int) -> torch.Tensor:
    if exact:
        return torch.exp2(torch.randint(-3, 3, shape, generator=make).float())
    return torch.rand(shape, generator=make) + 0.01


def weight_values(make: torch.Generator, exact: bool, *shape: int) -> torch.Tensor:
    if exact:
        return torch.randint(-8, 9, shape, generator=make).float() / 4
    return torch.randn(shape, generator=make)


def expected(inputs: Inputs, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a row in float64, and the sums of their terms' magnitudes."""
    q = inputs.call["q"].flatten(0, -3)[row : row + 1].float()
    weights = inputs.call["weights"][row : row + 1]
    keys = inputs.keys[row].to(q.device)
    logits = index_logits_reference(q, weights, keys)
    size = index_logits_reference(q.abs(), weights.abs(), keys.abs())
    return logits[0], size[0]


def check(got: torch.Tensor, inputs: Inputs, bound: float = 0.0) -> list[str]:
    """What is wrong with the result: logits, or places that must not be written."""
    problems = []
    width = inputs.call["width"]
    rows = len(inputs.keys)
    if tuple(got.shape) != (rows, width):
        return [f"shape is {tuple(got.shape)}, not {(rows, width)}"]
    if got.dtype != torch.float32 or got.stride(0) % 256 or got.data_ptr() % 16:
        problems.append(f"{got.dtype} with stride {got.stride()} at {got.data_ptr()}")
    # With what lies behind the last column of each row.
    whole = got.as_strided((rows, got.stride(0)), (got.stride(0), 1))
    for row, keys in enumerate(inputs.keys):
        count = min(len(keys), width)
        if not whole[row, count:].isnan().all():
            problems.append(f"row {row}: written behind {count}")
        logits, size = expected(inputs, row)
        off = (whole[row, :count].double() - logits[:count]).abs()
        if not (off <= bound * size[:count]).all():
            worst = (off / size[:count].clamp(min=1e-30)).max()
            problems.append(f"row {row}: off by {worst:.2e}")
    return problems


@contextmanager
def poisoned_results(
    capability: tuple[int, int] | None = None, num_sms: int = 1
) -> Iterator[None]:
    """Kernels write into NaN, and are configured as for `capability` if it is given."""
    tiles = importlib.import_module(f"{OPS}.tiles")
    empty = tiles.empty_logits

    def poisoned(rows: int, width: int, device: torch.device) -> torch.Tensor:
        out = empty(rows, width, device)
        whole = out.as_strided((rows, out.stride(0)), (out.stride(0), 1))
        whole.fill_(float("nan"))
        return out

    changes: dict[str, Any] = {"empty_logits": poisoned}
    if capability is not None:
        changes["device_of"] = lambda device: (capability, num_sms)
    with (
        mock.patch.multiple(f"{OPS}.prefill_logits", **changes),
        mock.patch.multiple(f"{OPS}.paged_logits", **changes),
    ):
        yield


def _poisoned_pages(count: int, page: int) -> torch.Tensor:
    """[count, page, 1, 132] uint8 of NaN, with a gap behind each page."""
    whole = torch.full((count, page * TOKEN_BYTES + 64), NAN_CODE, dtype=torch.uint8)
    whole.view(torch.float32)[:] = float("nan")
    whole[:, : page * DIM] = NAN_CODE
    return whole[:, : page * TOKEN_BYTES].view(count, page, 1, TOKEN_BYTES)


def _fill_page(
    make: torch.Generator, exact: bool, page: torch.Tensor, count: int
) -> torch.Tensor:
    """Write the first `count` keys of a page; what they are, in float64."""
    flat = page.view(-1)
    keys = codes(make, exact, count, DIM)
    scales = scale_values(make, exact, count)
    flat[: count * DIM] = keys.view(torch.uint8).flatten()
    at = page.shape[0] * DIM
    flat[at : at + count * 4] = scales.view(torch.uint8)
    return keys.double() * scales.double()[:, None]


def _to(call: dict[str, Any], device: str) -> dict[str, Any]:
    """The arguments on the device, with their strides."""

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or device == "cpu":
            return value
        whole = value if value._base is None else value._base
        if whole.dtype != value.dtype:
            return value.to(device)
        moved = whole.to(device)
        return moved.as_strided(value.shape, value.stride(), value.storage_offset())

    return {name: move(value) for name, value in call.items()}
