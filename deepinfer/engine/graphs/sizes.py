"""Which numbers of rows are recorded, and which of them serves a step (engine.md section 5.2)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from deepinfer.errors import ArgumentError

DEFAULT_INTERVAL = 8


def graph_sizes(most_rows: int, interval: int = DEFAULT_INTERVAL) -> tuple[int, ...]:
    """Return the sizes: 1, 2, 4 and on up to ``interval``, then its multiples, and ``most_rows`` itself.

    Args:
        most_rows: rows of the largest step, ``max_num_seqs * (1 + num_speculative_tokens)``.
        interval: no step is padded by as many rows.
    """
    if most_rows < 1 or interval < 1:
        raise ArgumentError("graph sizes", [f"most_rows {most_rows} and interval {interval} must be at least 1"])
    powers = {1 << power for power in range(interval.bit_length())}
    sizes = {*powers, *range(interval, most_rows + 1, interval), most_rows}
    return tuple(sorted(size for size in sizes if size <= most_rows))


def select(sizes: Sequence[int], rows: int) -> int:
    """Return the smallest of ascending sizes that holds so many rows."""
    place = bisect_left(sizes, rows)
    if place == len(sizes):
        raise ArgumentError("graph sizes", [f"no graph holds {rows} rows; the largest holds {sizes[-1]}"])
    return sizes[place]
