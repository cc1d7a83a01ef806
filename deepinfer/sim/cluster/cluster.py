"""The group: requests arrive, ranks agree on steps, the cost model says how long each takes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from deepinfer.errors import ArgumentError
from deepinfer.scheduling.config import SchedulerConfig
from deepinfer.scheduling.scheduler import Scheduler
from deepinfer.scheduling.sequence import Sequence as Request
from deepinfer.scheduling.sequence import StopRules
from deepinfer.scheduling.step import ScheduledStep
from deepinfer.sim.cluster.arrivals import Arrival
from deepinfer.sim.cluster.costs import CostModel
from deepinfer.sim.cluster.experts import ExpertSettings, SimulatedExperts
from deepinfer.sim.cluster.votes import Ballot

_TOKEN = 7
_MOST_STEPS = 1_000_000


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The group that is simulated.

    Attributes:
        ranks: ranks, each with requests of its own.
        scheduler: sizes, budgets and vote intervals of every rank.
        costs: what steps cost.
        acceptance: chance that a draft is accepted, if those before it were; the scheduler's drafts are verified.
        experts: what is balanced; None for perfect balance.
        seed: changes draws of drafts and experts.
    """

    ranks: int
    scheduler: SchedulerConfig
    costs: CostModel = field(default_factory=CostModel)
    acceptance: float = 0.7
    experts: ExpertSettings | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be, all at once."""
        problems = [f"ranks is {self.ranks}; 1 is the least"] if self.ranks < 1 else []
        if not 0 <= self.acceptance <= 1:
            problems.append(f"acceptance {self.acceptance} is no chance from 0 to 1")
        if problems:
            raise ArgumentError("simulated cluster", problems)


@dataclass(slots=True)
class ClusterRun:
    """What happened; times in milliseconds.

    Attributes:
        now_ms: when the last request ended.
        prompt_steps, decode_steps: steps of the group.
        placeholder_steps: steps of single ranks that had no row while the group ran.
        output_tokens: tokens that were emitted.
        finished, failed: requests that made all their tokens, and those that ended otherwise.
        first_token_ms: from arrival to first token, one for each request that made one.
        gap_ms: between a request's emissions; tokens that one step emits together have gap 0.
        busiest_over_mean: of the experts, one for each step with rows; empty without experts.
        move_ms: time that the group waited for experts to move.
        plans, moved_slots: plans of the balancer, and slots that they changed.
    """

    now_ms: float = 0.0
    prompt_steps: int = 0
    decode_steps: int = 0
    placeholder_steps: int = 0
    output_tokens: int = 0
    finished: int = 0
    failed: int = 0
    first_token_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    busiest_over_mean: list[float] = field(default_factory=list)
    move_ms: float = 0.0
    plans: int = 0
    moved_slots: int = 0


class Cluster:
    """Real schedulers in lockstep, one thread each for the votes; everything else is one loop over steps."""

    def __init__(self, settings: ClusterSettings, arrivals: Sequence[Arrival]) -> None:
        """Prepare the ranks and the requests; nothing runs yet."""
        self._settings = settings
        self._arrivals = sorted(arrivals)
        self._ballot = Ballot(settings.ranks)
        self._schedulers = [Scheduler(settings.scheduler, self._ballot.of_rank(rank)) for rank in range(settings.ranks)]
        self._load_R = [0] * settings.ranks
        self._draw = random.Random(f"cluster {settings.seed}")
        self._last_ms: dict[str, float] = {}
        self._arrived_ms: dict[str, float] = {}
        experts = settings.experts
        self._experts = None if experts is None else SimulatedExperts(experts, settings.ranks, settings.seed)
        self.run_so_far = ClusterRun()

    def run(self, tick: Callable[[], object] = lambda: None) -> ClusterRun:
        """Run until every request has ended; ``tick`` is called once for each."""
        next_arrival = 0
        with ThreadPoolExecutor(max_workers=self._settings.ranks) as pool:
            for _ in range(_MOST_STEPS):
                if not any(scheduler.has_unfinished() for scheduler in self._schedulers):
                    if next_arrival == len(self._arrivals):
                        return self.run_so_far
                    self.run_so_far.now_ms = max(self.run_so_far.now_ms, self._arrivals[next_arrival].at_ms)
                while (
                    next_arrival < len(self._arrivals) and self._arrivals[next_arrival].at_ms <= self.run_so_far.now_ms
                ):
                    self._admit(next_arrival)
                    next_arrival += 1
                self._step(list(pool.map(self._schedule, self._schedulers)))
                self._collect(tick)
        raise ArgumentError(
            "simulated cluster", [f"not done after {_MOST_STEPS} steps; send fewer or shorter requests"]
        )

    def _schedule(self, scheduler: Scheduler) -> ScheduledStep:
        try:
            return scheduler.schedule()
        except BaseException:
            self._ballot.give_up()
            raise

    def _admit(self, number: int) -> None:
        """Send a request to the rank with the fewest unfinished ones, the lowest among equals."""
        arrival = self._arrivals[number]
        rank = min(range(self._settings.ranks), key=lambda each: (self._load_R[each], each))
        self._load_R[rank] += 1
        request_id = f"{rank}:{number}"
        self._arrived_ms[request_id] = arrival.at_ms
        rules = StopRules(arrival.output_tokens, ignore_eos=True)
        self._schedulers[rank].add(Request(request_id, [_TOKEN] * arrival.prompt_tokens, rules))

    def _step(self, steps: list[ScheduledStep]) -> None:
        run, costs = self.run_so_far, self._settings.costs
        rows = [step.num_tokens for step in steps]
        if not any(rows):
            return
        run.placeholder_steps += rows.count(0)
        ratio = 1.0
        if self._experts is not None:
            ratio = self._experts.route(sum(rows))
            run.busiest_over_mean.append(ratio)
        if any(step.group_kind == "prefill" for step in steps):
            run.prompt_steps += 1
            run.now_ms += costs.prefill_step_ms(max(rows), ratio)
        else:
            run.decode_steps += 1
            run.now_ms += costs.decode_step_ms(max(rows), ratio)
        for scheduler, step in zip(self._schedulers, steps, strict=True):
            if step.num_requests:
                self._commit(scheduler, step)
        if self._experts is not None:
            waited = costs.move_ms(self._experts.end_step())
            run.now_ms += waited
            run.move_ms += waited
            run.plans, run.moved_slots = self._experts.plans, self._experts.moved_slots

    def _commit(self, scheduler: Scheduler, step: ScheduledStep) -> None:
        if self._settings.scheduler.num_speculative_tokens:
            runs = [[_TOKEN] * self._run_length(int(rows) - 1, step.kind) for rows in step.q_R]
            records = scheduler.commit_runs(step, runs).records()
        else:
            records = scheduler.commit(step, [_TOKEN] * step.num_requests).records()
        run = self.run_so_far
        for request_id, token_id, _ in records.tuples():
            if token_id is None:
                continue
            run.output_tokens += 1
            if request_id in self._last_ms:
                run.gap_ms.append(run.now_ms - self._last_ms[request_id])
            else:
                run.first_token_ms.append(run.now_ms - self._arrived_ms[request_id])
            self._last_ms[request_id] = run.now_ms

    def _run_length(self, drafts: int, kind: str) -> int:
        """Return how many tokens a row emits: accepted drafts, and one more."""
        length = 1
        while kind == "decode" and length <= drafts and self._draw.random() < self._settings.acceptance:
            length += 1
        return length

    def _collect(self, tick: Callable[[], object]) -> None:
        for rank, scheduler in enumerate(self._schedulers):
            for record in scheduler.take_terminals():
                self._load_R[rank] -= 1
                is_done = record.finish_reason == "length"
                self.run_so_far.finished += is_done
                self.run_so_far.failed += not is_done
                tick()
