"""Throughput and latency of one engine over batch sizes: two readings of the same runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from deepinfer.accelerator import AcceleratorDriver
from deepinfer.bench.environment import Environment, describe_environment
from deepinfer.bench.generation import BatchRun, GenerationSettings, StepTime, random_prompts, run_batch
from deepinfer.bench.memory import PeakMark
from deepinfer.bench.model import ModelFacts, ModelSource
from deepinfer.bench.prompts import Prompt, prompt_ids
from deepinfer.bench.report import BenchReport, Clock, Tick, no_tick, quantile
from deepinfer.engine.build import build_engine_on
from deepinfer.engine.options import EngineKeywords, EngineOptions
from deepinfer.settings import Settings
from deepinfer.tokenizer import Tokenizer


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
        step_host_ms: of a decode step, the host's own work: planning, committing, building records.
        step_device_ms: of a decode step, the device's work; None where the driver does not measure it.
        step_bubble_ms: of a decode step, the time in which the device had nothing to do; None likewise.
    """

    batch_size: int
    first_token_ms_p50: float
    first_token_ms_p99: float
    token_ms_p50: float
    token_ms_p90: float
    token_ms_p99: float
    request_ms_p50: float
    request_ms_p99: float
    step_host_ms: float
    step_device_ms: float | None
    step_bubble_ms: float | None


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """What ran: the model, and the batches that were sent to it."""

    model: ModelFacts
    generation: GenerationSettings


@dataclass(frozen=True, slots=True)
class Served:
    """All runs of one engine, each batch size with its own.

    Attributes:
        settings: what ran.
        environment: where.
        runs: for each batch size, in the order asked for, its runs.
    """

    settings: ServingSettings
    environment: Environment
    runs: tuple[tuple[BatchRun, ...], ...]

    def throughput(self) -> BenchReport[ThroughputResult]:
        """Read rates off the runs."""
        return BenchReport("throughput", self.settings, self.environment, tuple(map(_throughput, self.runs)))

    def latency(self) -> BenchReport[LatencyResult]:
        """Read waiting times off the runs."""
        return BenchReport("latency", self.settings, self.environment, tuple(map(_latency, self.runs)))


def serve(
    source: ModelSource,
    driver: AcceleratorDriver,
    settings: GenerationSettings,
    environment: Settings,
    *,
    keywords: EngineKeywords | None = None,
    prompts: Sequence[Prompt] = (),
    clock: Clock = time.perf_counter,
    tick: Tick = no_tick,
) -> Served:
    """Load the model, send every batch as often as asked for, and note the times.

    Args:
        source: the model.
        driver: who computes; it must be available.
        settings: batch sizes, lengths, repeats.
        environment: the environment's settings.
        keywords: options of the engine; its length and number of requests follow from the batches.
        prompts: given prompts, taken in turn; none means random ones.
        clock: seconds.
        tick: called once for each run, ``settings.all_runs`` times.

    Raises:
        ArgumentError: with the reason of each request that could not be served.
    """
    given = prompt_ids(prompts, Tokenizer.from_directory(source.directory))
    if given:
        settings = replace(settings, prompt_tokens=max(map(len, given)), has_given_prompts=True)
    options = EngineOptions.from_keywords(
        {
            **(keywords or {}),
            "max_num_seqs": max(settings.batch_sizes),
            "max_model_len": settings.prompt_tokens + settings.output_tokens,
        }
    )
    mark = PeakMark.set()
    begun = clock()
    engine = build_engine_on(driver, source.directory, options, environment)
    load_s = clock() - begun

    def batch(size: int) -> list[list[int]]:
        if given:
            return [given[number % len(given)] for number in range(size)]
        return random_prompts(size, settings.prompt_tokens, engine.config.vocab_size, settings.seed)

    # Once untimed: the first steps of a process allocate, and page in the weights.
    run_batch(engine, batch(max(settings.batch_sizes)), 2, clock)
    tick()
    runs = []
    for size in settings.batch_sizes:
        of_size = []
        for _ in range(settings.repeats):
            of_size.append(run_batch(engine, batch(size), settings.output_tokens, clock))
            tick()
        runs.append(tuple(of_size))
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
        async_scheduling=bool(engine.options.async_scheduling),
    )
    return Served(ServingSettings(facts, settings), describe_environment(), tuple(runs))


def _throughput(runs: Sequence[BatchRun]) -> ThroughputResult:
    prefill, decode, output, requests, step_ms = [], [], [], [], []
    for run in runs:
        prefills = [step for step in run.steps if step.kind == "prefill"]
        decodes = [step for step in run.steps if step.is_decode]
        decode_s = sum(step.seconds for step in decodes)
        prefill.append(sum(step.positions for step in prefills) / sum(step.seconds for step in prefills))
        decode.append(sum(step.tokens for step in decodes) / decode_s)
        output.append(sum(step.tokens for step in run.steps) / run.seconds)
        requests.append(run.batch_size / run.seconds)
        step_ms.append(1e3 * decode_s / _count(decodes))
    return ThroughputResult(
        batch_size=runs[0].batch_size,
        prefill_tokens_per_s=round(median(prefill), 2),
        decode_tokens_per_s=round(median(decode), 2),
        output_tokens_per_s=round(median(output), 2),
        requests_per_s=round(median(requests), 3),
        decode_step_ms=round(median(step_ms), 3),
        run_s=round(median(run.seconds for run in runs), 3),
    )


def _latency(runs: Sequence[BatchRun]) -> LatencyResult:
    times = [times for run in runs for times in run.token_times]
    first = [each[0] for each in times]
    between = [later - earlier for each in times for earlier, later in pairwise(each)]
    whole = [each[-1] for each in times]

    def milliseconds(values: Sequence[float], share: float) -> float:
        return round(1e3 * quantile(values, share), 3)

    decodes = [step for run in runs for step in run.steps if step.is_decode]
    count = _count(decodes)
    device = [step.device_s for step in decodes if step.device_s is not None]
    device_s = sum(device) if len(device) == len(decodes) else None
    bubble_s = None if device_s is None else max(0.0, sum(step.seconds for step in decodes) - device_s)

    def of_step(seconds: float | None) -> float | None:
        return None if seconds is None else round(1e3 * seconds / count, 3)

    return LatencyResult(
        batch_size=runs[0].batch_size,
        first_token_ms_p50=milliseconds(first, 0.5),
        first_token_ms_p99=milliseconds(first, 0.99),
        token_ms_p50=milliseconds(between, 0.5),
        token_ms_p90=milliseconds(between, 0.9),
        token_ms_p99=milliseconds(between, 0.99),
        request_ms_p50=milliseconds(whole, 0.5),
        request_ms_p99=milliseconds(whole, 0.99),
        step_host_ms=round(1e3 * sum(step.host_s for step in decodes) / count, 3),
        step_device_ms=of_step(device_s),
        step_bubble_ms=of_step(bubble_s),
    )


def _count(decodes: Sequence[StepTime]) -> int:
    return sum(step.kind == "decode" for step in decodes)
