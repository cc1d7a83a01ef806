"""One simulated life: arrivals, aborts, forks, faults and slow steps, every token and every block checked."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deepinfer.engine.build import build_engine_on
from deepinfer.engine.engine import Engine
from deepinfer.engine.outputs import RequestOutput
from deepinfer.errors import InvariantError
from deepinfer.sampling.drafting import Verification
from deepinfer.sampling.params import SamplingParams
from deepinfer.settings import Settings
from deepinfer.sim.clock import SLOW_STEP_S, STEP_S, VirtualClock
from deepinfer.sim.drafter import ScriptedSpeculation
from deepinfer.sim.events import Abort, Arrival, EndedRequest, Event, Fault, Fork
from deepinfer.sim.faults import FailingWorker, FaultPlace, SimulatedFaultError
from deepinfer.sim.forms import AutomatonCompiler
from deepinfer.sim.lengths import VaryingWorker
from deepinfer.sim.model import simulated_config
from deepinfer.sim.scenario import Scenario
from deepinfer.sim.shadow import build_shadow_engine
from deepinfer.sim.truth import make_oracle
from deepinfer.sim.wishes import Foreteller, by_draw, draw_wishes
from deepinfer.sim.witness import Witness

_MOST_LIVING = 24


@dataclass(slots=True)
class LifeReport:
    """What happened in one life; ``problems`` is empty if nothing went wrong.

    Attributes:
        seed: the seed that replays it.
        steps: steps run, the final drain included.
        requests: requests added or forked.
        tokens: tokens emitted, each compared with the oracle's.
        aborts: requests aborted from outside.
        forks: requests forked.
        faults: steps in which the device failed.
        preemptions: requests that lost their memory.
        endings: how many requests ended for which reason.
        virtual_s: virtual seconds that passed.
        script: what happened to the engine, and before which step.
        answers: of every request that ended, its prompt, and tokens and reason of each answer.
        problems: what went wrong, in words, with the step.
    """

    seed: int
    steps: int = 0
    requests: int = 0
    tokens: int = 0
    aborts: int = 0
    forks: int = 0
    faults: int = 0
    preemptions: int = 0
    endings: dict[str, int] = field(default_factory=dict)
    virtual_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    script: list[Event] = field(default_factory=list, repr=False)
    answers: dict[str, EndedRequest] = field(default_factory=dict, repr=False)


def live(
    seed: int,
    steps: int,
    model: Path | None = None,
    *,
    drafts: int | None = None,
    async_scheduling: bool | None = None,
    verification: Verification | None = None,
    has_forms: bool | None = None,
    is_short: bool = False,
    script: Sequence[Event] | None = None,
) -> LifeReport:
    """Live one life and report it; the same arguments give the same life.

    Args:
        seed: what to replay.
        steps: engine steps with traffic; a drain follows.
        model: directory made by :func:`deepinfer.sim.model.make_simulated_model`: the engine computes that model on the
            oracle driver. None: its worker is a :class:`~deepinfer.sim.shadow.ShadowWorker`, much quicker.
        drafts: drafts a step, instead of the seed's own number.
        async_scheduling: whether steps are planned ahead, instead of the seed's own choice.
        verification: how drafts are judged, instead of the seed's own choice.
        has_forms: whether requests have forms and bans, instead of the seed's own choice.
        is_short: prompts and answers are short, so that a life costs little.
        script: the traffic of another life, instead of the seed's own.
    """
    scenario = Scenario.from_seed(
        seed, drafts, async_scheduling=async_scheduling, verification=verification, has_forms=has_forms
    )
    scenario = scenario.shortened() if is_short else scenario
    config = simulated_config()
    compiler = AutomatonCompiler(config.vocab_size, config.eos_token_id)
    if model is None:
        engine, foreteller = build_shadow_engine(config, scenario, compiler)
    else:
        engine, foreteller = build_oracle_engine(model, scenario, compiler)
    has_coins = scenario.options.num_speculative_tokens > 0 and scenario.options.verification == "standard"
    witness = Witness(foreteller, config, scenario.options, engine.stats(), knows_draws=model is None or not has_coins)
    life = _Life(scenario, engine, compiler, witness, script)
    for _ in range(steps):
        life.traffic()
        life.step()
        if life.report.problems:
            break
    life.drain()
    return life.report


def build_oracle_engine(model: Path, scenario: Scenario, compiler: AutomatonCompiler) -> tuple[Engine, Foreteller]:
    """Return an engine on the oracle driver, and who foretells its tokens."""
    driver, foretelling = make_oracle(scenario.end_one_in)
    config = simulated_config()
    foreteller = Foreteller(foretelling, config, by_draw)
    engine = build_engine_on(
        driver,
        model,
        scenario.options,
        Settings(),
        worker_type=VaryingWorker if scenario.verifies_by_lot else FailingWorker,
        speculation_of=lambda config, ops, policy, **sizes: ScriptedSpeculation(
            foreteller.tokens, config.vocab_size, ops, policy, **sizes
        ),
        make_compiler=lambda: compiler,
    )
    return engine, foreteller


class _Life:
    def __init__(
        self,
        scenario: Scenario,
        engine: Engine,
        compiler: AutomatonCompiler,
        witness: Witness,
        script: Sequence[Event] | None,
    ) -> None:
        self.report = LifeReport(scenario.seed)
        self._scenario = scenario
        self._engine = engine
        self._compiler = compiler
        self._draw = random.Random(f"life {scenario.seed}")
        self._draw_wishes = random.Random(f"wishes {scenario.seed}")
        self._clock = VirtualClock()
        self._witness = witness
        self._script = None if script is None else deque(script)
        self._next_arrival_s = 0.0
        self._idle_steps = 0
        # True after a step that failed: it may have ended requests whose records come with the next.
        self._records_are_due = False

    def traffic(self) -> None:
        """Let whatever is due happen before the next step."""
        self._compiler.tick()
        if self._script is not None:
            while self._script and self._script[0].step <= self.report.steps:
                self._happen(self._script.popleft())
            return
        while self._next_arrival_s <= self._clock.now_s:
            self._next_arrival_s += self._draw.expovariate(self._scenario.arrivals_per_second)
            if len(self._witness.living) < _MOST_LIVING:
                self._arrive()
        if self._draw.random() < self._scenario.abort_chance:
            # Now and then an id that has ended, or that nobody ever knew.
            candidates = [*self._witness.living, f"r{self._draw.randint(0, 10 + self.report.requests)}"]
            self._happen(Abort(self.report.steps, self._draw.choice(candidates)))
        if self._draw.random() < self._scenario.fork_chance:
            self._fork()
        if self._draw.random() < self._scenario.fault_chance:
            self._happen(Fault(self.report.steps, self._draw.choice(list(FaultPlace))))

    def step(self) -> None:
        """Run one step, check what it gave, and let time pass."""
        self._records_are_due = False
        outputs: list[RequestOutput] = []
        try:
            outputs = self._engine.step()
        except SimulatedFaultError:
            self._records_are_due = True
            self.report.faults += 1
            self._witness.step_failed({row.request_id for row in self._engine.last_step.rows})
        except InvariantError as error:
            self._problem(f"invariant: {error}")
            return
        for output in outputs:
            self._observe(output)
        self.report.steps += 1
        self._check(advanced=self._records_are_due or bool(self._engine.last_step.rows) or bool(outputs))
        is_slow = self._draw.random() < self._scenario.slow_chance
        self._clock.advance(SLOW_STEP_S if is_slow else STEP_S)
        self.report.virtual_s = self._clock.now_s

    def drain(self) -> None:
        """Run until nothing is left, within a bound, and audit what remains."""
        self._worker.armed = None
        bound = 200 + 4 * sum(request.work_tokens for request in self._witness.living.values()) * (
            len(self._witness.living) + 2
        )
        while self._engine.has_unfinished_requests() and bound and not self.report.problems:
            self._compiler.tick()
            self.step()
            bound -= 1
        if self.report.problems:
            return
        stats = self._engine.stats()
        self.report.preemptions = stats.preemptions
        if self._engine.has_unfinished_requests():
            self._problem(f"the drain did not end: {stats.num_unfinished} requests are unfinished")
        if (stats.free_blocks, stats.free_state_slots) != (stats.usable_blocks, stats.usable_state_slots):
            self._problem(
                f"memory leaked: {stats.free_blocks} of {stats.usable_blocks} blocks and "
                f"{stats.free_state_slots} of {stats.usable_state_slots} state slots are free after the drain"
            )
        for request_id in self._witness.living:
            self._problem(f"request {request_id} never got a terminal record")

    @property
    def _worker(self) -> FailingWorker:
        worker = self._engine.worker
        if not isinstance(worker, FailingWorker):
            raise InvariantError(f"the simulation runs on a FailingWorker, not on a {type(worker).__name__}")
        return worker

    def _arrive(self) -> None:
        draw, scenario = self._draw, self._scenario
        length = draw.randint(1, scenario.longest_prompt_tokens)
        prompt = [draw.randrange(self._engine.config.vocab_size) for _ in range(length)]
        params = SamplingParams(
            n=draw.choice((1, 1, 1, 1, 2)),
            temperature=draw.choice((0.0, 1.0)),
            max_tokens=draw.randint(1, scenario.longest_answer_tokens),
            ignore_eos=draw.random() < 0.3,
        )
        if scenario.has_forms:
            params = draw_wishes(self._draw_wishes, params)
        self._happen(Arrival(self.report.steps, f"r{self.report.requests}", prompt, params))

    def _fork(self) -> None:
        parents = [name for name, request in self._witness.living.items() if request.can_be_forked]
        if not parents or len(self._witness.living) >= _MOST_LIVING:
            return
        parent_id = self._draw.choice(parents)
        params = SamplingParams(temperature=0.0, max_tokens=self._draw.randint(1, self._scenario.longest_answer_tokens))
        self._happen(Fork(self.report.steps, f"r{self.report.requests}", parent_id, params))

    def _happen(self, event: Event) -> None:
        """Do to the engine what happens, and note it; a fork whose parent cannot have children does not happen."""
        match event:
            case Arrival(_, request_id, prompt, params):
                self._witness.add(request_id, prompt, params)
                self._engine.add_request(request_id, prompt, params)
                self.report.requests += 1
            case Abort(_, request_id):
                if self._engine.abort_request(request_id):
                    self.report.aborts += 1
                    self._witness.aborted(request_id)
            case Fork(_, child_id, parent_id, params):
                if self._records_are_due or not self._witness.may_fork(parent_id):
                    return
                self._witness.fork(parent_id, child_id, params)
                self._engine.fork_request(parent_id, child_id, params)
                self.report.requests += 1
                self.report.forks += 1
            case Fault(_, place):
                self._worker.armed = place
        self.report.script.append(event)

    def _observe(self, output: RequestOutput) -> None:
        tokens, problems = self._witness.observe(output)
        self.report.tokens += tokens
        for problem in problems:
            self._problem(problem)
        if output.finished:
            ends = tuple((answer.token_ids, str(answer.finish_reason)) for answer in output.outputs)
            self.report.answers[output.request_id] = EndedRequest(output.prompt_token_ids, ends)
            for answer in output.outputs:
                reason = str(answer.finish_reason)
                self.report.endings[reason] = self.report.endings.get(reason, 0) + 1

    def _check(self, *, advanced: bool) -> None:
        try:
            self._engine.check_invariants()
        except InvariantError as error:
            self._problem(f"invariant: {error}")
        # The scheduler promises that no call finds unfinished requests and neither runs a row nor ends one.
        self._idle_steps = 0 if advanced or not self._engine.has_unfinished_requests() else self._idle_steps + 1
        if self._idle_steps > 1:
            self._problem("the engine is wedged: requests are unfinished, and two steps in a row did nothing")

    def _problem(self, text: str) -> None:
        self.report.problems.append(f"step {self.report.steps}: {text}")
