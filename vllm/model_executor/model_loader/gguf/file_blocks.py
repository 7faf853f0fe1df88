# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Matrices of blocks that are read when a parameter says which part it needs.

The loader passes a `FileBlocks` through vLLM's `load_weights` in place of a tensor. The
layer's load function narrows it to the part of this rank and has that part read into
its parameter: nothing else of the matrix is read, and it goes where it belongs at once.
"""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np
import torch

from vllm.model_executor.model_loader.gguf.spans import Span
from vllm.model_executor.model_loader.gguf.transport import (
    THREADS,
    CudaLane,
    HostLane,
    Lane,
    Transport,
)
from vllm.transformers_utils.gguf.reader import GGUFFile, TensorInfo
from vllm.utils.platform_utils import is_pin_memory_available


class FileBlocks:
    """The bytes of a matrix in the file, or a part of it, not read yet.

    Has of a tensor, uint8 [rows, row bytes], what load functions use.
    """

    dtype = torch.uint8

    def __init__(self, span: Span, reader: "BlockReader") -> None:
        self._span = span
        self._reader = reader

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self._span.rows, self._span.width))

    def dim(self) -> int:
        return 2

    def narrow(self, dim: int, start: int, length: int) -> "FileBlocks":
        """Like Tensor.narrow; raises IndexError beyond the matrix."""
        return FileBlocks(self._span.narrow(dim, start, length), self._reader)

    def read_into(self, target: torch.Tensor) -> None:
        """Have the bytes read into `target`, uint8 of the same shape, contiguous.

        They are there when the reader's `with` block has been left. Raises ValueError
        if `target` does not fit, and GGUFError if the file cannot be read.
        """
        if target.shape != self.shape:
            raise ValueError(
                f"{self._span.tensor}: uint8 {list(self.shape)} of the file do not fit "
                f"into a parameter's {list(target.shape)}."
            )
        self._reader.read_into(self._span, target)


class BlockReader:
    """Reads blocks of `file` into parameters, by the way that fits their device.

    On the CPU they are copied from a memory map at once. To another device they go
    through `threads` threads, which leaving the `with` block waits for. Leaving it
    also checks that no file changed. Errors are those of `Transport`.
    """

    def __init__(self, file: GGUFFile, *, threads: int = THREADS) -> None:
        self._file = file
        self._threads = threads
        self._transports: dict[torch.device, Transport] = {}
        self._shards: set[int] = set()
        self._open = ExitStack()
        self.nbytes = 0
        """Bytes put into parameters."""

    def matrix(
        self, source: TensorInfo, index: int = 0, rows: tuple[int, int] | None = None
    ) -> FileBlocks:
        """Rows `rows` (all if None) of matrix number `index` of `source`."""
        count = source.shape[-2] if len(source.shape) > 1 else 1
        first, last = rows or (0, count)
        size = source.type.row_bytes(source.shape[-1])
        offset = source.offset + (index * count + first) * size
        span = Span(source.name, source.shard, offset, last - first, size, size)
        return FileBlocks(span, self)

    def read_into(self, span: Span, target: torch.Tensor) -> None:
        """See `FileBlocks.read_into`."""
        self.nbytes += span.nbytes
        self._shards.add(span.shard)
        if target.is_cpu:
            target.copy_(self._mapped(span))
        else:
            self._transport(target.device).order(span, target)

    def _mapped(self, span: Span) -> torch.Tensor:
        info = self._file.tensors[span.tensor]
        rows = np.ndarray(
            (span.rows, span.width),
            np.uint8,
            self._file.data(info),
            offset=span.offset - info.offset,
            strides=(span.stride, 1),
        )
        with warnings.catch_warnings():
            # The map is read-only; parameters copy from it and never write.
            warnings.filterwarnings("ignore", "The given NumPy array is not wri")
            return torch.from_numpy(rows)

    def _transport(self, device: torch.device) -> Transport:
        if device not in self._transports:
            transport = Transport(
                self._file.paths, lane_maker(device), threads=self._threads
            )
            self._transports[device] = self._open.enter_context(transport)
        return self._transports[device]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.__exit__(exc_type, exc, traceback)
        pinned = any(device.type == "cuda" for device in self._transports)
        self._transports.clear()
        if pinned:
            _return_pinned_memory()
        if exc is None:
            self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Raise GGUFError if a file that was read is not the one of the header."""
        self._file.close()
        for info in self._file.tensors.values():
            if info.shard in self._shards:
                self._shards.remove(info.shard)
                self._file.data(info)
        self._file.close()


def lane_maker(device: torch.device) -> Callable[[], Lane]:
    """Makes lanes to `device`; where memory cannot be pinned, plain ones."""
    if device.type == "cuda" and is_pin_memory_available():
        return partial(CudaLane, device)
    return HostLane


def _return_pinned_memory() -> None:
    """Give the buffers back to the system; torch would keep them for itself."""
    # Older releases of torch, which vLLM still runs with, lack it.
    empty = getattr(torch.accelerator, "empty_host_cache", None)
    if empty is not None:
        empty()
