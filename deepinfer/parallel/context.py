"""Which rows of a long prompt's chunk each rank of a context group computes (model.md section 20).

A chunk is cut into ``2 * size`` pieces of ``ceil(rows / (2 * size))`` rows; rank r computes the pieces r and
``2 * size - 1 - r``, an early and a late one. A late row reads more positions than an early one, and the two pieces of
any rank read as many together as those of any other: work is even. What is missing at the end of the chunk is padding.
"""

from __future__ import annotations

from typing import NamedTuple

from deepinfer.errors import ArgumentError


class Pieces(NamedTuple):
    """Rows of a chunk, counted from its first, that one rank computes; either may be empty.

    Attributes:
        early, late: the two pieces, in the order of their positions.
    """

    early: range
    late: range


def chunk_alignment(size: int) -> int:
    """Return in multiples of what chunks are cut and charged, so that only a prompt's last chunk is padded."""
    return 1 if size == 1 else 2 * size


def piece_rows(rows: int, size: int) -> int:
    """Return the rows of a piece, padding included."""
    return -(-rows // (2 * size))


def mirrored_pieces(rows: int, size: int, rank: int) -> Pieces:
    """Return the rows that a rank computes of a chunk of so many rows.

    Raises:
        ArgumentError: there is no such rank.
    """
    if not 0 <= rank < size:
        raise ArgumentError("context parallelism", [f"rank {rank} of {size} ranks: they are numbered from 0"])
    length = piece_rows(rows, size)

    def piece(number: int) -> range:
        return range(min(rows, number * length), min(rows, (number + 1) * length))

    return Pieces(piece(rank), piece(2 * size - 1 - rank))


def positions_read(pieces: Pieces, cached: int) -> int:
    """Return how many positions the rows of a rank may look at: each itself and all before it."""
    return sum((2 * (cached + piece.start) + len(piece) + 1) * len(piece) // 2 for piece in pieces)
