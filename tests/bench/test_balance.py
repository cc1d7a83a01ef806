"""`bench balance` gives every policy the same windows, and its load generator draws what it says."""

from __future__ import annotations

from functools import partial
from itertools import count

import numpy as np
import pytest

from deepinfer.bench.balance import BalanceSettings, run_balance
from deepinfer.bench.balance_loads import LoadShape, LoadStream, zipf_exponent
from deepinfer.errors import ArgumentError

SMALL = BalanceSettings(
    loads=("zipf-1.0",), drifts=(0.0, 0.5), continuations=3, layers=3, experts=12, ranks=4, slots_per_rank=4
)
SHAPE = LoadShape(layers=2, experts=50, pairs_per_step=20_000, steps=4)


def test_every_load_and_drift_has_a_result_of_every_policy_and_a_step_without_chance() -> None:
    ticks: list[None] = []
    report = run_balance(SMALL, clock=partial(next, count(0.0, 2.0)), tick=lambda: ticks.append(None))
    assert [(result.drift, result.policy) for result in report.results] == [
        (drift, policy) for drift in (0.0, 0.5, None) for policy in ("keep", "greedy", "balanced")
    ]
    assert len(ticks) == SMALL.cases == 3
    assert {result.seconds for result in report.results} == {2.0}


def test_keeping_moves_nothing_and_greedy_is_its_own_measure() -> None:
    results = run_balance(SMALL).results
    for result in results:
        if result.policy == "keep":
            assert (result.moved_slots, result.bytes) == (0, 0)
        if result.policy == "greedy":
            assert (result.over_greedy, result.over_greedy_error) == (0, 0)
        assert result.over_greedy == pytest.approx(
            result.next_ratio
            - next(each for each in results if each.drift == result.drift and each.policy == "greedy").next_ratio,
            abs=2e-6,
        )
    balanced = {result.drift: result for result in results if result.policy == "balanced"}
    assert balanced[0.0].moved_slots == 0
    assert balanced[None].planning_ratio == balanced[None].next_ratio < 1.02


def test_a_run_is_a_function_of_its_seed() -> None:
    def ratios(settings: BalanceSettings) -> list[float]:
        return [result.next_ratio for result in run_balance(settings).results]

    other = BalanceSettings(
        loads=("zipf-1.0",), drifts=(0.0, 0.5), continuations=3, layers=3, experts=12, ranks=4, slots_per_rank=4, seed=1
    )
    assert ratios(SMALL) == ratios(SMALL)
    assert ratios(SMALL) != ratios(other)


def test_a_window_counts_its_pairs_by_the_weights_which_differ_from_layer_to_layer() -> None:
    counts = LoadStream("zipf-1.0", SHAPE, 3).window().counts_TLE
    assert (counts.sum(axis=2) == SHAPE.pairs_per_step).all()
    wanted = np.sort(1 / np.arange(1, 51) / (1 / np.arange(1, 51)).sum())
    for layer in range(2):
        assert np.sort(counts[:, layer].sum(axis=0) / 80_000) == pytest.approx(wanted, abs=0.004)
    assert counts[:, 0].sum(axis=0).argmax() != counts[:, 1].sum(axis=0).argmax()


def test_drift_swaps_the_weights_of_so_many_experts_and_loses_none() -> None:
    stream = LoadStream("lognormal", SHAPE, 3)
    before = stream.noiseless_step().counts_TLE[0]
    stream.drift(0.2)
    after = stream.noiseless_step().counts_TLE[0]
    changed = (before != after).sum(axis=1)
    assert (changed > 0).all()
    assert (changed <= 10).all()
    assert np.sort(after, axis=1).tolist() == np.sort(before, axis=1).tolist()
    stream.drift(0.0)
    assert stream.noiseless_step().counts_TLE[0].tolist() == after.tolist()


def test_continuations_share_the_past_and_differ_after_it() -> None:
    stream = LoadStream("zipf-0.8", SHAPE, 3)
    stream.window()
    one, again, other = stream.continued(3, 1), stream.continued(3, 1), stream.continued(3, 2)
    assert one.noiseless_step().counts_TLE.tolist() == other.noiseless_step().counts_TLE.tolist()
    first = one.window().counts_TLE
    assert first.tolist() == again.window().counts_TLE.tolist()
    assert first.tolist() != other.window().counts_TLE.tolist()


@pytest.mark.parametrize("load", ["zipf", "zipf-", "zipf--1", "zipf-nan", "zipf-99", "uniform", ""])
def test_an_unknown_load_is_refused(load: str) -> None:
    with pytest.raises(ArgumentError, match="zipf-EXPONENT"):
        zipf_exponent(load)
