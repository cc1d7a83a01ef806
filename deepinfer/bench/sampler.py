"""The sampling op of a driver over one batch of logits, setting by setting."""

from __future__ import annotations

import time
from dataclasses import dataclass
from hashlib import sha256
from statistics import median

import torch

from deepinfer.accelerator import AcceleratorDriver
from deepinfer.bench.environment import computing_threads, describe_environment
from deepinfer.bench.report import BenchReport, Clock, Tick, counts_below, no_tick
from deepinfer.engine.build import plan_ops
from deepinfer.engine.options import EngineOptions
from deepinfer.errors import ArgumentError
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.request import RequestSampling
from deepinfer.sampling.rows import RowRequest, build_sampling_step
from deepinfer.settings import Settings

_PROMPT = (3, 4, 5)
_END_TOKEN_ID = 1


@dataclass(frozen=True, slots=True)
class SamplerCase:
    """One setting that all rows share."""

    name: str
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


CASES = (
    SamplerCase("none"),
    SamplerCase("top-k 50", top_k=50),
    SamplerCase("top-p 0.9", top_p=0.9),
    SamplerCase("top-k 50, top-p 0.9", top_k=50, top_p=0.9),
)


@dataclass(frozen=True, slots=True)
class SamplerSettings:
    """What to run.

    Attributes:
        rows: sampled rows.
        vocabulary: logits of a row; they are drawn from the standard normal distribution.
        threads: threads that torch computes with.
        repeats: timed calls per case, after one that is not.
        seed: changes logits and draws.
    """

    rows: int = 64
    vocabulary: int = 129_280
    threads: int = 2
    repeats: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be run, all at once."""
        problems = counts_below(
            1, rows=self.rows, vocabulary=self.vocabulary, threads=self.threads, repeats=self.repeats
        )
        problems += counts_below(0, seed=self.seed)
        if problems:
            raise ArgumentError("bench sampler", problems)


@dataclass(frozen=True, slots=True)
class SamplerResult:
    """One case, in milliseconds per call.

    Attributes:
        setting: the case's name.
        temperature, top_k, top_p: what every row asks for.
        provider: who computes the op.
        median_ms: the median of all calls.
        best_ms: the shortest of them.
        cpu_ms: the median of the processor time of all threads, which a busy machine disturbs least.
        tokens_digest: tells whether another run or commit drew the same tokens.
    """

    setting: str
    temperature: float
    top_k: int
    top_p: float
    provider: str
    median_ms: float
    best_ms: float
    cpu_ms: float
    tokens_digest: str


def run_sampler(
    settings: SamplerSettings,
    driver: AcceleratorDriver,
    environment: Settings,
    *,
    clock: Clock = time.perf_counter,
    cpu_clock: Clock = time.process_time,
    tick: Tick = no_tick,
) -> BenchReport[SamplerResult]:
    """Time the op ``sampling.sample`` as the plan of ``driver`` binds it; ``tick`` is called once for each case."""
    plan = plan_ops(driver, EngineOptions(), environment)
    (provider,) = (f"{row.driver} {row.provider}" for row in plan.rows if row.op == "sampling.sample")
    generator = torch.Generator().manual_seed(settings.seed)
    logits_BV = torch.randn(settings.rows, settings.vocabulary, generator=generator).to(driver.device)
    results = []
    with computing_threads(settings.threads), torch.inference_mode():
        for case in CASES:
            rows = build_sampling_step(_requests(case, settings), driver.device).rows
            seconds, cpu_seconds = [], []
            for _ in range(settings.repeats + 1):
                cpu_begun, begun = cpu_clock(), clock()
                sampled = plan.ops.sampling.sample(logits_BV, rows)
                driver.synchronize()
                seconds.append(clock() - begun)
                cpu_seconds.append(cpu_clock() - cpu_begun)
            digest = sha256(sampled.token_ids_B.cpu().numpy().tobytes()).hexdigest()[:16]
            results.append(
                SamplerResult(
                    setting=case.name,
                    temperature=case.temperature,
                    top_k=case.top_k,
                    top_p=case.top_p,
                    provider=provider,
                    median_ms=round(1e3 * median(seconds[1:]), 3),
                    best_ms=round(1e3 * min(seconds[1:]), 3),
                    cpu_ms=round(1e3 * median(cpu_seconds[1:]), 3),
                    tokens_digest=digest,
                )
            )
            tick()
        environment_facts = describe_environment()
    return BenchReport("sampler", settings, environment_facts, tuple(results))


def _requests(case: SamplerCase, settings: SamplerSettings) -> list[RowRequest]:
    params = SamplingParams(temperature=case.temperature, top_k=case.top_k, top_p=case.top_p)
    requests = []
    for row in range(settings.rows):
        sampling = RequestSampling.create(
            params,
            seed=settings.seed + row,
            prompt_token_ids=_PROMPT,
            end_token_ids=(_END_TOKEN_ID,),
            vocab_size=settings.vocabulary,
        )
        requests.append(RowRequest(sampling, len(_PROMPT), ()))
    return requests
