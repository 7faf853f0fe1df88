# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Which shape of the logit kernels a device runs, from a fixed table.

Nothing is tuned while serving. Shapes depend on the device and the number of heads and
queries, never on lengths, so that a captured CUDA graph serves all of them.
docs/design/dsa_indexer.md says where the entries come from.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefillConfig:
    """A compiled shape of the prefill kernel; all sizes are powers of two."""

    block_queries: int
    block_keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class PagedConfig:
    """A compiled shape of the paged kernel, whose tile is one page of keys."""

    block_queries: int
    num_warps: int
    num_stages: int


# Columns, queries times heads, of a tile. 256 are the widest MMA of SM90; with 64 keys
# and four warps their sums take half of the registers. Where that leaves too few for
# the rest, registers would be spilled: half as many columns then.
_WIDE, _NARROW = 256, 128
# Keys that a program of the prefill kernel serves at least and at most: few make the
# load of its queries dear, many leave the last programs alone on the device.
_FEWEST_KEYS, _MOST_KEYS = 512, 8192
# Programs for each multiprocessor, so that those of short ranges even out.
_PROGRAMS_PER_SM = 8


def has_fp8_mma(capability: tuple[int, int]) -> bool:
    """Whether Triton multiplies e4m3 there; bytes are widened to float16 elsewhere."""
    return capability >= (8, 9)


def choose_prefill(
    capability: tuple[int, int], heads: int, *, widened: bool
) -> PrefillConfig:
    """The shape of the prefill kernel.

    Args:
        widened: keys come as float16, where the device has no fp8 arithmetic.
    """
    if widened:
        # The columns take 64 KiB. A third tile of keys would not fit into 99 KiB.
        return PrefillConfig(_WIDE // heads, 64, 4, 2)
    narrow = capability[0] == 10 or not has_fp8_mma(capability)
    return PrefillConfig((_NARROW if narrow else _WIDE) // heads, 64, 4, 3)


def choose_paged(capability: tuple[int, int], heads: int, next_n: int) -> PagedConfig:
    """The shape of the paged kernel for `next_n` queries of each request."""
    wide = capability == (8, 9) or capability[0] == 9
    most = (_WIDE if wide else _NARROW) // heads
    return PagedConfig(min(1 << (next_n - 1).bit_length(), most), 4, 3)


def keys_per_program(query_blocks: int, keys: int, num_sms: int) -> int:
    """Into which shares the keys of a prompt are cut: a power of two."""
    share = _MOST_KEYS
    while (
        share > _FEWEST_KEYS
        and query_blocks * -(-keys // share) < num_sms * _PROGRAMS_PER_SM
    ):
        share //= 2
    return share


def programs_per_request(requests: int, pages: int, num_sms: int) -> int:
    """Programs that share the pages of one request, however many it has."""
    return max(1, min(pages, -(-num_sms * _PROGRAMS_PER_SM // requests)))
