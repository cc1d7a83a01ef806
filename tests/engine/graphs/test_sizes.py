"""Which numbers of rows are recorded, and which graph serves a step."""

from __future__ import annotations

import pytest

from deepinfer.engine.graphs.sizes import graph_sizes, select
from deepinfer.errors import ArgumentError


def test_sizes_are_powers_up_to_the_interval_then_its_multiples_then_the_most() -> None:
    assert graph_sizes(24) == (1, 2, 4, 8, 16, 24)
    assert graph_sizes(384) == (1, 2, 4, 8, *range(16, 385, 8))
    assert graph_sizes(21) == (1, 2, 4, 8, 16, 21)
    assert graph_sizes(3) == (1, 2, 3)
    assert graph_sizes(20, 6) == (1, 2, 4, 6, 12, 18, 20)
    assert graph_sizes(5, 1) == (1, 2, 3, 4, 5)


def test_the_smallest_graph_that_holds_the_rows_serves_them() -> None:
    assert select(graph_sizes(384), 37) == 40
    assert [select((1, 2, 4, 8), rows) for rows in range(1, 9)] == [1, 2, 4, 4, 8, 8, 8, 8]


@pytest.mark.parametrize("interval", range(1, 12))
def test_no_step_is_padded_by_an_interval(interval: int) -> None:
    for most in range(1, 40):
        sizes = graph_sizes(most, interval)
        assert sizes[-1] == most
        assert all(0 <= select(sizes, rows) - rows < interval for rows in range(1, most + 1))


def test_rows_that_no_graph_holds_and_sizes_of_nothing_are_refused() -> None:
    with pytest.raises(ArgumentError, match="no graph holds 9 rows; the largest holds 8"):
        select((1, 8), 9)
    with pytest.raises(ArgumentError, match="at least 1"):
        graph_sizes(0)
