# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Moves spans of files into tensors of a device, reading and copying at a time.

Threads take pieces in file order. Each has a few buffers in host memory and a lane to
the device: it reads a piece into a buffer, hands the buffer to its lane, and goes on
with its next buffer as soon as that one's last copy is done. Reads and copies leave
Python's lock alone.
"""

import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch

from vllm.model_executor.model_loader.gguf.spans import Span
from vllm.transformers_utils.gguf.errors import GGUFError

THREADS = 4
BUFFERS = 2
BUFFER_BYTES = 32 << 20
"""Defaults. Host memory is the product of the three, 256 MiB, and little more."""

# Rows with gaps are read whole into a scratch buffer that stays in a core's cache.
_SCRATCH_BYTES = 2 << 20


class Lane(Protocol):
    """A way to one device, used by one thread."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Host memory to copy from: uint8 [nbytes]."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Begin to copy a part of a buffer; returns a ticket for `wait`."""

    def wait(self, ticket: Any) -> None:
        """Return when the copy is done and its buffer free."""


class HostLane:
    """Copies that are done when they return, to any device."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def wait(self, ticket: None) -> None:
        pass


class CudaLane:
    """Asynchronous copies from pinned memory, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        # What the allocator gave to the targets may still be in use by earlier work.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        # For good, in the lane's own thread. It chooses the device, too: a block would
        # go back to device 0 each time, and every rank would get a context there.
        torch.cuda.set_stream(self._stream)
        target.copy_(source, non_blocking=True)
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def wait(self, ticket: torch.cuda.Event) -> None:
        ticket.synchronize()


class Transport:
    """Moves what is ordered; leaving the `with` block waits for all of it.

    Args:
        paths: the files, by shard number.
        make_lane: makes the lane of one thread.
        threads, buffers, buffer_bytes: see the defaults of this module.

    Raises GGUFError if there is no memory for the buffers. `order` and leaving the
    `with` block raise GGUFError, naming file and tensor, if a thread could not read
    or copy; nothing more is moved then. If the block raises itself, what was not begun
    is dropped.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        make_lane: Callable[[], Lane],
        *,
        threads: int = THREADS,
        buffers: int = BUFFERS,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self._buffer_bytes = buffer_bytes
        # Orders hold no memory. There are enough of them that threads have work while
        # a weight is dequantized, and no more, so that progress is not far ahead and
        # the thread that orders mostly sleeps: it has Python's lock while it runs.
        self._pieces: queue.Queue[tuple[Span, torch.Tensor] | None] = queue.Queue(
            64 * threads
        )
        self._failure: Exception | None = None
        try:
            self._workers = [
                _Worker(paths, make_lane(), buffers, buffer_bytes)
                for _ in range(threads)
            ]
        except (MemoryError, RuntimeError) as error:
            size = threads * buffers * buffer_bytes >> 20
            raise GGUFError(
                f"{paths[0]}: cannot take {size} MiB of host memory for reading, "
                f"{buffers} buffers of {buffer_bytes >> 20} MiB for each of {threads} "
                f"threads ({_first_line(error)}); free host memory, raise the limit on "
                "locked memory, or read with fewer threads: "
                "--model-loader-extra-config '{\"num_threads\": 1}'"
            ) from error
        self._threads = [
            threading.Thread(target=self._work, args=(worker,), daemon=True)
            for worker in self._workers
        ]

    def order(self, span: Span, target: torch.Tensor) -> None:
        """Have the bytes of `span` copied into `target`.

        `target`: uint8, as many bytes, contiguous; it must stay alive and unused until
        the `with` block is left. Raises ValueError if it does not fit.
        """
        if (
            target.dtype != torch.uint8
            or target.numel() != span.nbytes
            or not target.is_contiguous()
        ):
            raise ValueError(
                f"{span.tensor}: {span.nbytes} bytes need a contiguous uint8 tensor of "
                f"that size; found {target.dtype} {list(target.shape)} with strides "
                f"{list(target.stride())}."
            )
        flat = target.view(-1)
        for start, piece in span.pieces(self._buffer_bytes):
            self._raise_failure()
            self._pieces.put((piece, flat.narrow(0, start, piece.nbytes)))

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is not None and self._failure is None:
            self._failure = GGUFError("stopped")
        for _ in self._threads:
            self._pieces.put(None)
        for thread in self._threads:
            thread.join()
        if exc is None:
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self, worker: "_Worker") -> None:
        """The life of a thread; after a failure pieces are taken and dropped."""
        for span, target in iter(self._pieces.get, None):
            if self._failure is None:
                self._attempt(worker.move, span, target)
        self._attempt(worker.finish)

    def _attempt(self, action: Callable[..., None], *args: Any) -> None:
        try:
            action(*args)
        except Exception as error:
            self._failure = self._failure or error


class _Worker:
    """What one thread has: open files, buffers, a lane."""

    def __init__(
        self, paths: Sequence[Path], lane: Lane, buffers: int, buffer_bytes: int
    ) -> None:
        self._paths = paths
        self._lane = lane
        self._buffers = [lane.buffer(buffer_bytes) for _ in range(buffers)]
        # Tickets of copies under way, by buffer, and the tensor they are of.
        self._tickets: dict[int, tuple[Any, Span]] = {}
        self._turn = 0
        self._scratch: np.ndarray | None = None
        self._files: dict[int, int] = {}

    def move(self, span: Span, target: torch.Tensor) -> None:
        self._wait(self._turn)
        buffer = self._buffers[self._turn].narrow(0, 0, span.nbytes)
        try:
            self._read(span, buffer.numpy())
        except OSError as error:
            raise GGUFError(
                f"{self._paths[span.shard]}: tensor {span.tensor}: cannot read "
                f"{span.reach} bytes at {span.offset}: {error.strerror or error}; "
                "check the disk or the network file system, then load the file again"
            ) from error
        try:
            ticket = self._lane.copy(target, buffer)
        except RuntimeError as error:
            raise self._copy_failed(span, error) from error
        self._tickets[self._turn] = ticket, span
        self._turn = (self._turn + 1) % len(self._buffers)

    def finish(self) -> None:
        """Wait for all copies, and close the files."""
        try:
            for turn in range(len(self._buffers)):
                self._wait(turn)
        finally:
            for file in self._files.values():
                os.close(file)
            self._files.clear()
            self._buffers.clear()

    def _wait(self, turn: int) -> None:
        if turn in self._tickets:
            ticket, span = self._tickets.pop(turn)
            try:
                self._lane.wait(ticket)
            except RuntimeError as error:
                raise self._copy_failed(span, error) from error

    def _copy_failed(self, span: Span, error: RuntimeError) -> GGUFError:
        return GGUFError(
            f"{self._paths[span.shard]}: tensor {span.tensor}: cannot copy "
            f"{span.nbytes} bytes to the device: {_first_line(error)}; the device's "
            "driver log says more. Start the process again"
        )

    def _read(self, span: Span, out: np.ndarray) -> None:
        """Read the bytes of `span` into `out`, uint8 [span.nbytes]."""
        if span.gapless:
            self._read_bytes(span, span.offset, out)
            return
        size = max(_SCRATCH_BYTES, span.stride)
        if self._scratch is None or self._scratch.size < size:
            self._scratch = np.empty(size, dtype=np.uint8)
        step = self._scratch.size // span.stride
        for row in range(0, span.rows, step):
            part = span.narrow(0, row, min(step, span.rows - row))
            rows = self._scratch[: part.reach]
            self._read_bytes(span, part.offset, rows)
            shape, strides = (part.rows, part.width), (part.stride, 1)
            start = row * span.width
            np.copyto(
                out[start : start + part.nbytes].reshape(shape),
                np.ndarray(shape, np.uint8, rows, strides=strides),
            )

    def _read_bytes(self, span: Span, offset: int, out: np.ndarray) -> None:
        file = self._file(span.shard)
        done = 0
        while done < out.size:
            count = os.preadv(file, [out[done:]], offset + done)
            if not count:
                raise GGUFError(
                    f"{self._paths[span.shard]}: tensor {span.tensor}: the file has "
                    f"{os.fstat(file).st_size} bytes, expected at least "
                    f"{offset + out.size}; it was cut after its header was read. Fetch "
                    "it again"
                )
            done += count

    def _file(self, shard: int) -> int:
        if shard not in self._files:
            file = os.open(self._paths[shard], os.O_RDONLY | os.O_CLOEXEC)
            self._files[shard] = file
        return self._files[shard]


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
