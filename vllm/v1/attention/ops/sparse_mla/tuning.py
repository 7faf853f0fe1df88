# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Which shape of the sparse MLA kernel a device runs, from a fixed table.

Nothing is tuned while serving: the choice depends on the device, the number of heads,
the number of tokens and the format of the cache, so a captured CUDA graph and an eager
call take the same kernel. docs/design/sparse_mla.md says where the entries come from.
"""

import enum
import functools
import os
from dataclasses import dataclass, field, replace

OVERRIDE = "VLLM_TRITON_MLA_SPARSE_CONFIG"


class CacheFormat(enum.StrEnum):
    """How a cached row is stored."""

    MODEL = "model"
    FP8 = "fp8"
    FP8_DS_MLA = "fp8_ds_mla"


class Kernel(enum.StrEnum):
    """Which kernel runs: that in Triton, or that in Gluon with explicit layouts."""

    TRITON = "triton"
    GLUON = "gluon"


class DeviceClass(enum.StrEnum):
    """Devices by the shared memory that one thread block may use."""

    LARGE = "large"
    MEDIUM = "medium"
    SMALL = "small"
    INTERPRETER = "interpreter"

    @property
    def shared_memory(self) -> int:
        """In bytes."""
        return _SHARED_MEMORY[self]


# SM90; SM80 and SM10x; SM86, SM89, SM12x and whatever is not known.
_SHARED_MEMORY = {
    DeviceClass.LARGE: 232_448,
    DeviceClass.MEDIUM: 166_912,
    DeviceClass.SMALL: 101_376,
    # Triton's interpreter on the CPU has no limit.
    DeviceClass.INTERPRETER: 1 << 30,
}


@dataclass(frozen=True)
class KernelConfig:
    """A compiled shape of the kernel, and into how many parts a query's rows are cut.

    Attributes:
        block_heads: heads of one program; 16 or more, a power of two.
        block_rows: selected rows of one step; 16 or more, a power of two.
        num_stages: tiles in flight; of the Gluon kernel always 2.
        splits: programs that share the rows of one query and block of heads.
    """

    block_heads: int
    block_rows: int
    num_warps: int
    num_stages: int
    splits: int = 1
    kernel: Kernel = field(default=Kernel.TRITON, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("block_heads", "block_rows"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(
                    f"{name} is {value}; it must be a power of two, 16 or more"
                )
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps is {self.num_warps}; it must be 1 to 16")
        if self.num_stages < 1 or self.splits < 1:
            raise ValueError(
                f"num_stages is {self.num_stages} and splits is {self.splits};"
                " both must be 1 or more"
            )
        if self.kernel is Kernel.GLUON:
            self._check_gluon()

    def _check_gluon(self) -> None:
        # Four sets of warps, in each of them one for every 16 heads.
        if self.num_warps % (self.block_heads // 4) or self.num_stages != 2:
            raise ValueError(
                f"{self.num_warps} warps, {self.num_stages} stages: the Gluon kernel"
                f" needs a multiple of {self.block_heads // 4} warps for"
                f" {self.block_heads} heads, and 2 stages"
            )
        if self.block_rows < 32:
            raise ValueError(f"block_rows is {self.block_rows}; Gluon needs 32 or more")


@dataclass(frozen=True)
class TableRow:
    """One entry: the first that covers a call is taken.

    Attributes:
        max_heads: covers calls of up to so many heads per rank.
        few_tokens: covers calls whose tokens do not fill the device (or the others).
    """

    device: DeviceClass
    cache: CacheFormat
    max_heads: int
    few_tokens: bool
    config: KernelConfig


def _entries(
    device: DeviceClass,
    cache: CacheFormat,
    *entries: tuple[int, KernelConfig, KernelConfig],
) -> list[TableRow]:
    """Rows for (most heads, configuration of few tokens, of many)."""
    return [
        TableRow(device, cache, heads, few, config)
        for heads, for_few, for_many in entries
        for few, config in ((True, for_few), (False, for_many))
    ]


def _gluon(block_heads: int, block_rows: int, num_warps: int) -> KernelConfig:
    return KernelConfig(block_heads, block_rows, num_warps, 2, kernel=Kernel.GLUON)


_ALL = 128
# Both fit in 99 KiB. More heads at a time do not, beside two tiles of rows.
_NARROW = _gluon(16, 32, 4)
_WIDE = _gluon(32, 32, 8)
# Tiles of more rows, for devices that have the memory.
_WIDE_LARGE = _gluon(32, 64, 8)
# Where rows have to be scaled, wgmma is ahead of mma.sync.
_WGMMA = KernelConfig(64, 32, 8, 3)
# What the interpreter runs: it knows no Gluon.
_INTERPRETED = KernelConfig(16, 32, 4, 2)
_PORTABLE = ((16, _NARROW, _NARROW), (_ALL, _WIDE, _WIDE))
_LARGE = ((16, _NARROW, _NARROW), (_ALL, _WIDE, _WIDE_LARGE))
_LARGE_DS_MLA = ((16, _NARROW, _NARROW), (_ALL, _WIDE, _WGMMA))
_TABLE = tuple(
    row
    for cache in CacheFormat
    for device, entries in (
        (DeviceClass.SMALL, _PORTABLE),
        (DeviceClass.MEDIUM, _PORTABLE),
        (
            DeviceClass.LARGE,
            _LARGE_DS_MLA if cache is CacheFormat.FP8_DS_MLA else _LARGE,
        ),
        (DeviceClass.INTERPRETER, ((_ALL, _INTERPRETED, _INTERPRETED),)),
    )
    for row in _entries(device, cache, *entries)
)


def table() -> tuple[TableRow, ...]:
    """All entries."""
    return _TABLE


def device_class(capability: tuple[int, int]) -> DeviceClass:
    """The class of a compute capability, unknown ones included.

    A device that is not known gets the configurations that fit everywhere.
    """
    if capability == (0, 0):
        return DeviceClass.INTERPRETER
    # SM10x could hold more, but nothing was measured there.
    if capability == (8, 0) or capability[0] == 10:
        return DeviceClass.MEDIUM
    if capability[0] == 9:
        return DeviceClass.LARGE
    return DeviceClass.SMALL


def choose_config(
    capability: tuple[int, int],
    heads: int,
    tokens: int,
    topk: int,
    cache: CacheFormat,
    num_sms: int,
) -> KernelConfig:
    """The configuration of a call, from the table or from the environment.

    Args:
        heads: query heads of this rank.
        topk: width of the index rows.
        num_sms: multiprocessors of the device.
    """
    if override := os.environ.get(OVERRIDE):
        return parse_config(override)
    device = device_class(capability)
    for_few, for_many = (_find(device, cache, heads, few) for few in (True, False))
    if tokens * _blocks(heads, for_many) >= num_sms:
        return for_many
    return with_splits(for_few, heads, tokens, topk, num_sms)


def with_splits(
    config: KernelConfig, heads: int, tokens: int, topk: int, num_sms: int
) -> KernelConfig:
    """`config` with as many splits as give each multiprocessor about one program."""
    tiles = -(-topk // config.block_rows)
    splits = max(1, num_sms // (tokens * _blocks(heads, config)))
    # As many tiles for each split as the fullest one needs, so that none is empty.
    tiles_per_split = -(-tiles // min(splits, tiles))
    return replace(config, splits=-(-tiles // tiles_per_split))


def parse_config(text: str) -> KernelConfig:
    """The configuration that `block_heads,block_rows,num_warps,num_stages[,splits]` is.

    With `gluon,` in front it is one of the Gluon kernel.

    Raises:
        ValueError: the text is not such a list, or not a valid configuration.
    """
    try:
        numbers = text.removeprefix(f"{Kernel.GLUON},")
        config = KernelConfig(*(int(part) for part in numbers.split(",")))
        return replace(config, kernel=Kernel.GLUON) if numbers != text else config
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{OVERRIDE}={text!r}: expected"
            " block_heads,block_rows,num_warps,num_stages[,splits], as 16,64,4,3"
            f" ({error})"
        ) from error


def _blocks(heads: int, config: KernelConfig) -> int:
    return -(-heads // config.block_heads)


@functools.cache
def _find(
    device: DeviceClass, cache: CacheFormat, heads: int, few: bool
) -> KernelConfig:
    for row in _TABLE:
        key = (row.device, row.cache, row.few_tokens)
        if key == (device, cache, few) and heads <= row.max_heads:
            return row.config
    raise ValueError(f"{heads} heads per rank; TRITON_MLA_SPARSE takes 1 to 128")
