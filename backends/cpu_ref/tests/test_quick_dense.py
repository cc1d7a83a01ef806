"""Draws from rows of which nearly every token matters: the bits of the readable ops, at every border.

Legend: R rows, V vocabulary, N blocks of a row, C tokens of a block, M uniforms.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch

from deepinfer.accelerator.ops.sampling import SamplingRows
from deepinfer_cpu_ref import quick_dense
from deepinfer_cpu_ref.quick_blocks import BlockedRows, DrawnRows
from deepinfer_cpu_ref.quick_cut import LARGEST_ID, UNDECIDED, cut_rows
from deepinfer_cpu_ref.quick_dense import draw_dense
from deepinfer_cpu_ref.quick_guess import Bracket, CutRows, CutSettings
from deepinfer_cpu_ref.quick_masses import (
    Accuracy,
    ApproximateMasses,
    ExactMasses,
    Floats,
    add_up,
    can_be_approximate,
)
from deepinfer_cpu_ref.quick_scratch import Scratch
from deepinfer_cpu_ref.sampling import ReadableSampling

READABLE = ReadableSampling()
INF = math.inf
BLOCK = 64
LARGEST_UNIFORM = 1 - 2**-53


@dataclass(frozen=True)
class GivenGuess:
    """Looks for the cut in one bracket, whatever it hears."""

    middle: Floats
    given: Bracket

    def bracket(self, excess_R: Floats) -> Bracket:
        return self.given

    def guess(self, rows: CutRows, rest_R: Floats) -> GivenGuess:
        return self


def settings_of(count: int, temperature: float = 1.0, top_p: float = 1.0, min_weight: int = 0) -> SamplingRows:
    return SamplingRows(
        temperature_B=torch.full((count,), temperature, dtype=torch.float64),
        top_k_B=torch.zeros(count, dtype=torch.int64),
        top_p_B=torch.full((count,), top_p, dtype=torch.float64),
        min_weight_B=torch.full((count,), min_weight),
        seeds_B=torch.arange(count),
        streams_B=torch.arange(count),
        forced_ids_B=torch.full((count,), -1),
    )


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uniform(seed: int, count: int) -> torch.Tensor:
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def drawn_of(x_RV: torch.Tensor, rows: SamplingRows, uniforms_R: torch.Tensor) -> tuple[BlockedRows, DrawnRows]:
    return BlockedRows.of(x_RV, BLOCK), DrawnRows(torch.arange(len(x_RV)), rows, uniforms_R)


def assert_same_draws(x_RV: torch.Tensor, rows: SamplingRows, uniforms_R: torch.Tensor) -> None:
    wanted = READABLE.draw(READABLE.weigh(x_RV, rows), uniforms_R)
    found = draw_dense(*drawn_of(x_RV, rows, uniforms_R), x_RV.shape[1], Scratch())
    assert torch.equal(found, wanted)


def assert_same_draws_of_one(x_V: torch.Tensor, rows: SamplingRows, uniforms_M: torch.Tensor) -> None:
    assert_same_draws(x_V.expand(len(uniforms_M), -1).contiguous(), rows, uniforms_M)


def hard_rows(width: int) -> torch.Tensor:
    """Smooth, tied everywhere or in levels, one spike, few tokens that are allowed, and rows far from zero."""
    x_V = normal(1, width)
    masked_V = x_V.masked_fill(torch.arange(width) % 1000 != 7, -INF)
    spike_V = x_V.clone()
    spike_V[width // 2] += 12
    late_V = torch.full((width,), -2.0)
    late_V[-1] = 3.0
    rows = [x_V, torch.zeros(width), x_V.round(), x_V.round(decimals=2), masked_V, spike_V, late_V]
    return torch.stack([*rows, x_V - 600, x_V + 5000, x_V * 3, x_V * 0.01 + 40, (x_V * 9).clamp(max=0)])


@pytest.mark.parametrize("temperature", [1e-2, 0.1, 0.7, 1.0, 3.0, 100.0, 1e9, 1e300, 1e-300])
@pytest.mark.parametrize("top_p", [1.0, LARGEST_UNIFORM, 1 - 1e-9, 0.999, 0.9, 0.5, 1e-3, 1e-12, 0.0])
def test_hard_rows_are_drawn_as_by_the_readable_ops(temperature: float, top_p: float) -> None:
    x_RV = hard_rows(4500)
    rows = settings_of(len(x_RV), temperature, top_p)
    for uniforms_R in (uniform(7, len(x_RV)), torch.zeros(len(x_RV), dtype=torch.float64)):
        assert_same_draws(x_RV, rows, uniforms_R)
    assert_same_draws(x_RV, rows, torch.full((len(x_RV),), LARGEST_UNIFORM, dtype=torch.float64))


@pytest.mark.parametrize("min_weight", [1, 2, 2**20, 2**31])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.2])
def test_hard_rows_with_min_p_are_drawn_as_by_the_readable_ops(min_weight: int, top_p: float) -> None:
    x_RV = hard_rows(4500)
    rows = settings_of(len(x_RV), 1.0, top_p, min_weight)
    assert_same_draws(x_RV, rows, uniform(3, len(x_RV)))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_rows_of_mixed_settings_on_any_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        scratch = Scratch()
        for count in (1, 2, 3, 7, 8, 9, 31, 64, 65):
            x_RV = normal(count, count, 4160)
            choice = torch.arange(count)
            rows = replace(
                settings_of(count),
                temperature_B=torch.tensor([1.0, 0.6, 1.0, 4.0], dtype=torch.float64)[choice % 4],
                top_p_B=torch.tensor([1.0, 0.9, 1.0, 0.5, 0.99], dtype=torch.float64)[choice % 5],
                min_weight_B=torch.tensor([0, 0, 0, 2**24, 0, 0, 1])[choice % 7],
            )
            uniforms_R = uniform(count, count)
            found = draw_dense(*drawn_of(x_RV, rows, uniforms_R), 4160, scratch)
            assert torch.equal(found, READABLE.draw(READABLE.weigh(x_RV, rows), uniforms_R))
    finally:
        torch.set_num_threads(before)


def test_rows_that_are_not_neighbours_are_drawn_from_their_own_logits() -> None:
    x_BV = normal(5, 12, 4160)
    blocked = BlockedRows.of(x_BV, BLOCK)
    places_R = torch.tensor([0, 1, 5, 6, 11])
    for top_p in (1.0, 0.8):
        rows, uniforms_R = settings_of(5, 1.0, top_p), uniform(2, 5)
        found = draw_dense(blocked, DrawnRows(places_R, rows, uniforms_R), 4160, Scratch())
        assert torch.equal(found, READABLE.draw(READABLE.weigh(x_BV[places_R], rows), uniforms_R))


@pytest.mark.parametrize("middle", [0.0, -735.0, 740.0])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_draw_near_the_end_of_a_token_is_told_apart_exactly(middle: float, top_p: float) -> None:
    # Each draw is aimed at the border of two tokens, and one unit of 2**-53 beside it.
    x_V = normal(2, 6000) * 0.1 + middle
    through_V = READABLE.weigh(x_V[None], settings_of(1, 1.0, top_p)).weights_BV[0].cumsum(0)
    borders_M = through_V[::120].double() / through_V[-1].double()
    beside = [(borders_M * 2**53 + off).floor() / 2**53 for off in (-1, 0, 1)]
    uniforms_M = torch.cat(beside).clamp(max=LARGEST_UNIFORM)
    assert_same_draws_of_one(x_V, settings_of(len(uniforms_M), 1.0, top_p), uniforms_M)


@pytest.mark.parametrize("decimals", [None, 0, 1])
def test_a_cut_at_the_border_of_two_tokens_is_told_apart_exactly(decimals: int | None) -> None:
    # Each top-p is the share of the heaviest so and so many tokens, and one unit of 2**-53 beside it; the draws are the
    # last that is possible and others.
    x_V = normal(4, 5000) if decimals is None else normal(4, 5000).round(decimals=decimals)
    weights_V = READABLE.weigh(x_V[None], settings_of(1)).weights_BV[0]
    through_V = weights_V.sort(descending=True).values.cumsum(0)
    shares_M = through_V[::170].double() / through_V[-1].double()
    top_p_M = torch.cat([(shares_M * 2**53 + off).floor() / 2**53 for off in (-1, 0, 1)]).clamp(max=1)
    for value in (LARGEST_UNIFORM, 0.99, 0.5):
        uniforms_M = torch.full_like(top_p_M, value)
        assert_same_draws_of_one(x_V, replace(settings_of(len(top_p_M)), top_p_B=top_p_M), uniforms_M)


@pytest.mark.parametrize("top_p", [0.3, 0.9])
def test_rows_of_ties_are_cut_at_the_lowest_ids_and_never_left_undecided(top_p: float) -> None:
    x_RV = torch.zeros(3, 6000)
    x_RV[1] = normal(1, 6000).round()
    x_RV[2, ::2] = -1.0
    uniforms_R = torch.full((3,), 0.999, dtype=torch.float64)
    assert_same_draws(x_RV, settings_of(3, 1.0, top_p), uniforms_R)


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5])
def test_float32_decides_nearly_all_rows(top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []

    class CountedMasses(ExactMasses):
        def __init__(self, blocked: BlockedRows, drawn: DrawnRows) -> None:
            left.append(len(drawn.rows_R))
            super().__init__(blocked, drawn)

    monkeypatch.setattr(quick_dense, "ExactMasses", CountedMasses)
    x_RV = normal(9, 64, 16_384)
    x_RV[32:] += 900
    rows, uniforms_R = settings_of(64, 1.0, top_p), uniform(1, 64)
    draw_dense(*drawn_of(x_RV, rows, uniforms_R), 16_384, Scratch())
    assert sum(left) <= 8


@pytest.mark.parametrize("temperature", [0.05, 0.3, 1.0, 2.0, 1e3])
def test_no_mass_and_no_sum_is_farther_from_the_weights_than_the_proof_says(temperature: float) -> None:
    x_RV = hard_rows(4160)
    rows = settings_of(len(x_RV), temperature)
    blocked, drawn = drawn_of(x_RV, rows, uniform(1, len(x_RV)))
    assert can_be_approximate(blocked, drawn).all()
    masses = ApproximateMasses(blocked, drawn)
    weights_RV = READABLE.weigh(x_RV, rows).weights_BV.double()
    unit_R1, relative_R1, absolute_R1 = (torch.from_numpy(column_R)[:, None] for column_R in masses.accuracy[:3])
    scratch = Scratch()
    for part, masses_RNC in masses.pieces(scratch):
        sums_RN = torch.empty(masses_RNC.shape[:2], dtype=torch.float64)
        add_up(masses_RNC, masses.accuracy.unit_R[part], sums_RN, scratch)
        sums_of_weights_RN = weights_RV[part].view(len(sums_RN), -1, BLOCK).sum(-1)
        room_RN = relative_R1[part] * sums_RN + absolute_R1[part] * BLOCK
        assert ((sums_RN - sums_of_weights_RN).abs() <= room_RN).all()
        masses_RV = masses_RNC.flatten(1).double() * unit_R1[part]
        assert ((masses_RV - weights_RV[part]).abs() <= relative_R1[part] * masses_RV + absolute_R1[part]).all()
        assert (relative_R1 < 3e-6).all()


def test_a_power_of_two_is_off_by_at_most_its_last_place() -> None:
    exponents = torch.cat([normal(1, 2**18) * 20, torch.arange(-126, 33).float(), torch.linspace(-1, 1, 2**16)])
    exponents = exponents.clamp(-126, 32)
    exact = exponents.double().exp2()
    assert ((exponents.exp2().double() - exact).abs() <= exact * 2.0**-23).all()


def test_a_guess_is_never_believed_when_it_is_wrong() -> None:
    decided = 0
    generator = torch.Generator().manual_seed(31)
    for scale, top_p, min_weight in itertools.product((0.5, 3.0), (0.2, 0.9, 0.999), (0, 2**28)):
        x_V = torch.randn(640, generator=generator) * scale
        x_V[:300] = x_V[:300].round(decimals=1)
        kept_V = READABLE.weigh(x_V[None], settings_of(1, 1.0, top_p, min_weight)).weights_BV[0]
        before_V = READABLE.weigh(x_V[None], settings_of(1)).weights_BV[0]
        levels = before_V[torch.randint(640, (40,), generator=generator)].sort().values.view(-1, 2)
        brackets = torch.cat([levels, torch.tensor([[1, 2**31 + 1], [5, 5]])]).double().repeat(3, 1)
        count = len(brackets)
        share_R = torch.tensor([0.0, 0.5, 1.0]).repeat_interleave(count // 3).double()
        low_R, high_R = brackets.T.numpy()
        guess = GivenGuess(low_R + share_R.numpy() * (high_R - low_R), Bracket(low_R, high_R))
        masses_RNC = before_V.double().view(1, 10, BLOCK).repeat(count, 1, 1)
        one_R, none_R = np.ones(count), np.zeros(count)
        rows = CutRows(
            masses_RNC=masses_RNC,
            logits_BV=x_V[None].numpy(),
            places_R=np.zeros(count, dtype=np.int64),
            total_R=np.full(count, float(before_V.sum())),
            settings=CutSettings(
                one_R * float(x_V.max()), one_R, one_R * top_p, np.full(count, max(1, min_weight), dtype=np.int64)
            ),
            accuracy=Accuracy(one_R, none_R, none_R, none_R),
            add_up=partial(lambda masses_RNC: masses_RNC.sum(-1).numpy(), masses_RNC),
        )
        cuts = cut_rows(rows, guess.guess, np.empty((2, count, 640), dtype=np.bool_))
        keys_V = (before_V << 31) | (LARGEST_ID - torch.arange(640))
        for sums_N, least_key in zip(cuts.sums_RN, cuts.least_key_R.tolist(), strict=True):
            if least_key != UNDECIDED:
                decided += 1
                assert torch.equal(torch.from_numpy(sums_N).long(), kept_V.view(10, BLOCK).sum(-1))
                assert torch.equal((keys_V >= least_key) & (before_V >= max(1, min_weight)), kept_V > 0)
        assert not cuts.doubt_R.any()
    assert decided >= 36
