"""Log-probabilities of the reference: definition, total order, no infinities, same bits in every batch."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.accelerator.ops.sampling import NO_MASS, SamplingRows
from deepinfer_cpu_ref.sampling import CpuRefSampling

OPS = CpuRefSampling()
INF = math.inf
NAN = math.nan


def settings(
    count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> SamplingRows:
    zeros = torch.zeros(count, dtype=torch.int64)
    return SamplingRows(
        temperature_B=torch.full((count,), temperature, dtype=torch.float64),
        top_k_B=zeros + top_k,
        top_p_B=torch.full((count,), top_p, dtype=torch.float64),
        min_weight_B=zeros + int(min_p * 2**31),
        seeds_B=zeros,
        streams_B=zeros,
        forced_ids_B=zeros - 1,
    )


def logits(count: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * 4


def test_unfiltered_values_are_the_log_softmax() -> None:
    x_BV = logits(5, 1001)
    exact = (x_BV.double() / 0.7).log_softmax(-1)
    chosen = torch.tensor([0, 3, 500, 1000, 7])
    found = OPS.log_probabilities(x_BV, settings(5, 0.7), chosen, 1001)
    assert torch.allclose(found.chosen_B.double(), exact.gather(1, chosen[:, None])[:, 0], rtol=1e-6, atol=1e-7)
    listed = found.top_ids_BN >= 0
    values = exact.gather(1, found.top_ids_BN.clamp(min=0))
    assert torch.allclose(found.top_values_BN.double()[listed], values[listed], rtol=1e-6, atol=1e-7)


def test_filtered_values_are_renormalised_over_what_was_kept() -> None:
    x_BV = logits(6, 101)
    rows = settings(6, 0.8, 10, 0.9, 0.001)
    kept_BV = OPS.weigh(x_BV, rows).weights_BV > 0
    exact = torch.where(kept_BV, x_BV.double() / 0.8, -INF).log_softmax(-1)
    found = OPS.log_probabilities(x_BV, rows, x_BV.argmax(-1), 101)
    for row in range(6):
        ids = [token_id for token_id in found.top_ids_BN[row].tolist() if token_id >= 0]
        assert sorted(ids) == kept_BV[row].nonzero()[:, 0].tolist()
        values = found.top_values_BN[row, : len(ids)].double()
        assert torch.allclose(values, exact[row, ids], rtol=1e-6, atol=1e-6)
        assert float(values.exp().sum()) == pytest.approx(1.0, abs=1e-6)


def test_processed_values_without_processing_are_the_raw_ones() -> None:
    x_BV = logits(4, 333)
    chosen = torch.tensor([5, 6, 7, 332])
    processed = OPS.log_probabilities(x_BV, settings(4), chosen, 20)
    raw = OPS.raw_log_probabilities(x_BV, chosen, 20)
    assert torch.equal(processed.chosen_B, raw.chosen_B)
    assert torch.equal(processed.top_ids_BN, raw.top_ids_BN)
    assert torch.equal(processed.top_values_BN, raw.top_values_BN)


def test_temperature_zero_lists_the_one_token_with_probability_one() -> None:
    x_BV = torch.tensor([[1.0, 3.0, 3.0]])
    found = OPS.log_probabilities(x_BV, settings(1, 0.0), torch.tensor([1]), 3)
    assert found.chosen_B.tolist() == [0.0]
    assert found.top_ids_BN.tolist() == [[1, -1, -1]]
    assert found.top_values_BN.tolist() == [[0.0, NO_MASS, NO_MASS]]


def test_one_finite_token_has_log_probability_zero() -> None:
    x_BV = torch.tensor([[-INF, -7.0, -INF]])
    for found in (
        OPS.log_probabilities(x_BV, settings(1), torch.tensor([1]), 2),
        OPS.raw_log_probabilities(x_BV, torch.tensor([1]), 2),
    ):
        assert found.chosen_B.tolist() == [0.0]
        assert found.top_ids_BN.tolist() == [[1, -1]]
        assert found.top_values_BN.tolist() == [[0.0, NO_MASS]]


def test_a_chosen_token_that_was_filtered_away_has_the_documented_stand_in() -> None:
    x_BV = torch.tensor([[5.0, 1.0, 4.0, -INF]] * 3)
    chosen = torch.tensor([1, 3, -1])
    assert OPS.log_probabilities(x_BV, settings(3, 1.0, 2), chosen, 0).chosen_B.tolist() == [NO_MASS] * 3
    assert OPS.raw_log_probabilities(x_BV, chosen, 0).chosen_B.tolist()[1:] == [NO_MASS] * 2


def test_an_unfiltered_token_too_rare_to_be_drawn_still_has_its_value() -> None:
    x_BV = torch.tensor([[0.0, -40.0]])
    found = OPS.log_probabilities(x_BV, settings(1), torch.tensor([1]), 2)
    assert found.chosen_B.tolist() == [-40.0]
    assert found.top_ids_BN.tolist() == [[0, -1]]


def test_lists_follow_the_total_order_and_short_ones_begin_long_ones() -> None:
    x_BV = torch.tensor([[1.0, 2.0, 1.0, -0.0, 0.0, 2.0], [-1.0, -2.0, -1.0, 0.0, -0.0, -3.0]])
    chosen = torch.tensor([0, 0])
    for found in (
        OPS.raw_log_probabilities(x_BV, chosen, 9),
        OPS.log_probabilities(x_BV, settings(2), chosen, 9),
    ):
        assert found.top_ids_BN.tolist() == [[1, 5, 0, 2, 3, 4, -1, -1, -1], [3, 4, 0, 2, 1, 5, -1, -1, -1]]
    for count in range(7):
        short = OPS.raw_log_probabilities(x_BV, chosen, count)
        assert short.top_ids_BN.tolist() == [ids[:count] for ids in found.top_ids_BN.tolist()]
        assert torch.equal(short.chosen_B, found.chosen_B)


@pytest.mark.parametrize("values", [[NAN, 1.0, 2.0], [INF, 1.0, 2.0], [-INF, -INF, -INF]])
def test_broken_rows_have_no_values_and_their_neighbours_all_of_theirs(values: list[float]) -> None:
    x_BV = torch.tensor([[1.0, 0.5, 0.0], values, [0.0, 3.0, 1.0]])
    chosen = torch.tensor([0, 1, 2])
    alone = OPS.raw_log_probabilities(x_BV[::2], chosen[::2], 2)
    for found in (OPS.raw_log_probabilities(x_BV, chosen, 2), OPS.log_probabilities(x_BV, settings(3), chosen, 2)):
        assert found.chosen_B[1] == NO_MASS
        assert found.top_ids_BN[1].tolist() == [-1, -1]
        assert found.top_values_BN[1].tolist() == [NO_MASS, NO_MASS]
        assert torch.equal(found.chosen_B[::2], alone.chosen_B)
        assert torch.equal(found.top_values_BN[::2], alone.top_values_BN)


def test_no_value_is_ever_infinite_or_nan() -> None:
    x_BV = torch.tensor([[3e38, -3e38, 0.0, -INF], [0.0, -1e4, 1.0, 2.0]])
    for temperature in (0.0, 1e-45, 1e-10, 1.0, 1e308):
        for chosen in ([0, 0], [1, 1], [3, 3]):
            found = OPS.log_probabilities(x_BV, settings(2, temperature), torch.tensor(chosen), 4)
            assert found.chosen_B.isfinite().all()
            assert found.top_values_BN.isfinite().all()


def test_values_have_the_same_bits_in_every_batch_and_piece() -> None:
    x_BV = logits(70, 5003, seed=4)
    chosen = torch.arange(70) * 7
    rows = settings(70, 0.9, 0, 0.95)
    batch = OPS.log_probabilities(x_BV, rows, chosen, 5)
    raw = OPS.raw_log_probabilities(x_BV, chosen, 5)
    for row in (0, 1, 51, 52, 69):
        one = slice(row, row + 1)
        alone = OPS.log_probabilities(x_BV[one].clone(), rows.slice(row, row + 1), chosen[one], 5)
        assert torch.equal(alone.chosen_B, batch.chosen_B[one])
        assert torch.equal(alone.top_ids_BN, batch.top_ids_BN[one])
        assert torch.equal(alone.top_values_BN, batch.top_values_BN[one])
        assert torch.equal(OPS.raw_log_probabilities(x_BV[one], chosen[one], 5).chosen_B, raw.chosen_B[one])


def test_no_rows_give_empty_tensors_of_the_right_shape() -> None:
    found = OPS.raw_log_probabilities(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), 3)
    assert found.chosen_B.shape == (0,)
    assert found.top_ids_BN.shape == (0, 3)
    assert found.top_ids_BN.dtype == torch.int64
    assert found.top_values_BN.dtype == torch.float32
