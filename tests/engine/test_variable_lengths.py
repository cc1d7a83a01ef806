"""Variable verification through the whole engine: other cuts of the steps, the same tokens where that is promised.

Reported faults: 33 and 35.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from deepinfer import SamplingParams
from deepinfer.accelerator import Event, Stream
from deepinfer.engine.build import build_engine_on
from deepinfer.engine.engine import Engine
from deepinfer.engine.handing_out import HandedOut
from deepinfer.engine.options import EngineOptions
from deepinfer.engine.speculation import ModelSpeculation, Newest, Round
from deepinfer.engine.step_costs import StepCosts
from deepinfer.engine.worker import Worker
from deepinfer.errors import ArgumentError
from deepinfer.sampling.verify_budget import CostCurve
from deepinfer.scheduling.step import ScheduledStep
from deepinfer.settings import Settings
from deepinfer_cpu_ref import Driver as ReferenceDriver

SIZES = {"max_num_seqs": 4, "num_blocks": 40, "block_size": 8, "max_num_batched_tokens": 24}
PROMPTS = ([9, 8, 7, 6], [5, 6, 7] * 5, [400, 2, 9], list(range(30, 47)))
PARAMS = (
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 20, "logprobs": 2},
    {"temperature": 0},
    {"temperature": 1.3, "presence_penalty": 0.5},
)


class StepClock:
    """A clock that is a second further at every reading: by it every step costs the same."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class SetCosts(StepCosts):
    """Costs that the test sets and no step corrects."""

    def note(self, rows: int, step_s: float, sampler_s: float) -> None:
        """Learn nothing."""


def set_costs(engine: Engine, base: float, per_row: float) -> None:
    sizes = engine.worker.lengths.costs.measured.sizes
    curve = CostCurve(sizes, tuple(base + per_row * size for size in sizes), is_padded=False)
    engine.worker.lengths.costs = SetCosts(curve)


def varying(**options: Any) -> Engine:
    """An engine whose lengths vary, one step at a time unless asked for otherwise."""
    options = {**SIZES, "async_scheduling": False, **options}
    given = EngineOptions(num_speculative_tokens=3, variable_verification=True, **options)
    return build_engine_on(ReferenceDriver(), None, given, Settings(), clock=StepClock())


def run(engine: Engine, count: int = 4, max_tokens: int = 6) -> tuple[list[tuple[int, ...]], list[list[int]]]:
    """The tokens of each request, and the rows of each decode step."""
    for number in range(count):
        params = SamplingParams(seed=number, max_tokens=max_tokens, ignore_eos=True, **PARAMS[number])
        engine.add_request(str(number), PROMPTS[number], params)
    ended, widths = {}, []
    while engine.has_unfinished_requests():
        for record in engine.step():
            if record.finished:
                ended[record.request_id] = record.outputs[0].token_ids
        engine.check_invariants()
        if engine.last_step.kind == "decode":
            widths.append([row.q for row in engine.last_step.rows])
    return [ended[str(number)] for number in range(count)], widths


@pytest.fixture
def _hopeful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chances that differ from request to request and from round to round, and reach from none to all."""

    def round_with_chances(speculation: Any, step: ScheduledStep, newest: Newest, pools: Any) -> Round:
        made = original(speculation, step, newest, pools)
        base_R = ((newest.block.context_R * 7 + newest.block.state_slots_R * 5) % 11).to(torch.float32) / 10
        powers_n = torch.arange(1, speculation.drafts + 1)
        return made._replace(chances_Rn=base_R.unsqueeze(1) ** powers_n)

    original = ModelSpeculation._round
    monkeypatch.setattr(ModelSpeculation, "_round", round_with_chances)


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    options = EngineOptions(batch_invariant=True, **SIZES)
    return run(build_engine_on(ReferenceDriver(), None, options, Settings()))[0]


class Handed(NamedTuple):
    """A step whose rows the device has handed out: drafts as planned, and as they were verified."""

    planned: list[int]
    verified: list[int]


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[Handed]:
    seen: list[Handed] = []

    def hand_out(step: ScheduledStep, drafts_R: Any) -> None:
        planned = (step.q_R - 1).tolist()
        original(step, drafts_R)
        seen.append(Handed(planned, (step.q_R - 1).tolist()))

    original = ScheduledStep.hand_out
    monkeypatch.setattr(ScheduledStep, "hand_out", hand_out)
    return seen


@pytest.mark.usefixtures("_hopeful")
@pytest.mark.parametrize("graphs", [False, True])
def test_coupled_tokens_are_the_same_where_the_device_hands_out_the_rows(
    plain: list[tuple[int, ...]],
    handed: list[Handed],
    graphs: bool,  # noqa: FBT001
) -> None:
    """Level R4, planned ahead: the host fixes the total by older chances, the device the shares by the newest."""
    options = {"verification": "coupled", "batch_invariant": True, "decode_graphs": graphs}
    engine = varying(async_scheduling=True, **options)
    set_costs(engine, base=1.0, per_row=0.2)
    assert run(engine)[0] == plain
    assert all(sum(each.planned) == sum(each.verified) for each in handed)
    assert any(each.planned != each.verified for each in handed)
    assert {drafts for each in handed for drafts in each.verified} >= {0, 1, 3}
    stats = engine.stats()
    assert sum(stats.verified_by_place) == stats.drafted_tokens > stats.accepted_tokens
    assert (stats.replayed_steps > 0) is graphs
    assert stats.free_blocks == stats.usable_blocks
    engine.close()


@pytest.mark.usefixtures("_hopeful")
def test_greedy_tokens_are_the_same_with_standard_verification_planned_ahead(handed: list[Handed]) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=1, presence_penalty=0.5)
    given = EngineOptions(**SIZES)
    engines = [build_engine_on(ReferenceDriver(), None, given, Settings()), varying(async_scheduling=True)]
    set_costs(engines[1], base=1.0, per_row=0.1)
    answers = []
    for engine in engines:
        records = []
        for number, prompt in enumerate(PROMPTS):
            engine.add_request(str(number), prompt, greedy)
        while engine.has_unfinished_requests():
            records += engine.step()
        answers.append({each.request_id: each.outputs[0].token_ids for each in records if each.finished})
        engine.close()
    assert answers[0] == answers[1]
    assert any(each.planned != each.verified for each in handed)


@pytest.mark.usefixtures("_hopeful")
def test_the_device_gives_rows_to_the_drafts_with_the_best_chances(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other share of the same rows is worth more by the newest chances."""

    def hand_out(worker: Worker, step: ScheduledStep, to_host: Any) -> HandedOut:
        handed = original(worker, step, to_host)
        chances_Rn = worker.speculation.newest_chances(step)
        room_R = worker._continuation.room(step)
        place_n = torch.arange(3)
        worth_Rn = torch.where(place_n < room_R[:, None], chances_Rn, 0.0)
        taken = torch.where(place_n < handed.drafts_R[:, None], worth_Rn, 0.0).sum()
        best = worth_Rn.flatten().sort(descending=True).values[: int(handed.drafts_R.sum())].sum()
        assert torch.isclose(taken, best)
        seen.append(step.num_requests)
        return handed

    seen: list[int] = []
    original = Worker.hand_out
    monkeypatch.setattr(Worker, "hand_out", hand_out)
    engine = varying(async_scheduling=True, verification="coupled")
    set_costs(engine, base=1.0, per_row=0.2)
    run(engine, max_tokens=12)
    assert max(seen) == 4
    engine.close()


@pytest.mark.usefixtures("_hopeful")
def test_a_fault_while_rows_are_handed_out_ends_the_step_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def hand_out(worker: Worker, step: ScheduledStep, to_host: Any) -> HandedOut:
        if broken:
            raise RuntimeError(broken.pop())
        return original(worker, step, to_host)

    broken: list[str] = []
    original = Worker.hand_out
    monkeypatch.setattr(Worker, "hand_out", hand_out)
    engine = varying(async_scheduling=True, verification="coupled")
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    engine.add_request("a", PROMPTS[0], params)
    for _ in range(3):
        engine.step()
    broken.append("no rows to be had")
    with pytest.raises(RuntimeError, match="no rows to be had"):
        engine.step()
    records = []
    engine.add_request("b", PROMPTS[1], params)
    while engine.has_unfinished_requests():
        records += engine.step()
        engine.check_invariants()
    ended = {each.request_id: each.outputs[0] for each in records if each.finished}
    assert (ended["a"].finish_reason, "no rows to be had" in ended["a"].message) == ("abort", True)
    assert len(ended["b"].token_ids) == 20
    assert engine.stats().free_blocks == engine.stats().usable_blocks
    engine.close()


@pytest.mark.usefixtures("_hopeful")
def test_costs_are_learnt_from_steps_that_are_planned_ahead() -> None:
    engine = varying(async_scheduling=True)
    noted: list[tuple[int, float, float]] = []
    engine.worker.lengths.costs.note = lambda *seen: noted.append(seen)
    run(engine, count=2)
    assert noted
    assert all(1 <= rows <= 8 and step_s > 0 and sampler_s > 0 for rows, step_s, sampler_s in noted)
    engine.close()


@pytest.mark.usefixtures("_hopeful")
@pytest.mark.parametrize("graphs", [False, True])
def test_coupled_tokens_are_those_of_fixed_lengths_and_of_no_drafts(
    plain: list[tuple[int, ...]],
    graphs: bool,  # noqa: FBT001
) -> None:
    """Level R4, whatever is verified."""
    options = {"verification": "coupled", "batch_invariant": True, "decode_graphs": graphs}
    fixed = EngineOptions(num_speculative_tokens=3, **SIZES, **options)
    assert run(build_engine_on(ReferenceDriver(), None, fixed, Settings()))[0] == plain
    engine = varying(**options)
    set_costs(engine, base=1.0, per_row=0.2)
    tokens, widths = run(engine)
    assert tokens == plain
    assert len({tuple(each) for each in widths}) > 2
    assert any(len(set(each)) > 1 for each in widths)
    assert (engine.stats().replayed_steps > 0) is graphs


@pytest.mark.usefixtures("_hopeful")
def test_where_rows_cost_nothing_every_draft_with_a_chance_is_verified() -> None:
    engine = varying()
    widths = run(engine, count=2, max_tokens=30)[1]  # enough steps for costs to be learned from
    assert {q for each in widths for q in each} == {1, 4}  # a chance of 0 is none
    assert engine.worker.lengths.costs.measured.seconds == (1.0,) * 10
    assert engine.worker.lengths.costs.sampler_s == 1.0


@pytest.mark.usefixtures("_hopeful")
def test_dear_rows_are_spent_on_the_likeliest_drafts_only() -> None:
    engine = varying()
    set_costs(engine, base=0.5, per_row=1.0)
    widths = run(engine, count=3)[1]
    assert 1.0 < sum(map(sum, widths)) / sum(map(len, widths)) < 2.0
    stats = engine.stats()
    assert stats.verified_by_place[0] >= stats.verified_by_place[1] >= stats.verified_by_place[2]
    assert sum(stats.verified_by_place) == stats.drafted_tokens > 0
    assert sum(stats.accepted_by_place) == stats.accepted_tokens
    assert stats.confidence_error > 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_rows_of_requests_that_have_ended_count_nowhere(*, async_scheduling: bool) -> None:
    """A step that was planned ahead still has rows of a request that ends in the step before, or is aborted."""
    engine = varying(verification="coupled", async_scheduling=async_scheduling)
    for number, max_tokens in enumerate((3, 20, 9, 20)):
        engine.add_request(
            str(number), PROMPTS[number], SamplingParams(seed=number, max_tokens=max_tokens, min_tokens=3)
        )
    for _ in range(8):
        engine.step()
    engine.abort_request("1")
    while engine.has_unfinished_requests():
        engine.step()
    stats = engine.stats()
    assert sum(stats.verified_by_place) == stats.drafted_tokens > 0
    assert sum(stats.accepted_by_place) == stats.accepted_tokens > 0


@pytest.mark.usefixtures("_hopeful")
def test_each_request_is_as_alone_with_the_lengths_that_it_had() -> None:
    """Fault 35: settings of one request are never another one's, whatever the widths of the step."""
    engine = varying(verification="coupled", batch_invariant=True)
    set_costs(engine, base=1.0, per_row=0.2)
    together = run(engine)[0]
    engine.add_request("alone", PROMPTS[3], SamplingParams(seed=3, max_tokens=6, ignore_eos=True, **PARAMS[3]))
    records = []
    while engine.has_unfinished_requests():
        records += engine.step()
    assert records[-1].outputs[0].token_ids == together[3]


def test_costs_are_measured_once_and_found_by_the_next_start(tmp_path: Path) -> None:
    first = varying(cost_curves=str(tmp_path)).worker.lengths.costs.measured
    (file,) = tmp_path.iterdir()
    kept = json.loads(file.read_text())
    assert kept["facts"]["drafts"] == 3
    doubled = [2.0 * cost for cost in kept["seconds"]]
    file.write_text(json.dumps({**kept, "seconds": doubled}))
    again = varying(cost_curves=str(tmp_path)).worker.lengths.costs.measured
    assert (first.sizes, first.seconds) == ((*range(1, 9), 12, 16), (1.0,) * 10)
    assert again.seconds == (2.0,) * 10
    other = varying(cost_curves=str(tmp_path), kv_cache_dtype="float32").worker.lengths.costs.measured
    assert other.seconds == (1.0,) * 10
    assert len(list(tmp_path.iterdir())) == 2


def test_standard_verification_must_not_vary_where_batch_invariance_is_demanded() -> None:
    with pytest.raises(ArgumentError, match="Use verification='coupled'"):
        varying(batch_invariant=True)
    assert varying(batch_invariant=True, verification="coupled").worker.lengths is not None


def test_an_engine_of_fixed_lengths_measures_nothing() -> None:
    options = EngineOptions(num_speculative_tokens=3, **SIZES)
    assert build_engine_on(ReferenceDriver(), None, options, Settings()).worker.lengths is None


class HeldEvent(Event):
    """The end of work that begins when somebody waits for it."""

    def __init__(self, stream: HeldStream, number: int) -> None:
        self._stream = stream
        self._number = number

    def done(self) -> bool:
        return self._number < self._stream.ended

    def wait(self) -> None:
        self._stream.run_to(self._number)


class HeldStream(Stream):
    """A device that is as late as can be: it does nothing before somebody waits, and then no more than it must."""

    def __init__(self) -> None:
        self.ended = 0
        self._work: list[Callable[[], None]] = []

    def enqueue(self, work: Callable[[], None]) -> Event:
        self._work.append(work)
        return HeldEvent(self, len(self._work) - 1)

    def run_to(self, number: int) -> None:
        while self.ended <= number:
            self.ended += 1
            self._work[self.ended - 1]()

    def record_event(self) -> Event:
        return self.enqueue(lambda: None)

    def wait_event(self, event: Event) -> None:
        self.enqueue(event.wait)


class LateDriver(ReferenceDriver):
    def new_stream(self) -> Stream:
        return HeldStream()


@pytest.mark.usefixtures("_hopeful")
def test_layers_that_run_after_the_host_has_learnt_of_the_handing_out_run_the_same_rows(handed: list[Handed]) -> None:
    """With forks that join beside rows that fly: their newest tokens are among those that only the plan knows."""
    answers = []
    for driver, drafts in ((ReferenceDriver(), 0), (LateDriver(), 3)):
        varies = {"variable_verification": True, "verification": "coupled"} if drafts else {}
        sizes = {**SIZES, "max_num_seqs": 8, "num_blocks": 80}
        given = EngineOptions(num_speculative_tokens=drafts, async_scheduling=bool(drafts), **varies, **sizes)
        engine = build_engine_on(driver, None, given, Settings(), clock=StepClock())
        if drafts:
            set_costs(engine, base=1.0, per_row=0.1)
        for number in range(3):
            params = SamplingParams(seed=number, temperature=0.8, max_tokens=16, ignore_eos=True)
            engine.add_request(str(number), PROMPTS[number], params)
        last: dict[str, tuple[int, ...]] = {}
        begun: dict[str, int] = {}
        while engine.has_unfinished_requests():
            last.update({each.request_id: each.outputs[0].token_ids for each in engine.step()})
            made = len(last.get("0", ()))
            if 2 <= made < 14 and len(begun) < 4:
                name = f"child {len(begun)}"
                begun[name] = made
                params = SamplingParams(seed=0, temperature=0.8, max_tokens=16 - made, ignore_eos=True)
                engine.fork_request("0", name, params)
        assert {name: last[name] for name in begun} == {name: last["0"][made:] for name, made in begun.items()}
        answers.append([last[str(number)] for number in range(3)])
    assert answers[0] == answers[1]
    assert any(each.planned != each.verified for each in handed)
