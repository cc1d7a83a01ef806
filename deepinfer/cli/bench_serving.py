"""`deepinfer bench throughput` and `latency`: batches of requests through a whole engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from deepinfer.cli import bench_drafts, bench_shared, options, show

if TYPE_CHECKING:
    from tqdm import tqdm

    from deepinfer.bench.report import BenchReport
    from deepinfer.bench.serving import LatencyResult, ThroughputResult
    from deepinfer.model.checkpoint import Progress

_Kind = Literal["throughput", "latency"]


def _serving(kind: _Kind, text: str) -> Callable[..., None]:
    """Return the command ``deepinfer bench KIND``: both run the same batches, and read different figures off them."""

    def command(
        ctx: typer.Context,
        *,
        model: Annotated[
            str | None,
            typer.Option(
                metavar="DIR|NAME",
                help="Checkpoint directory, or a configuration by name (mini276, tiny8, ...) that gets random weights "
                "in a temporary folder; unset: the small model of the package.",
            ),
        ] = None,
        form: Annotated[
            Literal["float32", "bfloat16", "released"], typer.Option("--format", help="Form of random weights.")
        ] = "float32",
        batch_sizes: Annotated[
            str, typer.Option(metavar="N,N,...", help="Requests that are sent at once, a case each.")
        ] = "1,8,32",
        prompt_tokens: Annotated[int, typer.Option(help="Length of random prompts.")] = 256,
        output_tokens: Annotated[int, typer.Option(help="Tokens that each request makes, greedily.")] = 32,
        prompts: Annotated[
            Path | None,
            typer.Option(
                metavar="FILE",
                exists=True,
                dir_okay=False,
                help="Prompts to take in turn instead of random ones: a JSON string or list of token ids a line.",
            ),
        ] = None,
        repeats: bench_shared.Repeats = 3,
        seed: bench_shared.Seed = 0,
        accelerator: options.Accelerator = None,
        dtype: options.Dtype = None,
        numerics: options.Numerics = "portable",
        kv_cache_dtype: options.KvCacheDtype = "released",
        block_size: Annotated[int, typer.Option(help="Positions per cache block, even.")] = 128,
        max_num_batched_tokens: Annotated[int, typer.Option(help="Query positions of a prefill step.")] = 2048,
        async_scheduling: options.AsyncScheduling = None,
        threads: Annotated[
            int | None, typer.Option(help="Threads that torch computes with; unset: as many as it chooses.")
        ] = None,
        drafts: Annotated[
            str | None,
            typer.Option(metavar="N,N,...|N..M", help="Compare these numbers of drafts, whose acceptance is set."),
        ] = None,
        varlen: Annotated[
            bool, typer.Option("--varlen", help="With --drafts: also let each step choose how many it verifies.")
        ] = False,
        acceptance: Annotated[
            float | None, typer.Option(help="With --drafts: share of the drafts that are right; unset: 0.75.")
        ] = None,
        own_drafts: Annotated[
            bool, typer.Option("--own-drafts", help="With --drafts: the model drafts and answers for itself.")
        ] = False,
        processor_time: Annotated[
            bool, typer.Option("--processor-time", help="With --drafts: measure processor time, not elapsed time.")
        ] = False,
        alternate: Annotated[
            bool,
            typer.Option(
                "--alternate",
                help="With --drafts: run all cases in turn, round by round, and compare within a round; holds one "
                "engine per case in memory.",
            ),
        ] = False,
        save_result: bench_shared.SaveResult = None,
    ) -> None:
        environment = ctx.obj.start_alone(ctx.command_path)
        problems = bench_shared.file_problems(save_result)
        counts = bench_shared.counts("--batch-sizes", batch_sizes, problems)
        from tqdm import tqdm

        from deepinfer.accelerator.selection import select
        from deepinfer.bench.drafts import SET_ACCEPTANCE, DraftsSettings, compare_drafts
        from deepinfer.bench.environment import computing_threads
        from deepinfer.bench.generation import GenerationSettings
        from deepinfer.bench.model import model_problems, model_source
        from deepinfer.bench.prompts import read_prompts
        from deepinfer.bench.serving import serve
        from deepinfer.engine.options import EngineKeywords, EngineOptions

        problems += model_problems(model)
        if drafts is None and (varlen or acceptance is not None or own_drafts or processor_time or alternate):
            problems.append("--varlen, --acceptance, --own-drafts, --processor-time and --alternate need --drafts")
        if own_drafts and acceptance is not None:
            problems.append(f"--acceptance {acceptance:g}: of drafts by script; leave it out with --own-drafts")
        numbers = () if drafts is None else bench_drafts.numbers("--drafts", drafts, problems)
        if threads is not None and threads < 1:
            problems.append(f"--threads {threads}: at least 1")
        keywords = EngineKeywords(
            dtype=dtype,
            numerics=numerics,
            kv_cache_dtype=kv_cache_dtype,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            async_scheduling=async_scheduling,
        )
        bench_shared.collect(problems, lambda: EngineOptions.from_keywords(keywords))
        settings = bench_shared.checked(
            f"deepinfer bench {kind}",
            problems,
            lambda: GenerationSettings(
                batch_sizes=counts,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                repeats=repeats,
                seed=seed,
            ),
        )
        compared = None
        if drafts is not None:
            compared = bench_shared.checked(
                f"deepinfer bench {kind}",
                problems,
                lambda: DraftsSettings(
                    generation=settings,
                    drafts=numbers,
                    has_variable=varlen,
                    acceptance=None if own_drafts else SET_ACCEPTANCE if acceptance is None else acceptance,
                    clock="processor" if processor_time else "elapsed",
                    alternates=alternate,
                ),
            )
        is_name = model is not None and not Path(model).is_dir()
        given = read_prompts(prompts) if prompts is not None else []
        driver = select(accelerator, environment).driver()
        with ExitStack() as stack:
            with tqdm(desc="making", unit="B", unit_scale=True, leave=False, disable=not is_name) as made:
                source = stack.enter_context(model_source(model, form, lambda progress: _advance(made, progress)))
            stack.enter_context(computing_threads(threads))
            if compared is not None:
                bar = stack.enter_context(bench_shared.bar(compared.all_runs))
                compared = replace(compared, model=source.name)
                comparison = compare_drafts(
                    source, driver, compared, environment, keywords=keywords, prompts=given, tick=bar.update
                )
                print(bench_drafts.heading(compared, len(given), comparison.environment.threads))
                bench_shared.finish(comparison, bench_drafts.table(compared, comparison.results), save_result)
                return
            bar = stack.enter_context(bench_shared.bar(settings.all_runs))
            served = serve(source, driver, settings, environment, keywords=keywords, prompts=given, tick=bar.update)
        facts = served.settings.model
        print(
            f"{facts.model}: weights {facts.weight_form}, activations {facts.activation_dtype}, caches "
            f"{facts.kv_cache_dtype}, on {facts.accelerator}; loaded in {facts.load_s:.2f} s, peak resident size "
            f"{show.binary_size(facts.peak_resident_bytes)} (since {facts.peak_since})"
        )
        print(
            f"prompts of {'at most ' if given else ''}{served.settings.generation.prompt_tokens} tokens, "
            f"{output_tokens} output tokens, median of {repeats} runs, "
            f"{bench_shared.threads_text(served.environment.threads)}, "
            f"asynchronous scheduling {'on' if facts.async_scheduling else 'off'}"
        )
        report: BenchReport[ThroughputResult] | BenchReport[LatencyResult]
        if kind == "throughput":
            report = served.throughput()
            text = _throughput_table(report.results)
        else:
            report = served.latency()
            text = _latency_table(report.results)
        bench_shared.finish(report, text, save_result)

    command.__doc__ = text
    return command


throughput = _serving(
    "throughput",
    """Measure tokens per second, batch size by batch size.

    Prefill and decode steps are counted apart; output tokens and requests over the whole run.
    """,
)
latency = _serving(
    "latency",
    """Measure waiting times in milliseconds, batch size by batch size.

    All requests of a batch are sent at once: to the first token, between two tokens, to the last token. Of a decode
    step: the host's own work, the device's, and the bubble in which the device has nothing to do.
    """,
)


def _throughput_table(results: Sequence[ThroughputResult]) -> str:
    header = ("batch", "prefill tok/s", "decode tok/s", "decode step ms", "output tok/s", "requests/s")
    rows = [
        (
            str(result.batch_size),
            f"{result.prefill_tokens_per_s:,.1f}",
            f"{result.decode_tokens_per_s:,.1f}",
            f"{result.decode_step_ms:,.2f}",
            f"{result.output_tokens_per_s:,.1f}",
            f"{result.requests_per_s:,.2f}",
        )
        for result in results
    ]
    return show.table(header, rows)


def _latency_table(results: Sequence[LatencyResult]) -> str:
    header = (
        *("batch", "first p50", "first p99", "token p50", "token p90", "token p99", "request p50", "request p99"),
        *("step host", "step device", "step bubble"),
    )
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
            f"{result.step_host_ms:,.2f}",
            *("-" if part is None else f"{part:,.2f}" for part in (result.step_device_ms, result.step_bubble_ms)),
        )
        for result in results
    ]
    return show.table(header, rows)


def _advance(bar: tqdm[None], progress: Progress) -> None:
    bar.total = progress.total_bytes
    bar.update(progress.done_bytes - bar.n)
