"""Scatter is measured as it is: none in equal steps, Poisson's in independent choices, more in bursts."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.parallel.loads import LoadWindow
from deepinfer.parallel.noise import ONE, cautious, dispersions, lone_copy_weight, relative_scatter


def test_equal_steps_have_no_scatter_even_if_their_sizes_differ() -> None:
    step = np.array([100, 200, 700])
    load = LoadWindow(np.stack([step, 3 * step, 2 * step])[:, None])
    assert dispersions(load).tolist() == [0]


def test_independent_choices_have_dispersion_one_and_bursts_more() -> None:
    generator = np.random.default_rng(0)
    calm = generator.multinomial(50_000, np.full(300, 1 / 300), size=20)
    bursts = calm * generator.integers(0, 2, calm.shape) * 2
    measured = dispersions(LoadWindow(np.stack([calm, bursts], axis=1).astype(np.int64)))
    assert measured[0] / ONE == pytest.approx(1, abs=0.08)
    assert measured[1] > 50 * ONE


def test_a_single_step_and_an_idle_layer_tell_nothing() -> None:
    assert dispersions(LoadWindow(np.array([[[5, 9, 1]]], dtype=np.int64))).tolist() == [0]
    assert dispersions(LoadWindow(np.zeros((4, 1, 3), dtype=np.int64))).tolist() == [0]


def test_decisions_reckon_with_poisson_at_most_and_where_nothing_is_known() -> None:
    assert cautious(0, steps=1) == ONE
    assert cautious(0, steps=5) == 0
    assert cautious(7 * ONE, steps=5) == ONE


def test_the_scatter_of_a_rank_s_load_is_one_over_the_root_of_its_tokens() -> None:
    assert relative_scatter(ONE, tokens=64 * 1600, ranks=64) / ONE == pytest.approx(1 / 40, rel=1e-3)


def test_a_lone_copy_weighs_more_among_many_ranks_and_few_tokens() -> None:
    assert lone_copy_weight(ONE, 98_304, 64) / ONE == pytest.approx(np.sqrt(5) / (2 * np.sqrt(1536)), rel=1e-2)
    assert lone_copy_weight(ONE, 98_304, 2) == 0
    assert lone_copy_weight(0, 98_304, 64) == 0
    assert lone_copy_weight(ONE, 0, 64) == ONE
