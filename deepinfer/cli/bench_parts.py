"""`deepinfer bench core`, `sampler` and `ranks`: parts of the engine by themselves."""

from __future__ import annotations

from typing import Annotated

import typer

from deepinfer.cli import bench_shared, options, show


def core(
    ctx: typer.Context,
    *,
    running: Annotated[str, typer.Option(metavar="N,N,...", help="Running requests, a case each.")] = "64,256,1024",
    steps: Annotated[int, typer.Option(help="Timed steps per case.")] = 200,
    save_result: bench_shared.SaveResult = None,
) -> None:
    """Time a decode step of the engine's core.

    That is scheduling and committing without a model, on one thread. A fixed loop over numpy arrays runs beside it.
    """
    ctx.obj.start_alone(ctx.command_path)
    problems = bench_shared.file_problems(save_result)
    counts = bench_shared.counts("--running", running, problems)
    from deepinfer.bench.core import CoreSettings, run_core

    settings = bench_shared.checked("deepinfer bench core", problems, lambda: CoreSettings(running=counts, steps=steps))
    with bench_shared.bar(len(settings.running)) as bar:
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
    bench_shared.finish(report, show.table(("running", "step", *names, "numpy loop", "ratio"), rows), save_result)


def sampler(
    ctx: typer.Context,
    *,
    accelerator: options.Accelerator = None,
    rows: Annotated[int, typer.Option(help="Sampled rows.")] = 64,
    vocabulary: Annotated[int, typer.Option(help="Logits of a row.")] = 129_280,
    threads: Annotated[int, typer.Option(help="Threads that torch computes with.")] = 2,
    repeats: bench_shared.Repeats = 20,
    seed: bench_shared.Seed = 0,
    save_result: bench_shared.SaveResult = None,
) -> None:
    """Time the sampling op without filters and with each.

    All rows of a call have the same setting; the logits are drawn from the standard normal distribution.
    """
    environment = ctx.obj.start_alone(ctx.command_path)
    problems = bench_shared.file_problems(save_result)
    from deepinfer.accelerator.selection import select
    from deepinfer.bench.sampler import CASES, SamplerSettings, run_sampler

    settings = bench_shared.checked(
        "deepinfer bench sampler",
        problems,
        lambda: SamplerSettings(rows=rows, vocabulary=vocabulary, threads=threads, repeats=repeats, seed=seed),
    )
    driver = select(accelerator, environment).driver()
    with bench_shared.bar(len(CASES)) as bar:
        report = run_sampler(settings, driver, environment, tick=bar.update)
    cells = [
        (
            result.setting,
            f"{result.median_ms:.2f}",
            f"{result.best_ms:.2f}",
            f"{result.cpu_ms:.2f}",
            result.provider,
            result.tokens_digest,
        )
        for result in report.results
    ]
    computing = bench_shared.threads_text(threads)
    print(f"{rows} rows x {vocabulary:,} logits, {computing}, milliseconds per call, {repeats} calls")
    header = ("setting", "median", "best", "CPU time", "provider", "tokens")
    bench_shared.finish(report, show.table(header, cells), save_result)


def ranks(
    ctx: typer.Context,
    *,
    numbers: Annotated[
        str, typer.Option("--ranks", metavar="N,N,...", help="Numbers of ranks, a case each.")
    ] = "2,4,8",
    votes: Annotated[int, typer.Option(help="Timed votes per case.")] = 1000,
    rows: Annotated[int, typer.Option(help="Tokens of a step on each rank.")] = 64,
    seed: bench_shared.Seed = 0,
    save_result: bench_shared.SaveResult = None,
) -> None:
    """Time votes between ranks, and count the bytes that they exchange.

    The ranks are processes of this machine. Sizes are those of the released model; nothing is computed.
    """
    ctx.obj.start_alone(ctx.command_path)
    problems = bench_shared.file_problems(save_result)
    counts = bench_shared.counts("--ranks", numbers, problems)
    from deepinfer.bench.ranks import RanksSettings, run_ranks

    settings = bench_shared.checked(
        "deepinfer bench ranks", problems, lambda: RanksSettings(ranks=counts, votes=votes, rows=rows, seed=seed)
    )
    with bench_shared.bar(len(settings.ranks)) as bar:
        report = run_ranks(settings, tick=bar.update)
    cells = [
        (
            str(result.ranks),
            f"{result.vote_us_p50:,.0f}",
            f"{result.vote_us_p99:,.0f}",
            f"{result.expert_bytes:,.0f}",
            f"{result.least_expert_bytes:,.0f}",
            f"{result.expert_ratio:.2f}",
            f"{result.table_bytes:,.0f}",
            f"{result.least_table_bytes:,.0f}",
            f"{result.table_ratio:.2f}",
        )
        for result in report.results
    ]
    print(
        f"{votes} votes, microseconds each; bytes of a token to other ranks, {rows} tokens a rank: experts of one "
        f"layer ({settings.experts} x {settings.hidden}, top {settings.top_k}), rows of {settings.tables} n-gram tables"
    )
    header = ("ranks", "vote p50", "vote p99", "experts", "least", "ratio", "tables", "least", "ratio")
    bench_shared.finish(report, show.table(header, cells), save_result)
