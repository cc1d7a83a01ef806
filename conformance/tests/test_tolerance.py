"""The tolerance function: it covers honest arithmetic, in any order, and little more."""

from __future__ import annotations

import pytest
import torch

from deepinfer.accelerator import all_op_names
from deepinfer_conformance.bounds import BOUNDS
from deepinfer_conformance.data.draws import Draws
from deepinfer_conformance.tolerance import ELEMENTARY, UNIT_ROUNDOFF, growth, independent, tol


@pytest.mark.parametrize("length", [3, 64, 1000, 20_000])
def test_sums_in_any_order_stay_within_the_growth(length: int) -> None:
    terms = Draws(0, f"sum/{length}").normal("x", 32, length)
    exact, size = terms.to(torch.float64).sum(1), terms.to(torch.float64).abs().sum(1)
    one_by_one = torch.zeros(32)
    for column in terms.unbind(1):
        one_by_one = one_by_one + column
    for computed in (one_by_one, terms.sum(1), terms.flip(1).sum(1)):
        error = (computed.to(torch.float64) - exact).abs()
        assert bool((error <= growth(length, torch.float32) * size).all())


def test_a_sum_in_too_narrow_an_accumulator_exceeds_the_growth() -> None:
    terms = Draws(0, "narrow").normal("x", 8, 512).abs()
    exact = terms.to(torch.float64).sum(1)
    narrow = torch.zeros(8, dtype=torch.bfloat16)
    for column in terms.unbind(1):
        narrow = narrow + column.to(torch.bfloat16)
    assert bool(((narrow.to(torch.float64) - exact).abs() > growth(512, torch.float32) * exact).all())


def test_growth_rises_with_length_and_roundoff_and_is_never_above_the_worst_case() -> None:
    factors = [growth(length, torch.float32) for length in (1, 2, 30, 40, 1000, 10**6)]
    assert factors == sorted(factors)
    assert growth(5, torch.bfloat16) > growth(5, torch.float32) > growth(5, torch.float64)
    for length in (1, 7, 36, 10**6):
        assert growth(length, torch.float32) <= (length + 1) * UNIT_ROUNDOFF[torch.float32]


def test_the_output_rounding_is_that_of_the_dtype() -> None:
    assert tol("linear.dense", torch.bfloat16, 64).result == UNIT_ROUNDOFF[torch.bfloat16]
    assert tol("linear.dense", torch.float32, 64).result == UNIT_ROUNDOFF[torch.float32]


def test_independent_errors_add_by_their_norm_and_never_above_their_sum() -> None:
    errors = torch.full((1, 10_000), 1.0)
    assert float(independent(errors, 1)) == pytest.approx(600.0)
    few = torch.tensor([[1.0, 2.0]])
    assert float(independent(few, 1)) == 3.0


def test_every_bounded_op_has_a_count_of_roundings() -> None:
    weights = ("sampling.", "drafting.propose")  # integers, of which one unit is the bound
    bounded = {op for op in BOUNDS if not op.startswith(weights)}
    assert bounded <= set(ELEMENTARY)
    assert set(ELEMENTARY) <= set(all_op_names())
