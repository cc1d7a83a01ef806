"""The engine's core without a model: what scheduling and committing a decode step costs on the host.

One case is a number of running requests, each of which commits one token a step. Blocks hold 16 positions and the
requests are spread evenly over the places of a block, so that a sixteenth takes a block in every step; lives are spread
so that one in a hundred ends, and is replaced by a request that arrives with its prompt computed. Every step writes
block tables, positions and lengths into int32 arrays, tests stops and lengths, and builds one record per row.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from deepinfer.bench.core_reference import ReferenceLoop
from deepinfer.bench.environment import describe_environment
from deepinfer.bench.report import BenchReport, Clock, Tick, counts_below, no_tick
from deepinfer.errors import ArgumentError, InvariantError
from deepinfer.scheduling.config import SchedulerConfig
from deepinfer.scheduling.scheduler import Scheduler
from deepinfer.scheduling.sequence import Sequence, StopRules

END_TOKEN_ID = 1
_LEAST_TOKEN_ID = 2
_LARGEST_TOKEN_ID = 129_279


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """What to run.

    Attributes:
        running: numbers of running requests, a case each.
        steps: timed steps per case.
        warm_up_steps: steps before them.
        block_size: positions in a block.
        prompt_tokens: shortest prompt; others are up to a block longer.
        life_tokens: tokens that a request makes, so that one in so many ends in each step.
    """

    running: tuple[int, ...] = (64, 256, 1024)
    steps: int = 200
    warm_up_steps: int = 20
    block_size: int = 16
    prompt_tokens: int = 256
    life_tokens: int = 100

    def __post_init__(self) -> None:
        """Refuse what cannot be run, all at once."""
        problems = counts_below(
            1,
            running=self.running,
            steps=self.steps,
            prompt_tokens=self.prompt_tokens,
            life_tokens=self.life_tokens,
        )
        problems += counts_below(0, warm_up_steps=self.warm_up_steps) + counts_below(2, block_size=self.block_size)
        if self.block_size % 2:
            problems.append(f"block_size={self.block_size} is odd; a block holds whole pairs")
        if problems:
            raise ArgumentError("bench core", problems)

    @property
    def all_steps(self) -> int:
        """Steps of one case."""
        return self.warm_up_steps + self.steps


@dataclass(frozen=True, slots=True)
class CoreResult:
    """One case: medians over its steps, in microseconds.

    Attributes:
        running: requests of a step.
        median_us: the whole step.
        parts: its parts: schedule, commit, records, replace.
        reference_loop_us: a fixed loop over numpy arrays in the same process (`deepinfer.bench.core_reference`).
    """

    running: int
    median_us: float
    parts: Mapping[str, float]
    reference_loop_us: float


def run_core(
    settings: CoreSettings, *, clock: Clock = time.perf_counter, tick: Tick = no_tick
) -> BenchReport[CoreResult]:
    """Run every case; ``tick`` is called once for each."""
    results = []
    for running in settings.running:
        results.append(_run_case(running, settings, clock))
        tick()
    return BenchReport("core", settings, describe_environment(), tuple(results))


def _run_case(running: int, settings: CoreSettings, clock: Clock) -> CoreResult:
    generator = np.random.default_rng(running)
    shape = (settings.all_steps, running)
    tokens_SR = generator.integers(_LEAST_TOKEN_ID, _LARGEST_TOKEN_ID, shape, dtype=np.int64, endpoint=True)
    core = SteadyCore(running, settings, clock)
    steps = [core.step(tokens_R) for tokens_R in tokens_SR][settings.warm_up_steps :]
    parts = {name: 1e6 * median(step[name] for step in steps) for name in steps[0]}
    loop = ReferenceLoop(
        running,
        block_size=settings.block_size,
        prompt_tokens=settings.prompt_tokens,
        life_tokens=settings.life_tokens,
        end_token_id=END_TOKEN_ID,
    )
    loop_s = [_timed(loop, tokens_R, clock) for tokens_R in tokens_SR][settings.warm_up_steps :]
    return CoreResult(
        running=running,
        median_us=round(1e6 * median(sum(step.values()) for step in steps), 2),
        parts={name: round(value, 2) for name, value in parts.items()},
        reference_loop_us=round(1e6 * median(loop_s), 2),
    )


def _timed(loop: ReferenceLoop, tokens_R: NDArray[np.int64], clock: Clock) -> float:
    begun = clock()
    loop.step(tokens_R)
    return clock() - begun


class SteadyCore:
    """A scheduler that always runs the same number of requests.

    Attributes:
        scheduler: the scheduler.
        num_admitted: requests that it was given so far.
    """

    def __init__(self, running: int, settings: CoreSettings, clock: Clock) -> None:
        self._clock = clock
        self._running = running
        self._life_tokens = settings.life_tokens
        longest = settings.prompt_tokens + settings.block_size + settings.life_tokens
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=running * -(-longest // settings.block_size) + 1,
                num_state_slots=running + 1,
                max_model_len=longest,
                block_size=settings.block_size,
                max_num_seqs=running,
            )
        )
        self._prompts = [np.full(settings.prompt_tokens + more, _LEAST_TOKEN_ID) for more in range(settings.block_size)]
        self.num_admitted = 0
        for index in range(running):
            self._admit(1 + index % settings.life_tokens)

    def step(self, tokens_R: NDArray[np.int64]) -> dict[str, float]:
        """Run one step and return the seconds of its parts."""
        clock = self._clock
        begun = clock()
        step = self.scheduler.schedule()
        scheduled = clock()
        if step.kind != "decode" or step.num_requests != self._running:
            raise InvariantError(f"{step.kind} step of {step.num_requests} rows, {self._running} were to decode")
        committing = clock()
        commit = self.scheduler.commit(step, tokens_R)
        committed = clock()
        list(commit.records().tuples())
        recorded = clock()
        for _ in self.scheduler.take_terminals():
            self._admit(self._life_tokens)
        replaced = clock()
        return {
            "schedule": scheduled - begun,
            "commit": committed - committing,
            "records": recorded - committed,
            "replace": replaced - recorded,
        }

    def _admit(self, max_tokens: int) -> None:
        prompt = self._prompts[self.num_admitted % len(self._prompts)]
        rules = StopRules(max_tokens=max_tokens, eos_token_id=END_TOKEN_ID)
        sequence = Sequence(str(self.num_admitted), prompt, rules)
        self.num_admitted += 1
        if not self.scheduler.try_receive(sequence):
            raise InvariantError("a request ended and left no room for the next")
