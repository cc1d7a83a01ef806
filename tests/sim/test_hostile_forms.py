"""A hostile user: aborts at every hook, stops inside accepted runs, bans the only token, forms that end inside a run.

Everything runs with right drafts, so that whole runs are accepted, one step at a time and planned ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from deepinfer.engine.engine import Engine
from deepinfer.engine.outputs import CompletionOutput
from deepinfer.sampling.grammar import StructuredOutputs
from deepinfer.sampling.params import SamplingParams
from deepinfer.sim import Scenario
from deepinfer.sim.forms import FORBIDDEN, Automaton, AutomatonCompiler, form_text
from deepinfer.sim.model import simulated_config
from deepinfer.sim.shadow import ShadowWorker, build_shadow_engine
from deepinfer.sim.witness import Witness

CONFIG = simulated_config()
END = CONFIG.eos_token_id
PROMPT = [40, 41, 42]


@dataclass
class World:
    engine: Engine
    witness: Witness
    compiler: AutomatonCompiler
    ended: dict[str, CompletionOutput] = field(default_factory=dict)

    def add(self, request_id: str, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> None:
        self.witness.add(request_id, prompt, params)
        self.engine.add_request(request_id, prompt, params)

    def abort(self, request_id: str) -> None:
        if self.engine.abort_request(request_id):
            self.witness.aborted(request_id)

    def step(self) -> None:
        self.compiler.tick()
        for record in self.engine.step():
            assert self.witness.observe(record).problems == []
            if record.finished:
                self.ended[record.request_id] = record.outputs[0]
        self.engine.check_invariants()

    def drain(self) -> None:
        for _ in range(200):
            if not self.engine.has_unfinished_requests():
                break
            self.step()
        stats = self.engine.stats()
        assert (stats.free_blocks, stats.free_state_slots) == (stats.usable_blocks, stats.usable_state_slots)
        assert not self.witness.living


Make = Callable[[], World]


@pytest.fixture(params=[(0, False), (0, True), (4, False), (4, True)], ids=lambda each: f"{each[0]}-{each[1]}")
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    drafts, is_ahead = request.param
    monkeypatch.setattr("deepinfer.sim.shadow.scripted", lambda request_id, length, right, vocab_size: list(right))

    def build() -> World:
        scenario = Scenario.from_seed(0, drafts, async_scheduling=is_ahead, has_forms=True)
        options = replace(
            scenario.options,
            max_model_len=96,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            block_size=4,
            num_blocks=97,
            num_state_slots=None,
            enable_chunked_prefill=True,
            stop_preempted_requests=False,
            prefill_attempt_interval=1,
        )
        compiler = AutomatonCompiler(CONFIG.vocab_size, END)
        engine, foreteller = build_shadow_engine(
            CONFIG, replace(scenario, options=options, end_one_in=0, varies=False), compiler
        )
        return World(engine, Witness(foreteller, CONFIG, options, engine.stats()), compiler)

    return build


def automaton(number: int) -> Automaton:
    return Automaton.from_text(form_text(number), CONFIG.vocab_size, END)


def wanted(number: int, **values: Any) -> SamplingParams:
    form = StructuredOutputs(regex=form_text(number))
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "structured_outputs": form, **values})


def first_form(suits: Callable[[Automaton], bool]) -> int:
    return next(number for number in range(10_000) if suits(automaton(number)))


def choices(form: Automaton, state: int) -> list[int]:
    return np.flatnonzero(form.next_SV[state] != FORBIDDEN).tolist()


ENDLESS = first_form(lambda form: not form.is_complete_S.any() and len(choices(form, 0)) > 3)
"""A form without an end: it is cut by the length."""


def three_requests(world: World) -> None:
    world.add("gone", wanted(ENDLESS))
    world.add("stays", wanted(ENDLESS), [50, 51])
    world.add("free", SamplingParams(temperature=0, max_tokens=9), [60])


def the_neighbours_are_whole(world: World) -> None:
    assert len(world.ended["stays"].token_ids) == 24
    assert len(world.ended["free"].token_ids) == 9


@pytest.mark.parametrize("make", [(0, False), (4, False)], indirect=True)
@pytest.mark.parametrize("hook", ["copy", "run", "_write_all", "_judge"])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_an_abort_from_within_a_step_spares_the_neighbours(
    make: Make, monkeypatch: pytest.MonkeyPatch, hook: str, number: int
) -> None:
    world = make()
    original, calls = getattr(ShadowWorker, hook), []

    def aborting(self: ShadowWorker, *args: Any) -> Any:
        calls.append(hook)
        if len(calls) == number:
            world.abort("gone")
        return original(self, *args)

    three_requests(world)
    monkeypatch.setattr(ShadowWorker, hook, aborting)
    world.drain()
    the_neighbours_are_whole(world)
    assert world.ended["gone"].finish_reason == "abort"


@pytest.mark.parametrize("steps", range(6))
def test_an_abort_between_two_steps_spares_the_neighbours(make: Make, steps: int) -> None:
    """Planned ahead, a step of the request is in flight then."""
    world = make()
    three_requests(world)
    for _ in range(steps):
        world.step()
    world.abort("gone")
    world.drain()
    the_neighbours_are_whole(world)
    assert world.ended["gone"].finish_reason == "abort"


def test_an_abort_while_the_form_is_compiled_or_right_behind_it(make: Make) -> None:
    world = make()
    for number in range(8):  # some of them are compiled at once, some a tick later
        world.add(f"r{number}", wanted(number))
        if number % 2:
            world.compiler.tick()
        world.abort(f"r{number}")
    world.add("stays", wanted(ENDLESS))
    world.drain()
    assert {world.ended[f"r{number}"].finish_reason for number in range(8)} == {"abort"}
    assert all(not world.ended[f"r{number}"].token_ids for number in range(8))
    assert world.ended["stays"].finish_reason == "length"


def test_an_aborted_id_can_be_used_again_with_another_form(make: Make) -> None:
    world = make()
    world.add("r", wanted(ENDLESS))
    for _ in range(3):
        world.step()
    world.abort("r")
    world.drain()
    assert world.ended["r"].finish_reason == "abort"
    world.add("r", wanted(ENDLESS, max_tokens=5), [70])
    world.drain()
    assert len(world.ended["r"].token_ids) == 5


@pytest.mark.parametrize("place", range(1, 7))
def test_a_stop_inside_an_accepted_run_ends_it_there(make: Make, place: int) -> None:
    world = make()
    world.add("all", wanted(ENDLESS))
    world.drain()
    tokens = world.ended["all"].token_ids
    stop = tokens[place]
    world.add("stopped", wanted(ENDLESS, stop_token_ids=(stop,)))
    world.drain()
    answer = world.ended["stopped"]
    assert answer.finish_reason == "stop"
    assert answer.stop_reason == stop
    assert answer.token_ids == tokens[: tokens.index(stop) + 1]


def test_a_ban_of_the_only_allowed_token_ends_that_request_alone(make: Make) -> None:
    number = first_form(lambda form: len(choices(form, 0)) == 1 and not form.is_complete_S[0])
    (only,) = choices(automaton(number), 0)
    world = make()
    world.add("banned", wanted(number, blacklist_token_ids=(only,)))
    world.add("stays", wanted(ENDLESS), [50, 51])
    world.drain()
    answer = world.ended["banned"]
    assert (answer.finish_reason, answer.token_ids) == ("grammar_failed", ())
    assert "no token both continues the form" in str(answer.message)
    assert world.ended["stays"].finish_reason == "length"


def test_a_ban_of_the_only_token_of_a_later_place_ends_the_run_in_front_of_it(make: Make) -> None:
    def leads_on(form: Automaton) -> bool:
        firsts = choices(form, 0)
        behind = {int(form.next_SV[0, token_id]) for token_id in firsts}
        seconds = [choices(form, state) for state in behind]
        return (
            not form.is_complete_S.any()
            and len(behind) == 1
            and 0 not in behind
            and len(seconds[0]) == 1
            and seconds[0][0] not in firsts
        )

    number = first_form(leads_on)
    form = automaton(number)
    second = choices(form, int(form.next_SV[0, choices(form, 0)[0]]))[0]
    world = make()
    world.add("banned", wanted(number, blacklist_token_ids=(second,)))
    world.drain()
    answer = world.ended["banned"]
    assert (answer.finish_reason, len(answer.token_ids)) == ("grammar_failed", 1)


def ends_soon(form: Automaton) -> bool:
    """Every way leads to a state in which only the end may follow, over two tokens."""
    if form.is_complete_S[0]:
        return False
    behind = {int(form.next_SV[0, token_id]) for token_id in choices(form, 0)}
    return all(not form.is_complete_S[state] for state in behind) and all(
        choices(form, int(form.next_SV[state, token_id])) == [END]
        for state in behind
        for token_id in choices(form, state)
    )


@pytest.mark.parametrize(("values", "reason", "length"), [({}, "stop", 3), ({"min_tokens": 9}, "stop", 2)])
def test_a_form_that_completes_inside_a_run_ends_there(
    make: Make, values: dict[str, Any], reason: str, length: int
) -> None:
    """With its end banned, the answer ends in front of it; neighbours go on."""
    world = make()
    world.add("short", wanted(first_form(ends_soon), **values))
    world.add("stays", wanted(ENDLESS), [50, 51])
    world.drain()
    answer = world.ended["short"]
    assert (answer.finish_reason, len(answer.token_ids)) == (reason, length)
    assert (answer.token_ids[-1] == END) is (length == 3)


def test_behind_an_end_that_does_not_count_everything_is_free(make: Make) -> None:
    world = make()
    world.add("on", wanted(first_form(ends_soon), ignore_eos=True))
    world.drain()
    answer = world.ended["on"]
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 24)
    assert answer.token_ids[2] == END
    assert len(set(answer.token_ids[3:])) > 10
