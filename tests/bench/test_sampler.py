"""`bench sampler` runs the op that the plan binds, with the threads it was told, and says which tokens came out."""

from __future__ import annotations

from functools import partial
from itertools import count

import pytest
import torch

from deepinfer.accelerator.selection import select
from deepinfer.bench.sampler import CASES, SamplerSettings, run_sampler
from deepinfer.errors import ArgumentError
from deepinfer.settings import Settings

ENVIRONMENT = Settings()
SMALL = SamplerSettings(rows=3, vocabulary=4200, threads=1, repeats=2)


def driver() -> object:
    return select("cpu_ref", ENVIRONMENT).driver()


def test_every_setting_has_a_result_that_names_who_computed_it() -> None:
    ticks: list[None] = []
    report = run_sampler(
        SMALL,
        driver(),
        ENVIRONMENT,
        clock=partial(next, count(0.0, 1.0)),
        cpu_clock=partial(next, count(0.0, 3.0)),
        tick=lambda: ticks.append(None),
    )
    assert [(result.top_k, result.top_p) for result in report.results] == [(-1, 1.0), (50, 1.0), (-1, 0.9), (50, 0.9)]
    assert len(ticks) == len(CASES)
    for result in report.results:
        assert result.provider == "cpu_ref native"
        assert (result.median_ms, result.best_ms, result.cpu_ms) == (1000, 1000, 3000)


def test_the_digest_tells_the_tokens_apart_and_is_the_same_for_the_same_tokens() -> None:
    first = [result.tokens_digest for result in run_sampler(SMALL, driver(), ENVIRONMENT).results]
    again = [result.tokens_digest for result in run_sampler(SMALL, driver(), ENVIRONMENT).results]
    other = SamplerSettings(rows=3, vocabulary=4200, threads=1, repeats=2, seed=1)
    assert first == again
    assert first != [result.tokens_digest for result in run_sampler(other, driver(), ENVIRONMENT).results]


def test_the_report_says_how_many_threads_computed_and_leaves_the_process_as_it_was() -> None:
    before = torch.get_num_threads()
    asked = SamplerSettings(rows=1, vocabulary=10, threads=before + 1, repeats=1)
    assert run_sampler(asked, driver(), ENVIRONMENT).environment.threads == before + 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("name", ["rows", "vocabulary", "threads", "repeats"])
def test_settings_that_measure_nothing_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        SamplerSettings(**{name: 0})
