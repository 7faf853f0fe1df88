# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.model_executor.model_loader.gguf.spans import Span

FILE = np.random.default_rng(0).integers(256, size=20_000, dtype=np.uint8)


def content(span: Span) -> np.ndarray:
    """The bytes of `span` in FILE: uint8 [rows, width]."""
    return np.ndarray(
        (span.rows, span.width),
        np.uint8,
        FILE,
        offset=span.offset,
        strides=(span.stride, 1),
    )


def matrix(offset: int, rows: int, width: int) -> Span:
    return Span("t", 0, offset, rows, width, width)


@given(st.data(), st.integers(0, 999), st.integers(1, 30), st.integers(1, 200))
def test_narrowed_twice_it_names_the_bytes_that_numpy_does(data, offset, rows, width):
    span = matrix(offset, rows, width)
    expected = content(span)
    for dim in data.draw(st.permutations([data.draw(st.sampled_from([0, -2])), -1])):
        size = expected.shape[dim]
        start = data.draw(st.integers(0, size))
        length = data.draw(st.integers(0, size - start))
        span = span.narrow(dim, start, length)
        part = slice(start, start + length)
        expected = expected[:, part] if dim == -1 else expected[part]
    assert np.array_equal(content(span), expected)
    assert span.nbytes == expected.size


@given(
    st.integers(1, 30),
    st.integers(1, 100),
    st.integers(0, 50),
    st.integers(100, 3000),
)
def test_pieces_make_up_the_matrix_in_file_order(rows, width, gap, limit):
    span = matrix(100, rows, width + gap).narrow(1, gap // 2, width)
    found = np.zeros(span.nbytes, np.uint8)
    covered = 0
    offsets = []
    for start, piece in span.pieces(limit):
        assert start == covered
        assert 0 < piece.nbytes <= limit
        found[start : start + piece.nbytes] = content(piece).ravel()
        covered += piece.nbytes
        offsets.append(piece.offset)
    assert covered == span.nbytes
    assert offsets == sorted(offsets)
    assert np.array_equal(found, content(span).ravel())


def test_pieces_are_as_large_as_they_may_be():
    assert [p.nbytes for _, p in matrix(0, 10, 100).pieces(450)] == [450, 450, 100]
    cut = matrix(0, 10, 100).narrow(1, 0, 50)
    assert [p.rows for _, p in cut.pieces(199)] == [3, 3, 3, 1]


def test_one_row_of_a_cut_matrix_is_cut_anywhere():
    row = matrix(0, 2, 1000).narrow(1, 500, 300).narrow(0, 1, 1)
    assert [p.nbytes for _, p in row.pieces(128)] == [128, 128, 44]


def test_nothing_needs_no_piece():
    assert list(matrix(0, 10, 100).narrow(0, 3, 0).pieces(64)) == []


def test_reach_ends_with_the_last_byte_needed():
    cut = matrix(0, 10, 100).narrow(1, 50, 25)
    assert (cut.nbytes, cut.reach) == (250, 925)
    assert matrix(0, 10, 100).narrow(0, 0, 0).reach == 0


def test_row_longer_than_a_buffer_is_refused():
    cut = matrix(0, 10, 100).narrow(1, 0, 80)
    with pytest.raises(ValueError, match="t: 80 bytes of each row .* holds 79"):
        list(cut.pieces(79))


@pytest.mark.parametrize(
    ("dim", "start", "length", "message"),
    [
        (0, 8, 3, "t: 3 from 8 on do not lie within the 10 rows"),
        (1, -1, 3, "within the 100 bytes of a row"),
        (-1, 0, 101, "within the 100 bytes of a row"),
        (2, 0, 1, "dim 2 of a matrix"),
    ],
)
def test_parts_beyond_the_matrix_are_refused(dim, start, length, message):
    with pytest.raises(IndexError, match=message):
        matrix(0, 10, 100).narrow(dim, start, length)
