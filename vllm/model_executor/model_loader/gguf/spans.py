# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Which bytes of a file a rank needs: plain arithmetic, without torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Span:
    """A matrix of bytes in a file: `rows` of `width` bytes, `stride` bytes apart.

    `tensor` is the name of the file's tensor that the bytes are of. `offset` counts
    bytes from the start of the file of shard number `shard`.
    """

    tensor: str
    shard: int
    offset: int
    rows: int
    width: int
    stride: int

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.rows * self.width

    @property
    def reach(self) -> int:
        """Bytes of the file from the first to the last that is needed."""
        return (self.rows - 1) * self.stride + self.width if self.rows else 0

    @property
    def gapless(self) -> bool:
        return self.rows <= 1 or self.width == self.stride

    def narrow(self, dim: int, start: int, length: int) -> "Span":
        """`length` rows (`dim` 0 or -2) or bytes of each row (1 or -1) from `start`.

        Raises IndexError if there are not as many.
        """
        if dim not in (-2, -1, 0, 1):
            raise IndexError(f"{self.tensor}: dim {dim} of a matrix; expected 0 or 1.")
        along_rows = dim in (0, -2)
        size = self.rows if along_rows else self.width
        if start < 0 or length < 0 or start + length > size:
            raise IndexError(
                f"{self.tensor}: {length} from {start} on do not lie within the {size} "
                f"{'rows' if along_rows else 'bytes of a row'}."
            )
        if along_rows:
            return replace(self, offset=self.offset + start * self.stride, rows=length)
        return replace(self, offset=self.offset + start, width=length)

    def pieces(self, limit: int) -> Iterator[tuple[int, "Span"]]:
        """Parts of at most `limit` bytes, in file order, each with the number of the
        byte of the matrix that it starts with.

        A matrix without gaps is cut anywhere, another one between rows. Raises
        ValueError if a row of such a matrix is longer than `limit`.
        """
        if not self.nbytes:
            return
        if self.gapless:
            for start in range(0, self.nbytes, limit):
                size = min(limit, self.nbytes - start)
                yield (
                    start,
                    replace(
                        self,
                        offset=self.offset + start,
                        rows=1,
                        width=size,
                        stride=size,
                    ),
                )
            return
        if self.width > limit:
            raise ValueError(
                f"{self.tensor}: {self.width} bytes of each row are needed, but a "
                f"buffer holds {limit}; use larger buffers."
            )
        step = limit // self.width
        for row in range(0, self.rows, step):
            count = min(step, self.rows - row)
            yield row * self.width, self.narrow(0, row, count)
