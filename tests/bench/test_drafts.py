"""The comparison of numbers of drafts: what is set is what happens, and the work is the same for all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepinfer.bench.drafts import DraftsSettings, SetAcceptance, compare_drafts
from deepinfer.bench.generation import GenerationSettings
from deepinfer.bench.model import model_source
from deepinfer.bench.report import no_tick
from deepinfer.engine.options import EngineKeywords
from deepinfer.errors import ArgumentError
from deepinfer.settings import Settings
from deepinfer_cpu_ref import Driver

GENERATION = GenerationSettings(batch_sizes=(2,), prompt_tokens=4, output_tokens=9, repeats=1)
SMALL = ["--batch-sizes", "1", "--prompt-tokens", 4, "--output-tokens", 5, "--repeats", 1]


class SlowingClock:
    """A clock that runs twice as long at every reading once a run is over."""

    def __init__(self) -> None:
        self.now = 0.0
        self._step = 1.0

    def __call__(self) -> float:
        self.now += self._step
        return self.now

    def slow(self) -> None:
        self._step *= 2


def compared(
    clock: Callable[[], float],
    *,
    is_ahead: bool = False,
    generation: GenerationSettings = GENERATION,
    after_run: Callable[[], None] = no_tick,
    **options: Any,
) -> Any:
    """Compare, one step at a time unless asked for otherwise."""
    settings = DraftsSettings(generation, **options)
    keywords = EngineKeywords(async_scheduling=is_ahead)
    ticks = []

    def tick() -> None:
        ticks.append(1)
        after_run()

    with model_source(None) as source:
        report = compare_drafts(source, Driver(), settings, Settings(), keywords=keywords, clock=clock, tick=tick)
    assert len(ticks) == settings.all_runs
    return report


def test_drafts_that_are_all_right_make_a_token_a_row_and_wrong_ones_make_one_a_step(step_clock: Any) -> None:
    right = compared(step_clock, drafts=(0, 2), acceptance=1.0).results
    assert [(each.batch_size, each.drafts) for each in right] == [(2, 0), (2, 2)]
    assert [each.tokens_per_step for each in right] == [1.0, pytest.approx(8 / 3, abs=1e-3)]  # 3, 3 and the last 2
    assert [each.rows_per_step for each in right] == [1.0, 3.0]
    assert right[0].accepted_by_place == ()
    wrong = compared(step_clock, drafts=(2,), acceptance=0.0).results
    assert [(each.tokens_per_step, each.accepted_by_place) for each in wrong] == [(1.0, (0.0, 0.0))]


def test_planned_ahead_requests_that_end_within_a_run_of_drafts_run_once_more_for_nothing(step_clock: Any) -> None:
    (ahead,) = compared(step_clock, is_ahead=True, drafts=(2,), acceptance=1.0).results
    assert ahead.tokens_per_step == 2.0  # 3, 3, the last 2, and nothing
    assert ahead.accepted_by_place == (1.0, 1.0)


def test_a_model_that_drafts_for_itself_answers_as_it_does_without(step_clock: Any) -> None:
    prompts = ["Why is the sky blue?", "Why does ice float?"]
    settings = DraftsSettings(GENERATION, (0, 3), acceptance=None)
    with model_source(None) as source:
        report = compare_drafts(source, Driver(), settings, Settings(), prompts=prompts, clock=step_clock)
    plain, drafted = report.results
    assert report.settings.generation.has_given_prompts
    assert plain.tokens_per_step == 1.0
    assert drafted.tokens_per_step > 2.0  # facts are known by heart, to the draft stages as well
    assert drafted.accepted_by_place[0] > 0.7


def test_steps_that_choose_verify_everything_where_rows_cost_nothing(step_clock: Any) -> None:
    fixed, variable = compared(step_clock, drafts=(3,), has_variable=True, acceptance=0.75).results
    assert (fixed.is_variable, variable.is_variable) == (False, True)
    assert (variable.tokens_per_step, variable.rows_per_step) == (fixed.tokens_per_step, fixed.rows_per_step)


def test_cases_that_alternate_do_what_they_do_one_after_the_other(step_clock: Any) -> None:
    generation = replace(GENERATION, batch_sizes=(2, 1), output_tokens=5)
    options = {"generation": generation, "drafts": (1, 0), "has_variable": True}
    alone, in_turn = (compared(step_clock, alternates=turns, **options).results for turns in (False, True))
    assert [(each.of_base, each.of_base_by_round) for each in alone] == [(None, ())] * 6
    assert [replace(each, of_base=None, of_base_by_round=()) for each in in_turn] == list(alone)
    plain = {each.batch_size: each.decode_tokens_per_s for each in in_turn if each.drafts == 0}
    for each in in_turn:
        ratio = each.decode_tokens_per_s / plain[each.batch_size]
        assert each.of_base == pytest.approx(ratio, rel=0.03)  # of rates with two decimals
        assert each.of_base_by_round == (each.of_base,)


def test_rounds_go_forwards_and_backwards_and_a_ratio_is_that_of_one_round() -> None:
    options = {"generation": replace(GENERATION, output_tokens=5, repeats=3), "drafts": (0, 2), "alternates": True}
    steady = compared(SlowingClock(), **options).results[1].of_base
    clock = SlowingClock()
    plain, drafted = compared(clock, after_run=clock.slow, **options).results
    assert (plain.of_base, plain.of_base_by_round) == (1.0, (1.0, 1.0, 1.0))
    # The second run of a round is twice as slow as the first: the drafts', no drafts', and the drafts' again.
    assert drafted.of_base_by_round == pytest.approx([steady / 2, steady * 2, steady / 2], rel=1e-3)
    assert drafted.of_base == pytest.approx(steady / 2, rel=1e-3)


def test_without_0_drafts_the_first_case_is_what_rates_are_compared_with(step_clock: Any) -> None:
    first, second = compared(step_clock, drafts=(2, 1), acceptance=1.0, alternates=True).results
    assert (first.drafts, first.of_base) == (2, 1.0)
    assert second.of_base < 1.0


def test_the_script_is_right_as_often_as_it_says_and_the_same_each_time() -> None:
    ids = list(range(20_000))
    script = SetAcceptance([ids], 0.75, 50_000)
    hits = [script.draft("bench-0", place) == token_id for place, token_id in enumerate(ids)]
    assert sum(hits) == pytest.approx(15_000, abs=300)
    assert hits == [SetAcceptance([ids], 0.75, 50_000).draft("bench-0", place) == place for place in ids]
    assert script.draft("bench-0", 20_000) in (0, 1)


def test_another_round_has_other_places_that_are_wrong() -> None:
    ids = list(range(20_000))
    hits = [
        [script.draft("bench-0", place) == place for place in ids]
        for script in (SetAcceptance([ids], 0.75, 50_000, number) for number in (0, 1))
    ]
    both = sum(first and second for first, second in zip(*hits, strict=True))
    assert both == pytest.approx(20_000 * 0.75**2, abs=300)


def test_the_command_prints_each_case_and_saves_it(run: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    ran = run("latency", "--drafts", "0..1", "--varlen", "--processor-time", *SMALL, "--save-result", file)
    assert ran.status == 0, ran.err
    assert "75% of the drafts are right by script" in ran.out
    saved = json.loads(file.read_text())
    assert [(each["drafts"], each["is_variable"]) for each in saved["results"]] == [(0, False), (1, False), (1, True)]
    assert saved["settings"]["clock"] == "processor"
    rows = [line.split()[:2] for line in ran.out.splitlines() if line.startswith("1 ")]
    assert rows == [["1", "0"], ["1", "1"], ["1", "to"]]


@pytest.mark.parametrize(("drafts", "column"), [("1,0", "of 0 drafts"), ("1,2", "of 1 draft")])
def test_the_table_of_cases_that_alternate_shows_the_ratios_of_rounds(
    run: Callable[..., Any], tmp_path: Path, drafts: str, column: str
) -> None:
    file = tmp_path / "result.json"
    ran = run("latency", "--drafts", drafts, "--alternate", *SMALL, "--repeats", 2, "--save-result", file)
    assert ran.status == 0, ran.err
    assert "median of 2 rounds in which all cases run" in ran.out
    saved = json.loads(file.read_text())
    assert saved["settings"]["alternates"] is True
    assert [len(each["of_base_by_round"]) for each in saved["results"]] == [2, 2]
    header = next(line for line in ran.out.splitlines() if line.startswith("batch "))
    place = re.split(r"  +", header).index(column)
    shown = [re.split(r"  +", line)[place] for line in ran.out.splitlines() if line.startswith("1 ")]
    assert shown == [f"{each['of_base']:.2f}" for each in saved["results"]]


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        (["--acceptance", 0.75], ["--acceptance, --own-drafts, --processor-time and --alternate need --drafts"]),
        (["--drafts", "0,1", "--own-drafts", "--acceptance", 0.75], ["--acceptance 0.75: ", "with --own-drafts"]),
        (["--own-drafts", "--acceptance", 1, "--repeats", 0], ["need --drafts", "--acceptance 1: ", "repeats holds 0"]),
    ],
)
def test_a_share_that_would_be_ignored_is_refused(
    run: Callable[..., Any], arguments: list[object], problems: list[str]
) -> None:
    for command in ("latency", "throughput"):
        ran = run(command, *SMALL, *arguments)
        assert (ran.status, ran.out) == (2, "")
        assert [problem for problem in problems if problem not in ran.err] == []


def test_a_share_that_is_given_is_set_and_own_drafts_have_none(run: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    ran = run("latency", "--drafts", "1", "--acceptance", 0.5, *SMALL, "--save-result", file)
    assert "50% of the drafts are right by script" in ran.out
    assert json.loads(file.read_text())["settings"]["acceptance"] == 0.5
    ran = run("latency", "--drafts", "1", "--own-drafts", *SMALL, "--save-result", file)
    assert "drafts and answers are its own" in ran.out
    assert json.loads(file.read_text())["settings"]["acceptance"] is None


def test_nonsense_is_refused_at_once(run: Callable[..., Any]) -> None:
    for option in ("--varlen", "--own-drafts", "--processor-time", "--alternate"):
        assert "need --drafts" in run("latency", option, *SMALL).err
    assert "write whole numbers" in run("latency", "--drafts", "5..x", *SMALL).err
    assert "compare at least one number above 0" in run("latency", "--drafts", "0", "--varlen", *SMALL).err
    with pytest.raises(ArgumentError, match="no share"):
        DraftsSettings(GENERATION, (1,), acceptance=75)
