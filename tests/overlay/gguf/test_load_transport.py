# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Reading threads with lanes on the host, some of which copy as late as they may."""

import errno
import os
import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from vllm.model_executor.model_loader.gguf import transport as module
from vllm.model_executor.model_loader.gguf.spans import Span
from vllm.model_executor.model_loader.gguf.transport import (
    CudaLane,
    HostLane,
    Lane,
    Transport,
)
from vllm.transformers_utils.gguf.errors import GGUFError

SIZE = 100_000
NAME = "blk.0.ffn_up_exps.weight"


class LateLane(HostLane):
    """Copies only when a copy is waited for, as a busy device would."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        return target, source

    def wait(self, ticket: Any) -> None:
        target, source = ticket
        target.copy_(source)


class NotedLane(LateLane):
    """Notes what happens, in order."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes
        self.names: dict[int, str] = {}

    def buffer(self, nbytes: int) -> torch.Tensor:
        buffer = super().buffer(nbytes)
        self.names[buffer.data_ptr()] = "abc"[len(self.names)]
        return buffer

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        self.notes.append(f"copy {self.names[source.data_ptr()]}")
        return super().copy(target, source)

    def wait(self, ticket: Any) -> None:
        self.notes.append(f"wait {self.names[ticket[1].data_ptr()]}")
        super().wait(ticket)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{shard}.gguf" for shard in range(2)]
    for shard, path in enumerate(paths):
        path.write_bytes(np.random.default_rng(shard).bytes(SIZE))
    return paths


def span_of(offset: int, nbytes: int, shard: int = 0) -> Span:
    return Span(NAME, shard, offset, 1, nbytes, nbytes)


def expected(files: list[Path], span: Span) -> torch.Tensor:
    data = np.frombuffer(files[span.shard].read_bytes(), np.uint8)
    rows = np.ndarray(
        (span.rows, span.width),
        np.uint8,
        data,
        offset=span.offset,
        strides=(span.stride, 1),
    )
    return torch.from_numpy(rows.copy())


def some_spans(count: int) -> list[Span]:
    """Matrices of both files, with and without gaps in the rows, small and large."""
    generator = random.Random(count)
    spans = []
    for _ in range(count):
        stride = generator.randint(1, 600)
        rows = generator.randint(1, min(400, SIZE // stride))
        offset = generator.randint(0, SIZE - rows * stride)
        whole = Span(NAME, generator.randint(0, 1), offset, rows, stride, stride)
        start = generator.choice([0, generator.randint(0, stride - 1)])
        width = stride if start == 0 else generator.randint(1, stride - start)
        spans.append(whole.narrow(1, start, width))
    return spans


@pytest.mark.parametrize("lane", [HostLane, LateLane])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_every_byte_arrives_once_the_block_is_left(
    lane: Callable[[], Lane], threads: int, buffers: int, files: list[Path]
) -> None:
    spans = some_spans(60)
    targets = [
        torch.full((span.rows, span.width), 85, dtype=torch.uint8) for span in spans
    ]
    options = {"threads": threads, "buffers": buffers, "buffer_bytes": 4096}
    with (
        mock.patch.object(module, "_SCRATCH_BYTES", 1000),
        Transport(files, lane, **options) as transport,
    ):
        for span, target in zip(spans, targets, strict=True):
            transport.order(span, target)
    for span, target in zip(spans, targets, strict=True):
        assert torch.equal(target, expected(files, span))


def test_only_the_target_is_written(files: list[Path]) -> None:
    around = torch.full((3000,), 85, dtype=torch.uint8)
    with Transport(files, HostLane, threads=2, buffer_bytes=256) as transport:
        transport.order(span_of(7, 1000), around[1000:2000])
    assert (around[:1000] == 85).all() and (around[2000:] == 85).all()
    assert torch.equal(around[1000:2000], expected(files, span_of(7, 1000))[0])


def test_a_buffer_is_filled_while_the_other_is_copied(files: list[Path]) -> None:
    notes: list[str] = []
    read = os.preadv

    def noted(*args: Any) -> int:
        notes.append("read")
        return read(*args)

    with (
        mock.patch.object(os, "preadv", noted),
        Transport(
            files, partial(NotedLane, notes), threads=1, buffer_bytes=256
        ) as transport,
    ):
        transport.order(span_of(0, 4 * 256), torch.empty(4 * 256, dtype=torch.uint8))
    assert notes == [
        *("read", "copy a", "read", "copy b"),
        *("wait a", "read", "copy a", "wait b", "read", "copy b"),
        *("wait a", "wait b"),
    ]


def test_a_file_is_read_in_order_and_only_where_asked(files: list[Path]) -> None:
    reads: list[tuple[int, int]] = []
    read = os.preadv

    def noted(file: int, buffers: list[np.ndarray], offset: int) -> int:
        count = read(file, buffers, offset)
        reads.append((offset, count))
        return count

    spans = [
        Span(NAME, 0, 1000, 8, 500, 500),
        Span(NAME, 0, 5000, 8, 500, 500).narrow(0, 2, 3),
        Span(NAME, 0, 9000, 8, 500, 500).narrow(1, 100, 50),
    ]
    with (
        mock.patch.object(os, "preadv", noted),
        Transport(files, HostLane, threads=1, buffer_bytes=1500) as transport,
    ):
        for span in spans:
            transport.order(span, torch.empty(span.nbytes, dtype=torch.uint8))
    assert reads == [
        *((1000, 1500), (2500, 1500), (4000, 1000)),
        (6000, 1500),
        # Rows with gaps are read from the first to the last byte that is needed.
        (9100, 7 * 500 + 50),
    ]


def test_threads_and_files_are_gone_afterwards(files: list[Path]) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    threads, before = threading.active_count(), open_files()
    with Transport(files, HostLane, threads=3, buffer_bytes=256) as transport:
        assert threading.active_count() == threads + 3
        for shard in (0, 1):
            span = span_of(0, 5000, shard)
            transport.order(span, torch.empty(5000, dtype=torch.uint8))
    assert (threading.active_count(), open_files()) == (threads, before)


def test_reads_that_return_less_are_continued(files: list[Path]) -> None:
    read = os.preadv

    def short(file: int, buffers: list[np.ndarray], offset: int) -> int:
        return read(file, [buffers[0][:100]], offset)

    target = torch.empty(1000, dtype=torch.uint8)
    with (
        mock.patch.object(os, "preadv", short),
        Transport(files, HostLane, threads=1, buffer_bytes=512) as transport,
    ):
        transport.order(span_of(3, 1000), target)
    assert torch.equal(target, expected(files, span_of(3, 1000))[0])


def order_all(files: list[Path], lane: Callable[[], Lane] = HostLane) -> None:
    """Order much more than the queue holds, so that a stuck thread would show."""
    with Transport(files, lane, threads=2, buffer_bytes=256) as transport:
        for _ in range(50):
            transport.order(span_of(0, SIZE), torch.empty(SIZE, dtype=torch.uint8))


def test_file_cut_meanwhile_is_named_with_the_tensor(files: list[Path]) -> None:
    os.truncate(files[0], 50_000)
    message = rf"0.gguf: tensor {NAME}: the file has 50000 bytes, .* Fetch it again"
    with pytest.raises(GGUFError, match=message):
        order_all(files)


def test_orders_are_refused_soon_after_a_failure(files: list[Path]) -> None:
    files[0].unlink()
    target = torch.empty(256, dtype=torch.uint8)
    accepted = 0
    with (
        pytest.raises(GGUFError, match="No such file"),
        Transport(files, HostLane, threads=2, buffer_bytes=256) as transport,
    ):
        for _ in range(1000):
            transport.order(span_of(0, 256), target)
            accepted += 1
    # At most the queue, what the threads hold, and one that waited for a place.
    assert accepted <= 2 * 64 + 3


def test_disk_error_is_named_with_the_tensor(files: list[Path]) -> None:
    failure = OSError(errno.EIO, "Input/output error")
    message = rf"0.gguf: tensor {NAME}: cannot read 256 bytes at .*put error; check the"
    with (
        mock.patch.object(os, "preadv", side_effect=failure),
        pytest.raises(GGUFError, match=message),
    ):
        order_all(files)


def test_file_that_is_gone_is_named(files: list[Path]) -> None:
    files[0].unlink()
    with pytest.raises(GGUFError, match="0.gguf: tensor .* No such file"):
        order_all(files)


@pytest.mark.parametrize("method", ["copy", "wait"])
def test_failed_copy_is_named_with_the_tensor(method: str, files: list[Path]) -> None:
    class Broken(LateLane):
        pass

    failure = mock.Mock(side_effect=RuntimeError("CUDA error: no\nmore"))
    setattr(Broken, method, failure)
    message = rf"tensor {NAME}: cannot copy 256 bytes to the device: CUDA error: no;"
    with pytest.raises(GGUFError, match=message):
        order_all(files, Broken)


def test_failure_at_the_very_end_is_raised(files: list[Path]) -> None:
    class Broken(LateLane):
        def wait(self, ticket: Any) -> None:
            raise RuntimeError("lost")

    with (
        pytest.raises(GGUFError, match="lost"),
        Transport(files, Broken, threads=1, buffer_bytes=256) as transport,
    ):
        transport.order(span_of(0, 10), torch.empty(10, dtype=torch.uint8))


def test_memory_for_buffers_is_named_when_there_is_none(files: list[Path]) -> None:
    class Full(HostLane):
        def buffer(self, nbytes: int) -> torch.Tensor:
            raise RuntimeError("CUDA error: out of memory\nCompile with")

    message = (
        "0.gguf: cannot take 256 MiB .*4 threads .CUDA error: out of memory.;.*num"
    )
    with pytest.raises(GGUFError, match=message):
        Transport(files, Full)


def test_error_of_the_block_ends_the_threads_and_is_kept(files: list[Path]) -> None:
    reads = []
    raised = threading.Event()

    def slow(file: int, buffers: list[np.ndarray], offset: int) -> int:
        raised.wait(10)
        reads.append(offset)
        return buffers[0].size

    threads = threading.active_count()
    later = threading.Timer(0.1, raised.set)

    def interrupted() -> None:
        with Transport(files, HostLane, threads=1, buffer_bytes=256) as transport:
            transport.order(span_of(0, 512), torch.empty(512, dtype=torch.uint8))
            later.start()
            raise KeyboardInterrupt

    with mock.patch.object(os, "preadv", slow), pytest.raises(KeyboardInterrupt):
        interrupted()
    later.join()
    assert len(reads) <= 1, "what was not begun is dropped"
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    "target",
    [
        torch.empty(99, dtype=torch.uint8),
        torch.empty(100, dtype=torch.int8),
        torch.empty(200, dtype=torch.uint8)[::2],
    ],
    ids=["size", "dtype", "strides"],
)
def test_target_that_does_not_fit_is_refused(
    target: torch.Tensor, files: list[Path]
) -> None:
    with (
        pytest.raises(ValueError, match=f"{NAME}: 100 bytes need a contiguous uint8"),
        Transport(files, HostLane, threads=1, buffer_bytes=256) as transport,
    ):
        transport.order(span_of(0, 100), target)


def test_cuda_lane_waits_for_earlier_work_and_orders_copy_and_event() -> None:
    calls: list[Any] = []
    stream, event, target = mock.MagicMock(), mock.MagicMock(), mock.MagicMock()
    stream.wait_stream.side_effect = lambda other: calls.append(("after", other))
    event.record.side_effect = lambda where: calls.append(("record", where))
    event.synchronize.side_effect = lambda: calls.append("synchronize")
    target.copy_.side_effect = lambda source, non_blocking: calls.append(non_blocking)
    with (
        mock.patch.object(torch.cuda, "Stream", return_value=stream),
        mock.patch.object(torch.cuda, "current_stream", return_value="current"),
        mock.patch.object(torch.cuda, "set_stream", lambda s: calls.append(("use", s))),
        mock.patch.object(torch.cuda, "Event", return_value=event),
    ):
        lane = CudaLane(torch.device("cuda", 1))
        lane.wait(lane.copy(target, torch.empty(1)))
    assert calls == [
        ("after", "current"),
        *(("use", stream), True, ("record", stream), "synchronize"),
    ]
