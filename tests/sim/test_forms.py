"""Lives with forms: every way to end is met, and every kind of mistake about forms, bans and stops is seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deepinfer.engine.answers import Answer
from deepinfer.sampling.grammar import GrammarProgress, StructuredOutputs
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.sampler import SampledRow
from deepinfer.sim import Scenario, live
from deepinfer.sim.forms import Automaton, AutomatonMatcher, form_text, unpacked
from deepinfer.sim.model import simulated_config
from deepinfer.sim.shadow import ShadowWorker
from deepinfer.sim.wishes import Wishes

STEPS = 25
END = 1


def some_life_sees_it() -> bool:
    return any(live(seed, STEPS, drafts=4, has_forms=True).problems for seed in range(20))


def test_lives_with_forms_meet_every_end() -> None:
    reports = [live(seed, STEPS, has_forms=True, is_short=True) for seed in range(24)]
    assert [report.problems for report in reports] == [[] for _ in reports]
    endings = {reason for report in reports for reason in report.endings}
    assert endings == {"stop", "length", "abort", "ignored", "grammar_failed", "insufficient_system_resource"}


def test_half_of_the_lives_have_forms_and_are_otherwise_the_same() -> None:
    scenarios = [Scenario.from_seed(seed) for seed in range(100)]
    assert 30 < sum(scenario.has_forms for scenario in scenarios) < 70
    without, with_forms = (Scenario.from_seed(3, has_forms=value) for value in (False, True))
    assert replace(without, has_forms=True) == with_forms


def test_drafts_that_move_a_form_on_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutomatonMatcher, "rollback", lambda self, count: None)
    assert some_life_sees_it()


def test_a_mask_that_lies_one_row_late_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = GrammarProgress.fill

    def late(self: GrammarProgress, mask_KW: np.ndarray, drafts: Sequence[int] = ()) -> None:
        fill(self, mask_KW, drafts)
        mask_KW[1:] = mask_KW[:-1].copy()

    monkeypatch.setattr(GrammarProgress, "fill", late)
    assert some_life_sees_it()


def test_a_row_that_ignores_its_bans_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.sim.shadow.without", lambda allowed_V, banned: allowed_V)
    assert some_life_sees_it()


def test_a_run_that_goes_on_behind_its_stop_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(self: Answer, rows: Sequence[SampledRow], most: int) -> tuple[list[int], SampledRow | None]:
        taken: list[int] = []
        for row in rows[:most]:
            if row.token_id < 0:
                return taken, row
            self.append(row.token_id, None, ended_by_token=False)
            taken.append(row.token_id)
        return taken, None

    monkeypatch.setattr(Answer, "take_run", greedy)
    assert some_life_sees_it()


def test_an_answer_that_forgets_its_form_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ShadowWorker._chosen

    def free(self: ShadowWorker, token_id: int, request: Any, place: int) -> SampledRow:
        return chosen(self, token_id, request._replace(allowed_mW=None), place)

    monkeypatch.setattr(ShadowWorker, "_chosen", free)
    assert some_life_sees_it()


def allowed_by(progress: GrammarProgress, drafts: Sequence[int], vocab_size: int) -> list[set[int]]:
    mask_KW = np.zeros((1 + len(drafts), -(-vocab_size // 32)), np.int32)
    progress.fill(mask_KW, drafts)
    return [set(np.flatnonzero(unpacked(row, vocab_size)).tolist()) for row in mask_KW]


@pytest.mark.parametrize("bound", [None, 100])
@pytest.mark.parametrize("trigger", [(), (2,), (3, 4)])
def test_the_engine_and_the_simulation_read_a_form_alike(trigger: tuple[int, ...], bound: int | None) -> None:
    """Two readings: the engine's phases with their drafts, and the simulation's from the tokens alone."""
    config = simulated_config()
    draw = np.random.default_rng(0)
    for number in range(12):
        wanted = StructuredOutputs(regex=form_text(number), trigger_token_ids=trigger, bound_token_id=bound)
        wishes = Wishes.of(SamplingParams(structured_outputs=wanted), config)
        progress = GrammarProgress(
            Automaton.from_text(form_text(number), config.vocab_size, END), wanted, [config.eos_token_id]
        )
        outputs = [*([7, *trigger] if trigger else []), *([] if bound is None else [bound])]
        for token_id in outputs:
            progress.commit(token_id)
        for _ in range(6):
            drafts: list[int] = []
            expected = [set(np.flatnonzero(wishes.choices(outputs)).tolist())]
            while len(drafts) < 3:
                drafts.append(int(draw.choice(sorted(expected[-1]))))
                expected.append(set(np.flatnonzero(wishes.choices([*outputs, *drafts])).tolist()))
            assert allowed_by(progress, drafts, config.vocab_size) == expected
            progress.commit(drafts[0])
            outputs.append(drafts[0])
