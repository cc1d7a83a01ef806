"""`deepinfer bench`: tables of figures, and the same as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from deepinfer.cli import options, show
from deepinfer.errors import ArgumentError

if TYPE_CHECKING:
    from deepinfer.bench.environment import Environment
    from deepinfer.bench.generation import GenerationSettings
    from deepinfer.bench.report import BenchReport
    from deepinfer.bench.serving import LoadedEngine, ServingSettings
    from deepinfer.engine.options import EngineOptions
    from deepinfer.settings import Settings

_SaveResult = Annotated[
    Path | None, typer.Option(metavar="FILE.json", dir_okay=False, help="Write settings, environment and results.")
]
_ModelOrName = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|NAME",
        help="Checkpoint directory, or a configuration by name (mini276, tiny8, ...) that gets random weights in a "
        "temporary folder; unset: the small model of the package.",
    ),
]
_Form = Annotated[
    Literal["float32", "bfloat16", "released"], typer.Option("--format", help="Form of random weights.")
]
_BatchSizes = Annotated[str, typer.Option(metavar="N,N,...", help="Requests that are sent at once, a case each.")]
_PromptTokens = Annotated[int, typer.Option(help="Length of random prompts.")]
_OutputTokens = Annotated[int, typer.Option(help="Tokens that each request makes, greedily.")]
_Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Prompts instead of random ones, taken in turn: a JSON string or list of token ids a line.",
    ),
]
_Repeats = Annotated[int, typer.Option(help="Timed runs per case.")]
_Seed = Annotated[int, typer.Option(help="Changes the random inputs.")]
_ServingThreads = Annotated[int | None, typer.Option(help="Threads that torch computes with; unset: as it chooses.")]
_BlockSize = Annotated[int, typer.Option(help="Positions per cache block, even.")]
_BatchedTokens = Annotated[int, typer.Option(help="Query positions of a prefill step.")]


def core(
    ctx: typer.Context,
    *,
    running: Annotated[str, typer.Option(metavar="N,N,...", help="Running requests, a case each.")] = "64,256,1024",
    steps: Annotated[int, typer.Option(help="Timed steps per case.")] = 200,
    save_result: _SaveResult = None,
) -> None:
    """Time a decode step of the engine's core.

    That is scheduling and committing without a model, on one thread. A fixed loop over numpy arrays runs beside it.
    """
    ctx.obj.start()
    problems = _file_problems(save_result)
    counts = _counts("--running", running, problems)
    from deepinfer.bench.core import CoreSettings, run_core

    settings = _settings("deepinfer bench core", problems, lambda: CoreSettings(running=counts, steps=steps))
    with _Bar("benchmarking", len(settings.running)) as bar:
        report = run_core(settings, tick=bar.update)
    names = list(report.results[0].parts)
    rows = [
        (
            str(result.running),
            f"{result.median_us:.1f}",
            *(f"{result.parts[name]:.1f}" for name in names),
            f"{result.reference_loop_us:.1f}",
            f"{result.median_us / result.reference_loop_us:.1f}",
        )
        for result in report.results
    ]
    print(f"one decode step, microseconds, median of {settings.steps} steps, one thread")
    _finish(report, ("running", "step", *names, "numpy loop", "ratio"), rows, save_result)


def sampler(
    ctx: typer.Context,
    *,
    accelerator: options.Accelerator = None,
    rows: Annotated[int, typer.Option(help="Sampled rows.")] = 64,
    vocabulary: Annotated[int, typer.Option(help="Logits of a row.")] = 129_280,
    threads: Annotated[int, typer.Option(help="Threads that torch computes with.")] = 2,
    repeats: Annotated[int, typer.Option(help="Timed calls per case.")] = 20,
    seed: _Seed = 0,
    save_result: _SaveResult = None,
) -> None:
    """Time the sampling op without filters and with each.

    All rows of a call have the same setting; the logits are drawn from the standard normal distribution.
    """
    environment = ctx.obj.start()
    problems = _file_problems(save_result)
    from deepinfer.accelerator.selection import select
    from deepinfer.bench.sampler import CASES, SamplerSettings, run_sampler

    settings = _settings(
        "deepinfer bench sampler",
        problems,
        lambda: SamplerSettings(rows=rows, vocabulary=vocabulary, threads=threads, repeats=repeats, seed=seed),
    )
    driver = select(accelerator, environment).driver()
    with _Bar("benchmarking", len(CASES)) as bar:
        report = run_sampler(settings, driver, environment, tick=bar.update)
    print(f"{rows} rows x {vocabulary:,} logits, {threads} threads, milliseconds per call, {repeats} calls")
    table_rows = [
        (result.setting, f"{result.median_ms:.2f}", f"{result.best_ms:.2f}", result.provider, result.tokens_digest)
        for result in report.results
    ]
    _finish(report, ("setting", "median", "best", "provider", "tokens"), table_rows, save_result)


def throughput(
    ctx: typer.Context,
    *,
    model: _ModelOrName = None,
    form: _Form = "float32",
    batch_sizes: _BatchSizes = "1,8,32",
    prompt_tokens: _PromptTokens = 256,
    output_tokens: _OutputTokens = 32,
    prompts: _Prompts = None,
    repeats: _Repeats = 3,
    seed: _Seed = 0,
    accelerator: options.Accelerator = None,
    dtype: options.Dtype = None,
    numerics: options.Numerics = "portable",
    kv_cache_dtype: options.KvCacheDtype = "released",
    block_size: _BlockSize = 128,
    max_num_batched_tokens: _BatchedTokens = 2048,
    threads: _ServingThreads = None,
    save_result: _SaveResult = None,
) -> None:
    """Measure tokens per second, batch size by batch size.

    Prefill and decode steps are counted apart; the whole run, with everything between steps, besides.
    """
    environment = ctx.obj.start()
    asked = _Asked(model, form, batch_sizes, prompt_tokens, output_tokens, prompts, repeats, seed, threads, save_result)
    from deepinfer.bench.serving import run_throughput

    plan = _plan(
        "deepinfer bench throughput",
        asked,
        {
            "dtype": dtype,
            "numerics": numerics,
            "kv_cache_dtype": kv_cache_dtype,
            "block_size": block_size,
            "max_num_batched_tokens": max_num_batched_tokens,
        },
    )
    report = _serve(asked, plan, accelerator, environment, run_throughput)
    rows = [
        (
            str(result.batch_size),
            f"{result.prefill_tokens_per_s:,.1f}",
            f"{result.decode_tokens_per_s:,.1f}",
            f"{result.decode_step_ms:,.2f}",
            f"{result.output_tokens_per_s:,.1f}",
            f"{result.requests_per_s:,.2f}",
        )
        for result in report.results
    ]
    header = ("batch", "prefill tok/s", "decode tok/s", "decode step ms", "output tok/s", "requests/s")
    _finish(report, header, rows, save_result)


def latency(
    ctx: typer.Context,
    *,
    model: _ModelOrName = None,
    form: _Form = "float32",
    batch_sizes: _BatchSizes = "1,8,32",
    prompt_tokens: _PromptTokens = 256,
    output_tokens: _OutputTokens = 32,
    prompts: _Prompts = None,
    repeats: _Repeats = 3,
    seed: _Seed = 0,
    accelerator: options.Accelerator = None,
    dtype: options.Dtype = None,
    numerics: options.Numerics = "portable",
    kv_cache_dtype: options.KvCacheDtype = "released",
    block_size: _BlockSize = 128,
    max_num_batched_tokens: _BatchedTokens = 2048,
    threads: _ServingThreads = None,
    save_result: _SaveResult = None,
) -> None:
    """Measure waiting times, batch size by batch size.

    All requests of a batch are sent at once: to the first token, between tokens, and to the last one.
    """
    environment = ctx.obj.start()
    asked = _Asked(model, form, batch_sizes, prompt_tokens, output_tokens, prompts, repeats, seed, threads, save_result)
    from deepinfer.bench.serving import run_latency

    plan = _plan(
        "deepinfer bench latency",
        asked,
        {
            "dtype": dtype,
            "numerics": numerics,
            "kv_cache_dtype": kv_cache_dtype,
            "block_size": block_size,
            "max_num_batched_tokens": max_num_batched_tokens,
        },
    )
    report = _serve(asked, plan, accelerator, environment, run_latency)
    rows = [
        (
            str(result.batch_size),
            f"{result.first_token_ms_p50:,.1f}",
            f"{result.first_token_ms_p99:,.1f}",
            f"{result.token_ms_p50:,.2f}",
            f"{result.token_ms_p90:,.2f}",
            f"{result.token_ms_p99:,.2f}",
            f"{result.request_ms_p50:,.1f}",
            f"{result.request_ms_p99:,.1f}",
        )
        for result in report.results
    ]
    header = ("batch", "first p50", "first p99", "token p50", "token p90", "token p99", "request p50", "request p99")
    _finish(report, header, rows, save_result)
