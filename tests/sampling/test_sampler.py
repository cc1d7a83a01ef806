"""One step's sampling through the reference: mixed rows equal solo rows, log-probabilities belong to their tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

import pytest
import torch

from deepinfer.accelerator.ops.sampling import NO_MASS, RowStatus
from deepinfer.sampling import RowRequest, SampledRow

MakeRow = Callable[..., RowRequest]
SampleRows = Callable[[torch.Tensor, Sequence[RowRequest]], list[SampledRow]]
INF = math.inf


def logits(count: int, width: int = 101, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * 3


def mixed(make_row: MakeRow) -> list[RowRequest]:
    """Rows of every setting."""
    return [
        make_row(seed=1),
        make_row(temperature=0),
        make_row(temperature=0, logprobs=5),
        make_row(top_k=5, logprobs=7, seed=2),
        make_row(top_p=0.8, seed=3),
        make_row(top_k=20, top_p=0.5, min_p=0.05, logprobs=0, seed=4),
        make_row(min_p=0.2, raw_logprobs=True, logprobs=3, seed=5),
        make_row(logit_bias={3: 4.0, 9: -50.0}, seed=6, outputs=[1, 2]),
        make_row(presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3, outputs=[8, 8, 9], seed=7),
        make_row(blacklist_token_ids=[0, 1, 2], first_n_token_no_eos=2, logprobs=4, seed=8),
        make_row(allowed_token_ids=[10, 20, 30], logprobs=5, seed=9),
        make_row(golden_token_ids=[55], logprobs=2, seed=10),
        make_row(golden_token_ids=[55], logprobs=2, raw_logprobs=True, blacklist_token_ids=[55], seed=11),
        make_row(min_tokens=4, stop_token_ids=[5, 6], temperature=2.0, seed=12),
        make_row(temperature=1e-45, logprobs=1),
    ]


def test_a_mixed_batch_equals_its_solo_runs_bit_for_bit(make_row: MakeRow, sample_rows: SampleRows) -> None:
    rows = mixed(make_row)
    x_BV = logits(len(rows))
    together = sample_rows(x_BV, rows)
    alone = [sample_rows(x_BV[place : place + 1], [row])[0] for place, row in enumerate(rows)]
    assert together == alone


def test_a_mixed_batch_in_any_order_and_among_broken_rows_gives_the_same(
    make_row: MakeRow, sample_rows: SampleRows
) -> None:
    rows = mixed(make_row)
    x_BV = logits(len(rows))
    together = sample_rows(x_BV, rows)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(2)).tolist()
    broken = torch.full((1, 101), math.nan)
    shuffled = sample_rows(
        torch.cat([broken, x_BV[order], -INF * torch.ones(1, 101)]),
        [make_row(logprobs=9), *[rows[place] for place in order], make_row(top_p=0.1)],
    )
    assert shuffled[1:-1] == [together[place] for place in order]
    assert shuffled[0] == SampledRow(-1, RowStatus.NAN, None)
    assert shuffled[-1] == SampledRow(-1, RowStatus.EMPTY, None)


def test_the_chosen_token_is_always_listed(make_row: MakeRow, sample_rows: SampleRows) -> None:
    rows = mixed(make_row)
    for row, found in zip(rows, sample_rows(logits(len(rows)), rows), strict=True):
        count = row.sampling.params.logprobs
        if count is None:
            assert found.log_probabilities is None
        else:
            assert found.log_probabilities is not None
            assert found.token_id in found.log_probabilities
            assert len(found.log_probabilities) <= count + 1


def test_log_probabilities_are_valid_json(make_row: MakeRow, sample_rows: SampleRows) -> None:
    rows = mixed(make_row)
    found = sample_rows(logits(len(rows)), rows)
    json.dumps([row.log_probabilities for row in found], allow_nan=False)


@pytest.mark.parametrize("count", [0, 1, 2, 5, 100, 101, 106])
def test_only_tokens_with_mass_are_listed_and_they_sum_to_one(
    make_row: MakeRow, sample_rows: SampleRows, count: int
) -> None:
    rows = [
        make_row(allowed_token_ids=[4, 5], logprobs=count),
        make_row(top_k=1, logprobs=count),
        make_row(first_n_token_no_eos=1, logprobs=count),
    ]
    x_BV = logits(3)
    x_BV[2, 100] = 50.0
    for row, kept in zip(sample_rows(x_BV, rows), (2, 1, 100), strict=True):
        assert row.log_probabilities is not None
        assert len(row.log_probabilities) in {min(count, kept), min(count + 1, kept)}
        assert 100 not in row.log_probabilities
        if count >= kept:
            assert sum(math.exp(value) for value in row.log_probabilities.values()) == pytest.approx(1.0, abs=1e-5)


def test_raw_values_ignore_every_adjustment_and_filter(make_row: MakeRow, sample_rows: SampleRows) -> None:
    x_BV = logits(1)
    row = make_row(
        raw_logprobs=True,
        logprobs=3,
        temperature=0.1,
        top_k=2,
        blacklist_token_ids=[int(x_BV.argmax())],
        logit_bias={7: 90.0},
    )
    (found,) = sample_rows(x_BV, [row])
    exact = x_BV[0].double().log_softmax(-1)
    best = exact.argsort(descending=True)[:3].tolist()
    assert found.log_probabilities is not None
    assert list(found.log_probabilities)[:3] == best
    assert found.token_id == 7
    for token_id, value in found.log_probabilities.items():
        assert value == pytest.approx(float(exact[token_id]), rel=1e-6)


def test_a_forced_token_has_the_value_it_would_have_had(make_row: MakeRow, sample_rows: SampleRows) -> None:
    x_BV = logits(1)
    (free,) = sample_rows(x_BV, [make_row(logprobs=101)])
    (forced,) = sample_rows(x_BV, [make_row(logprobs=0, golden_token_ids=[42])])
    assert free.log_probabilities is not None
    assert forced.token_id == 42
    assert forced.log_probabilities == {42: free.log_probabilities[42]}


def test_a_forced_token_that_is_banned_is_emitted_with_the_stand_in(make_row: MakeRow, sample_rows: SampleRows) -> None:
    (found,) = sample_rows(logits(1), [make_row(logprobs=0, golden_token_ids=[42], blacklist_token_ids=[42])])
    assert found == SampledRow(42, RowStatus.OK, {42: NO_MASS})


def test_everything_masked_ends_one_row_without_a_filler_token(make_row: MakeRow, sample_rows: SampleRows) -> None:
    rows = [make_row(allowed_token_ids=[5], blacklist_token_ids=[5], logprobs=2), make_row(temperature=0)]
    x_BV = logits(2)
    found = sample_rows(x_BV, rows)
    assert found[0] == SampledRow(-1, RowStatus.EMPTY, None)
    assert found[1].token_id == int(x_BV[1].argmax())


def test_a_ban_on_a_neighbours_best_token_does_not_reach_it(make_row: MakeRow, sample_rows: SampleRows) -> None:
    x_BV = torch.zeros(2, 101)
    x_BV[:, 100] = 5.0
    rows = [make_row(temperature=0, blacklist_token_ids=[100]), make_row(temperature=0)]
    assert [row.token_id for row in sample_rows(x_BV, rows)] == [0, 100]


def test_identical_requests_draw_alike_and_other_seeds_or_indices_do_not(
    make_row: MakeRow, sample_rows: SampleRows
) -> None:
    x_BV = torch.zeros(1, 101).expand(40, -1)
    twins = sample_rows(x_BV, [make_row(seed=5, outputs=[1] * (place // 2)) for place in range(40)])
    assert [row.token_id for row in twins[::2]] == [row.token_id for row in twins[1::2]]
    assert len({row.token_id for row in twins}) > 10
    seeds = sample_rows(x_BV, [make_row(seed=place) for place in range(40)])
    assert len({row.token_id for row in seeds}) > 20


def test_the_cut_between_prompt_and_output_does_not_change_a_draw(make_row: MakeRow, sample_rows: SampleRows) -> None:
    x_BV = torch.zeros(1, 101).expand(9, -1)
    rows = [make_row(seed=5, prompt=[1] * (9 - place), outputs=[1] * place) for place in range(9)]
    assert len({row.token_id for row in sample_rows(x_BV, rows)}) == 1
