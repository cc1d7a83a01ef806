"""One traffic in many worlds: drafts and planning ahead change no answer, and a difference is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer.sim import live
from deepinfer.sim.__main__ import main
from deepinfer.sim.agreement import World, differences, live_in_worlds, worlds_of
from deepinfer.sim.events import EndedRequest
from deepinfer.sim.life import LifeReport
from deepinfer.sim.model import make_simulated_model

STEPS = 8
BATCH = 20


@pytest.mark.parametrize("first", range(0, 100, BATCH))
def test_answers_differ_neither_by_drafts_nor_by_planning_ahead(first: int) -> None:
    for seed in range(first, first + BATCH):
        reference, *others = worlds_of(seed)
        # Two others for each seed, so that all numbers of drafts come by turns.
        worlds = [reference, others[seed % len(others)], others[(seed + 1 + seed // 6) % len(others)]]
        problems = [problem for report in live_in_worlds(seed, STEPS, worlds=worlds) for problem in report.problems]
        assert problems == [], f"python -m deepinfer.sim --compare --seed {seed} --steps {STEPS}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_simulated_model(tmp_path_factory.mktemp("simulated") / "model")


@pytest.mark.parametrize("seed", range(6))
def test_answers_do_not_differ_where_rows_are_really_drawn_and_drafts_matched(seed: int, model: Path) -> None:
    reports = live_in_worlds(seed, 4, model, has_forms=True)
    problems = [problem for report in reports for problem in report.problems]
    assert problems == [], f"python -m deepinfer.sim --compare --oracle --forms --seed {seed} --steps 4"
    assert all(report.answers for report in reports)


def test_every_number_of_drafts_and_both_ways_of_planning_are_compared() -> None:
    assert {world.drafts for world in worlds_of(3)} == set(range(6))
    assert {world for seed in (0, 1) for world in worlds_of(seed)} == {
        World(drafts, is_ahead) for drafts in range(6) for is_ahead in (False, True)
    }


def test_a_replayed_script_is_the_same_traffic() -> None:
    first = live(4, STEPS, verification="coupled", has_forms=True)
    again = live(4, STEPS, verification="coupled", has_forms=True, script=first.script)
    assert again.script == first.script
    assert again.answers == first.answers
    assert {type(event).__name__ for seed in range(20) for event in live(seed, STEPS).script} == {
        "Arrival",
        "Abort",
        "Fork",
        "Fault",
    }


def ended(*answers: tuple[tuple[int, ...], str], prompt: tuple[int, ...] = (5,)) -> LifeReport:
    return LifeReport(0, answers={"r0": EndedRequest(prompt, answers)})


def test_another_token_is_a_difference_whatever_ended_the_answers() -> None:
    (told,) = differences(ended(((1, 2, 3), "abort")), ended(((1, 9), "length")))
    assert told == "request r0 answer 0: output 1 is 9, and 2 in the first world"


@pytest.mark.parametrize("other", [((1, 2), "stop"), ((1, 2, 3), "stop"), ((1, 2), "length")])
def test_another_end_is_a_difference_where_the_end_lies_in_the_tokens(other: tuple[tuple[int, ...], str]) -> None:
    (told,) = differences(ended(((1, 2, 3), "length")), ended(other))
    assert "in the first world" in told


@pytest.mark.parametrize("reason", ["abort", "insufficient_system_resource"])
def test_a_shorter_answer_that_was_cut_off_is_no_difference(reason: str) -> None:
    assert differences(ended(((1, 2, 3), "length")), ended(((1, 2), reason))) == []
    assert differences(ended(((1, 2), reason)), ended(((1, 2, 3), "length"))) == []


def test_children_of_other_histories_and_strangers_are_not_compared() -> None:
    assert differences(ended(((1,), "length")), ended(((2,), "length"), prompt=(5, 6))) == []
    assert differences(ended(((1,), "length")), LifeReport(0)) == []


def test_a_sibling_is_compared_with_its_own_twin() -> None:
    (told,) = differences(ended(((1,), "length"), ((2,), "length")), ended(((1,), "length"), ((3,), "length")))
    assert told.startswith("request r0 answer 1:")


def test_the_command_compares_and_says_with_what(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--compare", "--seed", "3", "--steps", "3"]) == 0
    assert capsys.readouterr().out.startswith("7 lives: ")

    def other_answers(*args: object, **keywords: object) -> LifeReport:
        report = live(3, 3, verification="coupled", drafts=0)
        if keywords["drafts"] == 2:
            changed = {
                name: replace_first(request) for name, request in report.answers.items() if request.answers[0][0]
            }
            return replace(report, answers=changed)
        return report

    monkeypatch.setattr("deepinfer.sim.agreement.live", other_answers)
    assert main(["--compare", "--seed", "3", "--steps", "3"]) == 1
    told = capsys.readouterr().out
    assert "seed 3: with 2 drafts, " in told
    assert "with 3 drafts" not in told
    assert "replay: python -m deepinfer.sim --seed 3 --steps 3 --compare\n" in told


def replace_first(request: EndedRequest) -> EndedRequest:
    (tokens, reason), *others = request.answers
    return request._replace(answers=(((tokens[0] + 1, *tokens[1:]), reason), *others))


def test_what_a_comparison_decides_cannot_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--compare", "--drafts", "2", "--no-async-scheduling"])
    assert caught.value.code == 2
    assert "--drafts and --async-scheduling" in capsys.readouterr().err
