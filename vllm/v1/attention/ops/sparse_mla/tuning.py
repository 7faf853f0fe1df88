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
from dataclasses import dataclass, replace

OVERRIDE = "VLLM_TRITON_MLA_SPARSE_CONFIG"


class CacheFormat(enum.StrEnum):
    """How a cached row is stored."""

    MODEL = "model"
    FP8 = "fp8"
    FP8_DS_MLA = "fp8_ds_mla"


class DeviceClass(enum.StrEnum):
    """Devices by the shared memory that one thread block may use."""

    LARGE = "large"
    MEDIUM = "medium"
    SMALL = "small"

    @property
    def shared_memory(self) -> int:
        """In bytes."""
        return _SHARED_MEMORY[self]


# SM90; SM80 and SM10x; SM86, SM89, SM12x and whatever is not known.
_SHARED_MEMORY = {
    DeviceClass.LARGE: 232_448,
    DeviceClass.MEDIUM: 166_912,
    DeviceClass.SMALL: 101_376,
}


@dataclass(frozen=True)
class KernelConfig:
    """A compiled shape of the kernel, and into how many parts a query's rows are cut.

    Attributes:
        block_heads: heads of one program; 16 or more, a power of two.
        block_rows: selected rows of one step; 16 or more, a power of two.
        splits: programs that share the rows of one query and block of heads.
    """

    block_heads: int
    block_rows: int
    num_warps: int
    num_stages: int
    splits: int = 1

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


# Up to 16 heads: bound by the gather of the rows. All sizes fit every device.
_NARROW = KernelConfig(16, 64, 4, 3)
_NARROW_FEW = KernelConfig(16, 32, 4, 3)
_NARROW_FP8 = KernelConfig(16, 64, 8, 3)
_NARROW_DS_MLA = KernelConfig(16, 32, 8, 2)
# More heads: 32 of them are what 99 KiB of shared memory hold beside a tile of rows.
_WIDE = KernelConfig(32, 32, 8, 2)
_WIDE_FP8 = KernelConfig(32, 32, 8, 3)
_WIDE_MEDIUM = KernelConfig(32, 64, 8, 2)
_WIDE_LARGE = KernelConfig(32, 64, 8, 3)
_FULL = KernelConfig(64, 32, 8, 3)
_ALL = 128
_WIDE_MODEL = {
    DeviceClass.SMALL: ((_ALL, _WIDE, _WIDE),),
    DeviceClass.MEDIUM: ((_ALL, _WIDE_MEDIUM, _WIDE_MEDIUM),),
    DeviceClass.LARGE: ((32, _WIDE_LARGE, _WIDE_LARGE), (_ALL, _FULL, _FULL)),
}
_NARROW_QUANTIZED = {
    CacheFormat.FP8: _NARROW_FP8,
    CacheFormat.FP8_DS_MLA: _NARROW_DS_MLA,
}
_TABLE = tuple(
    row
    for device, wide in _WIDE_MODEL.items()
    for row in (
        *_entries(device, CacheFormat.MODEL, (16, _NARROW_FEW, _NARROW), *wide),
        *(
            row
            for cache, narrow in _NARROW_QUANTIZED.items()
            for row in _entries(
                device, cache, (16, narrow, narrow), (_ALL, _WIDE_FP8, _WIDE_FP8)
            )
        ),
    )
)


def table() -> tuple[TableRow, ...]:
    """All entries."""
    return _TABLE


def device_class(capability: tuple[int, int]) -> DeviceClass:
    """The class of a compute capability, unknown ones included.

    A device that is not known gets the configurations that fit everywhere.
    """
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

    Raises:
        ValueError: the text is not such a list, or not a valid configuration.
    """
    try:
        values = [int(part) for part in text.split(",")]
        return KernelConfig(*values)
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
