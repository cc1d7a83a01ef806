"""Decoding with 0 to n drafts and with variable verification, where it is set how many drafts are right.

Random weights draft nothing that would be accepted. So the tokens of every request are set beforehand, the same for all
numbers of drafts, and the engine is made to emit them (``golden_token_ids``). The draft stages compute their rounds as
ever, at their full cost; then each draft is replaced: by the token that will come, or, in a share of the places, by
another one. Which places are wrong depends on the round, the request and the place alone: in one round all cases have
the same luck, and over the rounds it evens out. The confidence that is reported is the true one: the share to the power
of the draft's number.

A trained model drafts and answers for itself: then nothing is set, and requests are answered greedily.

A machine that others use is slow for minutes and quick for others, and what is measured in one of them is no match for
what is measured in the next. Cases that alternate run once in every round, and are compared within it, with the same
weights in memory: an engine that was built later had its weights in smaller pages, and was up to 5 % slower.

Legend: R requests, n drafts a request.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final, cast

import torch

from deepinfer.accelerator import AcceleratorDriver
from deepinfer.bench.environment import describe_environment
from deepinfer.bench.generation import GenerationSettings, random_prompts, request_name, run_batch
from deepinfer.bench.model import ModelSource
from deepinfer.bench.prompts import Prompt, prompt_ids
from deepinfer.bench.report import BenchReport, Clock, Tick, counts_below, no_tick
from deepinfer.engine.build import build_engine_on
from deepinfer.engine.engine import Engine
from deepinfer.engine.options import EngineKeywords, EngineOptions
from deepinfer.engine.outputs import EngineStats
from deepinfer.engine.speculation import ModelSpeculation, Newest, Round
from deepinfer.errors import ArgumentError
from deepinfer.scheduling.step import ScheduledStep
from deepinfer.settings import Settings
from deepinfer.tokenizer import Tokenizer

SET_ACCEPTANCE: Final = 0.75

LEARNING_STEPS: Final = 64
"""So many decode steps, untimed, in which variable verification learns what a batch of one size costs."""


@dataclass(frozen=True, slots=True)
class DraftsSettings:
    """What to compare.

    Attributes:
        generation: batches, lengths, repeats.
        drafts: fixed numbers of drafts, a case each.
        has_variable: also let each step choose, up to the largest of these numbers.
        acceptance: share of the drafts that are right; None leaves drafts and answers to the model.
        clock: "elapsed" or "processor": what is measured, by the bench and by the engine's own cost curve.
        model: the model's name.
        alternates: keep the engines of all cases in memory, and run every case once a round, ``repeats`` rounds.
    """

    generation: GenerationSettings
    drafts: tuple[int, ...]
    has_variable: bool = False
    acceptance: float | None = SET_ACCEPTANCE
    clock: str = "elapsed"
    model: str = ""
    alternates: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be compared, all at once."""
        problems = counts_below(0, drafts=self.drafts)
        if self.acceptance is not None and not 0 <= self.acceptance <= 1:
            problems.append(f"acceptance {self.acceptance} is no share between 0 and 1")
        if self.has_variable and max(self.drafts, default=0) == 0:
            problems.append("variable verification chooses among drafts; compare at least one number above 0")
        if problems:
            raise ArgumentError("bench", problems)

    @property
    def all_runs(self) -> int:
        """Runs of all cases, and what is untimed: a run of each engine, and each batch where lengths are learnt."""
        engines, sizes = len(self.drafts) + self.has_variable, len(self.generation.batch_sizes)
        return engines * (1 + sizes * self.generation.repeats) + self.has_variable * sizes

    @property
    def base_drafts(self) -> int:
        """The number of drafts whose rate the others are compared with: none, or the first where none is no case."""
        return 0 if 0 in self.drafts else self.drafts[0]


@dataclass(frozen=True, slots=True)
class DraftsResult:
    """One batch size with one number of drafts.

    Attributes:
        batch_size: requests that were sent at once.
        drafts: drafts of a request; the most, where each step chooses.
        is_variable: whether each step chooses.
        decode_tokens_per_s: tokens of decode steps over their time, the median of the runs.
        decode_step_ms: one decode step, likewise.
        tokens_per_step: tokens of a request in one of its decode steps, over all runs.
        rows_per_step: rows of a request in one of its decode steps, likewise.
        accepted_by_place: share of the verified drafts of each place that were accepted.
        of_base_by_round: where cases alternate, for each round this case's rate over that of ``base_drafts`` in it.
        of_base: the median of these; None where cases do not alternate.
    """

    batch_size: int
    drafts: int
    is_variable: bool
    decode_tokens_per_s: float
    decode_step_ms: float
    tokens_per_step: float
    rows_per_step: float
    accepted_by_place: tuple[float, ...]
    of_base_by_round: tuple[float, ...] = ()
    of_base: float | None = None


class SetAcceptance:
    """Replaces drafts by what will come, or by something else."""

    def __init__(self, forced: Sequence[Sequence[int]], acceptance: float, vocab_size: int, number: int = 0) -> None:
        """Take the tokens of the requests of a batch; each round, by its number, has other places that are wrong."""
        self._forced = {request_name(request): ids for request, ids in enumerate(forced)}
        self._number = number
        self._acceptance = acceptance
        self._vocab_size = vocab_size

    def __call__(self, step: ScheduledStep, newest: Newest, made: Round) -> Round:
        """Return the round with other drafts, and with the chances that they have."""
        requests, drafts = made.token_ids_Rn.shape
        contexts = newest.block.context_R.tolist()
        rows = []
        for sequence, context in zip(step.sequences, contexts, strict=True):
            first = context - sequence.num_prompt_tokens + 1
            rows.append([self.draft(sequence.request_id, first + place) for place in range(drafts)])
        powers_n = torch.arange(1, drafts + 1, device=made.chances_Rn.device)
        chances_n = (self._acceptance**powers_n).to(made.chances_Rn.dtype)
        token_ids_Rn = torch.tensor(rows, dtype=torch.int64).view(requests, drafts).to(made.token_ids_Rn.device)
        return Round(token_ids_Rn, chances_n.expand(requests, -1).contiguous(), made.distributions)

    def draft(self, request_id: str, output: int) -> int:
        """Return the draft for one of a request's outputs; any token behind its last one."""
        ids = self._forced[request_id]
        token_id = ids[output] if 0 <= output < len(ids) else 0
        # No checksum: those of neighbouring places are not independent, and whole runs of drafts would fail together.
        lot = int.from_bytes(hashlib.sha256(f"{self._number}:{request_id}:{output}".encode()).digest()[:4], "big")
        return token_id if lot < self._acceptance * 2**32 else (token_id + 1) % self._vocab_size


def compare_drafts(
    source: ModelSource,
    driver: AcceleratorDriver,
    settings: DraftsSettings,
    environment: Settings,
    *,
    keywords: EngineKeywords | None = None,
    prompts: Sequence[Prompt] = (),
    clock: Clock | None = None,
    tick: Tick = no_tick,
) -> BenchReport[DraftsResult]:
    """Build an engine for each number of drafts, and send every batch to it: one after the other, or in turn.

    Args:
        source: the model; it must have draft stages where drafts are compared.
        driver: who computes.
        settings: what is compared.
        environment: the environment's settings.
        keywords: options of the engines beside their drafts, lengths and numbers of requests.
        prompts: given prompts, taken in turn; none means random ones.
        clock: seconds, instead of the one that the settings name.
        tick: called once for each run, ``settings.all_runs`` times.
    """
    clock = clock or (time.process_time if settings.clock == "processor" else time.perf_counter)
    given = prompt_ids(prompts, Tokenizer.from_directory(source.directory))
    if given:
        generation = replace(settings.generation, prompt_tokens=max(map(len, given)), has_given_prompts=True)
        settings = replace(settings, generation=generation)
    cases = [(drafts, False) for drafts in settings.drafts]
    if settings.has_variable:
        cases.append((max(settings.drafts), True))
    results: list[DraftsResult] = []
    for group in [cases] if settings.alternates else [[case] for case in cases]:
        benches: dict[tuple[int, bool], _Bench] = {}
        first: Engine | None = None
        # The one with the most drafts has the weights of all: none lies in slower pages than another.
        for drafts, is_variable in sorted(group, reverse=True):
            options = EngineOptions.from_keywords(
                {
                    **_keywords(keywords, settings),
                    "max_num_seqs": max(settings.generation.batch_sizes),
                    "max_model_len": settings.generation.prompt_tokens + settings.generation.output_tokens,
                    "num_speculative_tokens": drafts,
                    "variable_verification": is_variable,
                    "verification": "coupled",
                }
            )
            engine = build_engine_on(driver, source.directory, options, environment, clock=clock, beside=first)
            first = first or engine
            bench = benches[drafts, is_variable] = _Bench(engine, settings, given, clock, is_variable)
            bench.run(max(settings.generation.batch_sizes), min(4, settings.generation.output_tokens))
            tick()
        for size in settings.generation.batch_sizes:
            results += _measured([benches[case] for case in group], size, tick)
    results.sort(key=lambda result: settings.generation.batch_sizes.index(result.batch_size))
    return BenchReport("drafts", settings, describe_environment(), tuple(results))


def _keywords(keywords: EngineKeywords | None, settings: DraftsSettings) -> EngineKeywords:
    """Return the options as given; processor time is measured one step at a time unless it is asked for otherwise.

    What two threads spend side by side would count for the step of either.
    """
    given = EngineKeywords(**(keywords or {}))
    if settings.clock == "processor" and given.get("async_scheduling") is None:
        given["async_scheduling"] = False
    return given


@dataclass(frozen=True, slots=True)
class _DecodeSteps:
    """The decode steps of one run, added up."""

    steps: int
    seconds: float
    tokens: int
    positions: int
    requests: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class _Bench:
    """One engine, and what is sent to it."""

    engine: Engine
    settings: DraftsSettings
    given: Sequence[Sequence[int]]
    clock: Clock
    is_variable: bool

    def run(self, size: int, outputs: int, number: int = 0) -> _DecodeSteps:
        """Send a batch; ``number`` is that of the round, which decides what drafts are right."""
        vocabulary, generation = self.engine.config.vocab_size, self.settings.generation
        prompts: Sequence[Sequence[int]]
        if self.given:
            prompts = [self.given[number % len(self.given)] for number in range(size)]
        else:
            prompts = random_prompts(size, generation.prompt_tokens, vocabulary, generation.seed)
        forced: list[list[int]] = []
        if self.settings.acceptance is not None:
            forced = random_prompts(size, outputs, vocabulary, generation.seed + 1)
            if self.engine.worker.speculation is not None:
                speculation = cast("ModelSpeculation", self.engine.worker.speculation)
                speculation.rewrite = SetAcceptance(forced, self.settings.acceptance, vocabulary, number)
        run = run_batch(self.engine, prompts, outputs, self.clock, forced)
        decodes = [step for step in run.steps if step.is_decode]
        return _DecodeSteps(
            steps=sum(step.kind == "decode" for step in decodes),
            seconds=sum(step.seconds for step in decodes),
            tokens=sum(step.tokens for step in decodes),
            positions=sum(step.positions for step in decodes),
            requests=sum(step.requests for step in decodes),
        )


def _measured(benches: Sequence[_Bench], size: int, tick: Tick) -> list[DraftsResult]:
    """Run every bench once a round, and turn back after each, so that no case is always first or always last."""
    settings = benches[0].settings
    outputs = settings.generation.output_tokens
    for bench in benches:
        if bench.is_variable:  # what a batch of this size costs is learnt first
            number, steps = settings.generation.repeats, 0
            while steps < LEARNING_STEPS:
                steps += bench.run(size, outputs, number).steps
                number += 1
            tick()
    before = [bench.engine.stats() for bench in benches]
    runs: list[list[_DecodeSteps]] = [[] for _ in benches]
    for number in range(settings.generation.repeats):
        for place in range(len(benches))[:: -1 if number % 2 else 1]:
            runs[place].append(benches[place].run(size, outputs, number))
            tick()
    base: Sequence[_DecodeSteps] = ()
    if settings.alternates:
        drafts = [bench.engine.options.num_speculative_tokens for bench in benches]
        base = runs[drafts.index(settings.base_drafts)]
    return [_result(bench, size, own, old, base) for bench, own, old in zip(benches, runs, before, strict=True)]


def _result(
    bench: _Bench, size: int, runs: Sequence[_DecodeSteps], before: EngineStats, base: Sequence[_DecodeSteps]
) -> DraftsResult:
    after = bench.engine.stats()
    by_place = zip(
        *(after.verified_by_place, before.verified_by_place, after.accepted_by_place, before.accepted_by_place),
        strict=True,
    )
    shares = [(accepted - old) / max(1, verified - older) for verified, older, accepted, old in by_place]
    of_base = [run.tokens_per_s / other.tokens_per_s for run, other in zip(runs, base, strict=True)] if base else []
    requests = sum(run.requests for run in runs)
    return DraftsResult(
        batch_size=size,
        drafts=bench.engine.options.num_speculative_tokens,
        is_variable=bench.is_variable,
        decode_tokens_per_s=round(median(run.tokens_per_s for run in runs), 2),
        decode_step_ms=round(median(1e3 * run.seconds / run.steps for run in runs), 2),
        tokens_per_step=round(sum(run.tokens for run in runs) / requests, 3),
        rows_per_step=round(sum(run.positions for run in runs) / requests, 3),
        accepted_by_place=tuple(round(share, 3) for share in shares),
        of_base_by_round=tuple(round(ratio, 4) for ratio in of_base),
        of_base=round(median(of_base), 4) if of_base else None,
    )
