"""Rows of a chunk on the ranks of a context group: each row once, and the same work for everybody."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import ArgumentError
from deepinfer.parallel.context import chunk_alignment, mirrored_pieces, piece_rows, positions_read

SIZES = st.integers(1, 9)


@given(rows=st.integers(0, 300), size=SIZES)
def test_every_row_is_computed_once_and_no_rank_has_more_than_two_pieces_full(rows: int, size: int) -> None:
    shares = [mirrored_pieces(rows, size, rank) for rank in range(size)]
    assert sorted(row for share in shares for piece in share for row in piece) == list(range(rows))
    assert all(len(piece) <= piece_rows(rows, size) for share in shares for piece in share)
    # Padding is less than one alignment, whatever the chunk.
    assert 0 <= 2 * size * piece_rows(rows, size) - rows < 2 * size


@given(length=st.integers(0, 200), size=SIZES, cached=st.integers(0, 10**6))
def test_an_aligned_chunk_is_the_same_work_for_every_rank(length: int, size: int, cached: int) -> None:
    rows = length * 2 * size
    shares = [mirrored_pieces(rows, size, rank) for rank in range(size)]
    assert {(len(share.early), len(share.late)) for share in shares} == {(length, length)}
    work = {positions_read(share, cached) for share in shares}
    assert len(work) == 1
    assert work.pop() * size == sum(cached + row + 1 for row in range(rows))


@given(rows=st.integers(1, 300), size=SIZES, cached=st.integers(0, 1000))
def test_the_last_chunk_of_a_prompt_is_as_even_as_its_padding_lets_it_be(rows: int, size: int, cached: int) -> None:
    work = [positions_read(mirrored_pieces(rows, size, rank), cached) for rank in range(size)]
    missing = 2 * size * piece_rows(rows, size) - rows
    padded = sum(cached + rows + number + 1 for number in range(missing))
    assert max(work) - min(work) <= padded


def test_pieces_by_hand() -> None:
    assert [mirrored_pieces(16, 2, rank) for rank in (0, 1)] == [
        (range(4), range(12, 16)),
        (range(4, 8), range(8, 12)),
    ]
    assert mirrored_pieces(9, 2, 0) == (range(3), range(9, 9))
    assert mirrored_pieces(9, 2, 1) == (range(3, 6), range(6, 9))
    assert positions_read(mirrored_pieces(9, 2, 1), 10) == sum(range(14, 20))


def test_one_rank_computes_everything_unaligned() -> None:
    assert chunk_alignment(1) == 1
    assert chunk_alignment(3) == 6
    assert [row for piece in mirrored_pieces(7, 1, 0) for row in piece] == list(range(7))


@pytest.mark.parametrize("rank", [-1, 3])
def test_there_is_no_rank_beyond_the_group(rank: int) -> None:
    with pytest.raises(ArgumentError, match=f"rank {rank} of 3 ranks"):
        mirrored_pieces(10, 3, rank)
