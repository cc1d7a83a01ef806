"""Throughput and latency of one engine over batch sizes: two readings of the same runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

from deepinfer.accelerator import AcceleratorDriver
from deepinfer.bench.environment import describe_environment
from deepinfer.bench.generation import BatchRun, GenerationSettings, random_prompts, run_batch
from deepinfer.bench.memory import PeakMark
from deepinfer.bench.model import ModelFacts, ModelSource
from deepinfer.bench.report import BenchReport, Clock, Tick, no_tick, quantile
from deepinfer.engine.build import build_engine_on
from deepinfer.engine.engine import Engine
from deepinfer.engine.options import EngineOptions
from deepinfer.settings import Settings


@dataclass(frozen=True, slots=True)
class ThroughputResult:
    """One batch size: medians over its runs.

    Attributes:
        batch_size: requests that were sent at once.
        prefill_tokens_per_s: prompt positions over the time of the prefill steps.
        decode_tokens_per_s: tokens of decode steps over the time of these.
        output_tokens_per_s: all tokens over the whole run, everything between steps included.
        requests_per_s: requests over the whole run.
        decode_step_ms: one decode step.
        run_s: the whole run.
    """

    batch_size: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    output_tokens_per_s: float
    requests_per_s: float
    decode_step_ms: float
    run_s: float


@dataclass(frozen=True, slots=True)
class LatencyResult:
    """One batch size: quantiles over the requests and tokens of all its runs, in milliseconds.

    Attributes:
        batch_size: requests that were sent at once.
        first_token_ms_p50, first_token_ms_p99: from the submission of the batch to a request's first token.
        token_ms_p50, token_ms_p90, token_ms_p99: between two tokens of a request.
        request_ms_p50, request_ms_p99: from the submission to a request's last token.
    """

    batch_size: int
    first_token_ms_p50: float
    first_token_ms_p99: float
    token_ms_p50: float
    token_ms_p90: float
    token_ms_p99: float
    request_ms_p50: float
    request_ms_p99: float


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine, and what loading it took.

    Attributes:
        engine: ready.
        facts: of the model; the peak is that of the load.
        mark: from which the peak counts.
    """

    engine: Engine
    facts: ModelFacts
    mark: PeakMark

    def facts_now(self) -> ModelFacts:
        """Return the facts with the peak as it is now."""
        peak = self.mark.read()
        return replace(self.facts, peak_resident_bytes=peak.peak_resident_bytes, peak_since=peak.since)


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """What ran: the model, and the batches that were sent to it."""

    model: ModelFacts
    generation: GenerationSettings


def load_engine(
    source: ModelSource,
    driver: AcceleratorDriver,
    options: EngineOptions,
    environment: Settings,
    clock: Clock = time.perf_counter,
) -> LoadedEngine:
    """Build an engine and note time and memory."""
    mark = PeakMark.set()
    begun = clock()
    engine = build_engine_on(driver, source.directory, options, environment)
    load_s = clock() - begun
    peak = mark.read()
    facts = ModelFacts(
        model=source.name,
        weight_form=source.weight_form,
        checkpoint_bytes=source.checkpoint_bytes,
        activation_dtype=str(options.activation_dtype).removeprefix("torch."),
        numerics=options.numerics,
        kv_cache_dtype=options.kv_cache_dtype,
        accelerator=driver.name,
        load_s=round(load_s, 3),
        peak_resident_bytes=peak.peak_resident_bytes,
        peak_since=peak.since,
    )
    return LoadedEngine(engine, facts, mark)


def run_throughput(
    loaded: LoadedEngine,
    settings: GenerationSettings,
    *,
    prompts: Sequence[Sequence[int]] = (),
    clock: Clock = time.perf_counter,
    tick: Tick = no_tick,
) -> BenchReport[ThroughputResult]:
    """Send batches and report rates; see :func:`run_latency` for the arguments."""
    results = tuple(
        _throughput(batch_size, runs) for batch_size, runs in _runs(loaded.engine, settings, prompts, clock, tick)
    )
    shown = ServingSettings(loaded.facts_now(), settings)
    return BenchReport("throughput", shown, describe_environment(), results)


def run_latency(
    loaded: LoadedEngine,
    settings: GenerationSettings,
    *,
    prompts: Sequence[Sequence[int]] = (),
    clock: Clock = time.perf_counter,
    tick: Tick = no_tick,
) -> BenchReport[LatencyResult]:
    """Send batches and report waiting times.

    Args:
        loaded: the engine; it must have no unfinished request.
        settings: batch sizes, lengths, repeats.
        prompts: given prompts, taken in turn; none means random ones.
        clock: seconds.
        tick: called once for each run.

    Raises:
        ArgumentError: with the reason of each request that could not be served.
    """
    results = tuple(
        _latency(batch_size, runs) for batch_size, runs in _runs(loaded.engine, settings, prompts, clock, tick)
    )
    shown = ServingSettings(loaded.facts_now(), settings)
    return BenchReport("latency", shown, describe_environment(), results)


def _runs(
    engine: Engine, settings: GenerationSettings, given: Sequence[Sequence[int]], clock: Clock, tick: Tick
) -> Iterator[tuple[int, list[BatchRun]]]:
    def batch(size: int) -> list[Sequence[int]]:
        if given:
            return [given[number % len(given)] for number in range(size)]
        return list(random_prompts(size, settings.prompt_tokens, engine.config.vocab_size, settings.seed))

    # Once untimed: the first steps of a process allocate, and page in the weights.
    run_batch(engine, batch(max(settings.batch_sizes)), 2, clock)
    tick()
    for size in settings.batch_sizes:
        runs = []
        for _ in range(settings.repeats):
            runs.append(run_batch(engine, batch(size), settings.output_tokens, clock))
            tick()
        yield size, runs


def _throughput(batch_size: int, runs: Sequence[BatchRun]) -> ThroughputResult:
    prefill, decode, output, requests, step_ms = [], [], [], [], []
    for run in runs:
        prefills = [step for step in run.steps if step.kind == "prefill"]
        decodes = [step for step in run.steps if step.kind == "decode"]
        decode_s = sum(step.seconds for step in decodes)
        prefill.append(sum(step.positions for step in prefills) / sum(step.seconds for step in prefills))
        decode.append(sum(step.tokens for step in decodes) / decode_s)
        output.append(sum(step.tokens for step in run.steps) / run.seconds)
        requests.append(batch_size / run.seconds)
        step_ms.append(1e3 * decode_s / len(decodes))
    return ThroughputResult(
        batch_size=batch_size,
        prefill_tokens_per_s=round(median(prefill), 2),
        decode_tokens_per_s=round(median(decode), 2),
        output_tokens_per_s=round(median(output), 2),
        requests_per_s=round(median(requests), 3),
        decode_step_ms=round(median(step_ms), 3),
        run_s=round(median(run.seconds for run in runs), 3),
    )


def _latency(batch_size: int, runs: Sequence[BatchRun]) -> LatencyResult:
    times = [times for run in runs for times in run.token_times]
    first = [each[0] for each in times]
    between = [later - earlier for each in times for earlier, later in zip(each, each[1:], strict=False)]
    whole = [each[-1] for each in times]

    def milliseconds(values: Sequence[float], share: float) -> float:
        return round(1e3 * quantile(values, share), 3)

    return LatencyResult(
        batch_size=batch_size,
        first_token_ms_p50=milliseconds(first, 0.5),
        first_token_ms_p99=milliseconds(first, 0.99),
        token_ms_p50=milliseconds(between, 0.5),
        token_ms_p90=milliseconds(between, 0.9),
        token_ms_p99=milliseconds(between, 0.99),
        request_ms_p50=milliseconds(whole, 0.5),
        request_ms_p99=milliseconds(whole, 0.99),
    )
