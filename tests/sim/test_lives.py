"""Simulated lives: nothing is lost, nothing is stuck, every token is the oracle's; and each kind of mistake is seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deepinfer.scheduling.step import ScheduledStep
from deepinfer.sim import Scenario, live
from deepinfer.sim.__main__ import main
from deepinfer.sim.model import make_simulated_model
from deepinfer.sim.shadow import ShadowWorker

STEPS = 60
BATCH = 25
MUTANT_SEEDS = range(40)


@pytest.mark.parametrize("first", range(0, 200, BATCH))
def test_lives_over_a_shadow_memory_go_well(first: int) -> None:
    for seed in range(first, first + BATCH):
        assert live(seed, STEPS).problems == [], f"python -m deepinfer.sim --seed {seed} --steps {STEPS}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_simulated_model(tmp_path_factory.mktemp("simulated") / "model")


@pytest.mark.parametrize("seed", range(8))
def test_lives_on_the_oracle_driver_go_well(seed: int, model: Path) -> None:
    assert live(seed, 30, model).problems == []


def test_a_request_that_ended_while_a_failing_step_was_planned_is_not_forked() -> None:
    report = live(61795, 20, has_forms=False)
    assert report.problems == []
    assert report.faults == 1


def test_a_life_replays_from_its_seed() -> None:
    first, second = live(17, STEPS), live(17, STEPS)
    assert first == second
    assert first != live(18, STEPS)


def test_lives_meet_everything_that_they_are_for() -> None:
    reports = [live(seed, STEPS) for seed in range(30)]
    for name in ("tokens", "aborts", "forks", "faults", "preemptions"):
        assert sum(getattr(report, name) for report in reports) > 0, name
    endings = {reason for report in reports for reason in report.endings}
    assert endings == {"stop", "length", "abort", "ignored", "insufficient_system_resource", "grammar_failed"}


def some_life_sees_it() -> bool:
    return any(live(seed, STEPS).problems for seed in MUTANT_SEEDS)


def test_a_forgotten_block_copy_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(self: ShadowWorker, step: ScheduledStep) -> None:
        for source, destination in step.slot_copies:
            self._rings_ZP[destination] = self._rings_ZP[source]

    monkeypatch.setattr(ShadowWorker, "copy", copy)
    assert some_life_sees_it()


def test_a_forgotten_slot_copy_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(self: ShadowWorker, step: ScheduledStep) -> None:
        for source, destination in step.block_copies:
            self._blocks_NP[destination] = self._blocks_NP[source]

    monkeypatch.setattr(ShadowWorker, "copy", copy)
    assert some_life_sees_it()


def test_a_write_to_somebody_elses_block_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    written = ShadowWorker._write

    def write(self: ShadowWorker, step: ScheduledStep, number: int, ids: np.ndarray) -> None:
        written(self, step, number, ids)
        if step.num_requests > 1:
            self._blocks_NP[step.block_table_RB[number - 1][0], 0] = ids[0]

    monkeypatch.setattr(ShadowWorker, "_write", write)
    assert some_life_sees_it()


def test_a_ring_that_is_one_place_off_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    written = ShadowWorker._write

    def write(self: ShadowWorker, step: ScheduledStep, number: int, ids: np.ndarray) -> None:
        written(self, step, number, ids)
        slot = step.state_slot_R[number]
        self._rings_ZP[slot] = np.roll(self._rings_ZP[slot], 1)

    monkeypatch.setattr(ShadowWorker, "_write", write)
    assert some_life_sees_it()


def test_the_command_tells_how_it_went(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3", "--seeds", "2", "--steps", "20"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("2 lives: ")
    assert told.endswith("nothing went wrong\n")


def test_the_command_names_the_seed_that_went_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ShadowWorker, "_read", lambda self, step, number, length: 5)
    assert main(["--seed", "3", "--steps", "20"]) == 1
    told = capsys.readouterr().out
    assert "replay: python -m deepinfer.sim --seed 3 --steps 20\n" in told
    assert "the oracle says" in told
    assert main(["--seed", "3", "--steps", "20", "--no-async-scheduling", "--drafts", "2"]) == 1
    replayed = "replay: python -m deepinfer.sim --seed 3 --steps 20 --no-async-scheduling --drafts 2\n"
    assert replayed in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--seeds", "0"], ["--steps", "x"], ["--nonsense"]])
def test_bad_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_lives_whose_steps_are_planned_ahead_go_well() -> None:
    for seed in range(12):
        assert live(seed, STEPS, async_scheduling=True).problems == [], f"--seed {seed} --async-scheduling"


@pytest.mark.parametrize("drafts", [0, 1, 5])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_life_emits_what_the_oracle_says_with_every_number_of_drafts(drafts: int, is_ahead: bool) -> None:  # noqa: FBT001
    for seed in range(200, 206):
        report = live(seed, 30, drafts=drafts, async_scheduling=is_ahead)
        assert report.problems == [], f"--seed {seed} --steps 30 --drafts {drafts}"


def test_half_of_the_lives_plan_ahead_and_a_seed_is_otherwise_the_same_life() -> None:
    scenarios = [Scenario.from_seed(seed) for seed in range(100)]
    assert 30 < sum(bool(scenario.options.async_scheduling) for scenario in scenarios) < 70
    one, ahead = (Scenario.from_seed(3, async_scheduling=value) for value in (False, True))
    assert replace(one, options=ahead.options) == ahead
    assert replace(one.options, async_scheduling=True) == ahead.options


def test_an_assumption_that_nobody_puts_right_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    corrected = ShadowWorker._corrected

    def trusting(self: ShadowWorker, step: ScheduledStep) -> ScheduledStep:
        """The newest token is put in its place, where the plan says that it stands: as if all drafts were accepted."""
        true_step = corrected(self, step)
        flies_R = (step.in_flight_R > 0) & (true_step.q_R == step.q_R)
        cached_R = np.where(flies_R, step.cached_R, true_step.cached_R)
        return replace(true_step, cached_R=cached_R, k_R=cached_R + true_step.q_R)

    monkeypatch.setattr(ShadowWorker, "_corrected", trusting)
    assert any(live(seed, STEPS, async_scheduling=True, drafts=3).problems for seed in range(20))
