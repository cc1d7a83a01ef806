"""`deepinfer bench`: tables of figures, and the same as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from deepinfer.cli import bench_drafts, bench_serving, options, show
from deepinfer.errors import ArgumentError

if TYPE_CHECKING:
    from tqdm import tqdm

    from deepinfer.bench.balance import BalanceResult
    from deepinfer.bench.report import BenchReport
    from deepinfer.bench.serving import LatencyResult, ThroughputResult
    from deepinfer.model.checkpoint import Progress

Made = TypeVar("Made")
_Kind = Literal["throughput", "latency"]

_SaveResult = Annotated[
    Path | None, typer.Option(metavar="FILE.json", dir_okay=False, help="Write settings, environment and results.")
]
_Repeats = Annotated[int, typer.Option(help="Timed runs per case, after one that is not timed.")]
_Seed = Annotated[int, typer.Option(help="Changes the random inputs.")]


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
    ctx.obj.start_alone(ctx.command_path)
    problems = _file_problems(save_result)
    counts = _counts("--running", running, problems)
    from deepinfer.bench.core import CoreSettings, run_core

    settings = _checked("deepinfer bench core", problems, lambda: CoreSettings(running=counts, steps=steps))
    with _bar(len(settings.running)) as bar:
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
    _finish(report, show.table(("running", "step", *names, "numpy loop", "ratio"), rows), save_result)


def sampler(
    ctx: typer.Context,
    *,
    accelerator: options.Accelerator = None,
    rows: Annotated[int, typer.Option(help="Sampled rows.")] = 64,
    vocabulary: Annotated[int, typer.Option(help="Logits of a row.")] = 129_280,
    threads: Annotated[int, typer.Option(help="Threads that torch computes with.")] = 2,
    repeats: _Repeats = 20,
    seed: _Seed = 0,
    save_result: _SaveResult = None,
) -> None:
    """Time the sampling op without filters and with each.

    All rows of a call have the same setting; the logits are drawn from the standard normal distribution.
    """
    environment = ctx.obj.start_alone(ctx.command_path)
    problems = _file_problems(save_result)
    from deepinfer.accelerator.selection import select
    from deepinfer.bench.sampler import CASES, SamplerSettings, run_sampler

    settings = _checked(
        "deepinfer bench sampler",
        problems,
        lambda: SamplerSettings(rows=rows, vocabulary=vocabulary, threads=threads, repeats=repeats, seed=seed),
    )
    driver = select(accelerator, environment).driver()
    with _bar(len(CASES)) as bar:
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
    print(f"{rows} rows x {vocabulary:,} logits, {_threads(threads)}, milliseconds per call, {repeats} calls")
    _finish(report, show.table(("setting", "median", "best", "CPU time", "provider", "tokens"), cells), save_result)


def balance(
    ctx: typer.Context,
    *,
    loads: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME,...", help="zipf-EXPONENT or lognormal, a case each; unset: five of them."),
    ] = None,
    drifts: Annotated[
        str, typer.Option(metavar="SHARE,...", help="Shares of the experts that swap weights after each window.")
    ] = "0,0.05,0.1,0.2",
    continuations: Annotated[
        int, typer.Option(help="Next windows that each plan is judged on, all after the same past.")
    ] = 16,
    layers: Annotated[int, typer.Option(help="Layers.")] = 40,
    experts: Annotated[int, typer.Option(help="Experts of a layer.")] = 384,
    ranks: Annotated[int, typer.Option(help="Ranks that share the experts.")] = 64,
    slots: Annotated[int, typer.Option(help="Expert slots of a rank.")] = 7,
    recorded: Annotated[
        Path | None,
        typer.Option(
            metavar="LOADS.json",
            exists=True,
            dir_okay=False,
            help="Loads that `deepinfer eval --save-loads` has written, instead of made-up ones; its windows judge.",
        ),
    ] = None,
    seed: _Seed = 0,
    save_result: _SaveResult = None,
) -> None:
    """Compare the policies that place experts on ranks.

    Each plans from one window of made-up or recorded load and is judged on the next. No device is used.
    """
    ctx.obj.start()
    problems = _file_problems(save_result)
    if recorded is not None:
        made_up = ("loads", "drifts", "continuations", "layers", "experts", "seed")
        sources = {name: ctx.get_parameter_source(name) for name in made_up}
        idle = [f"--{name}" for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
        if idle:
            problems.append(f"{', '.join(idle)}: for made-up loads only; leave them out with --recorded")
        _recorded_balance(recorded, ranks, slots, problems, save_result)
        return
    shares = _shares("--drifts", drifts, problems)
    from deepinfer.bench.balance import BalanceSettings, run_balance
    from deepinfer.bench.balance_loads import DEFAULT_LOADS

    names = DEFAULT_LOADS if loads is None else tuple(word.strip() for word in loads.split(","))
    settings = _checked(
        "deepinfer bench balance",
        problems,
        lambda: BalanceSettings(
            loads=names,
            drifts=shares,
            seed=seed,
            continuations=continuations,
            layers=layers,
            experts=experts,
            ranks=ranks,
            slots_per_rank=slots,
        ),
    )
    with _bar(settings.cases) as bar:
        report = run_balance(settings, tick=bar.update)
    print(
        f"{layers} layers x {experts} experts on {ranks} ranks x {slots} slots, windows of {settings.steps} steps; "
        f"busiest over mean rank, {continuations} next windows"
    )
    _finish(report, _balance_table(report.results), save_result)


def _recorded_balance(file: Path, ranks: int, slots: int, problems: list[str], save_result: Path | None) -> None:
    from deepinfer.bench.balance_recorded import RecordedSettings, run_recorded
    from deepinfer.parallel.policies import POLICY_NAMES

    settings = _checked("deepinfer bench balance", problems, lambda: RecordedSettings(file, ranks, slots))
    with _bar(len(POLICY_NAMES)) as bar:
        report = run_recorded(settings, tick=bar.update)
    print(
        f"{file} on {ranks} ranks x {slots} slots, windows of {settings.steps} steps, each judged on the one after it; "
        "busiest over mean rank"
    )
    _finish(report, _balance_table(report.results), save_result)


def _balance_table(results: Sequence[BalanceResult]) -> str:
    rows = [
        (
            result.load,
            ("-" if result.load == "recorded" else "no chance") if result.drift is None else f"{result.drift:g}",
            result.policy,
            f"{result.planning_ratio:.4f}",
            f"{result.next_ratio:.4f}",
            f"{result.over_greedy:+.4f} +- {result.over_greedy_error:.4f}",
            f"{result.moved_slots:.1f}",
            show.binary_size(result.bytes),
            f"{result.seconds * 1e3:.0f}",
        )
        for result in results
    ]
    header = ("load", "drift", "policy", "this window", "next window", "over greedy", "moved/layer", "bytes", "CPU ms")
    return show.table(header, rows)


def ranks(
    ctx: typer.Context,
    *,
    numbers: Annotated[
        str, typer.Option("--ranks", metavar="N,N,...", help="Numbers of ranks, a case each.")
    ] = "2,4,8",
    votes: Annotated[int, typer.Option(help="Timed votes per case.")] = 1000,
    rows: Annotated[int, typer.Option(help="Tokens of a step on each rank.")] = 64,
    seed: _Seed = 0,
    save_result: _SaveResult = None,
) -> None:
    """Time votes between ranks, and count the bytes that they exchange.

    The ranks are processes of this machine. Sizes are those of the released model; nothing is computed.
    """
    ctx.obj.start_alone(ctx.command_path)
    problems = _file_problems(save_result)
    counts = _counts("--ranks", numbers, problems)
    from deepinfer.bench.ranks import RanksSettings, run_ranks

    settings = _checked(
        "deepinfer bench ranks", problems, lambda: RanksSettings(ranks=counts, votes=votes, rows=rows, seed=seed)
    )
    with _bar(len(settings.ranks)) as bar:
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
    _finish(report, show.table(header, cells), save_result)


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
        repeats: _Repeats = 3,
        seed: _Seed = 0,
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
        acceptance: Annotated[float, typer.Option(help="With --drafts: share of the drafts that are right.")] = 0.75,
        own_drafts: Annotated[
            bool, typer.Option("--own-drafts", help="With --drafts: the model drafts and answers for itself.")
        ] = False,
        processor_time: Annotated[
            bool, typer.Option("--processor-time", help="With --drafts: measure processor time, not elapsed time.")
        ] = False,
        save_result: _SaveResult = None,
    ) -> None:
        environment = ctx.obj.start_alone(ctx.command_path)
        problems = _file_problems(save_result)
        counts = _counts("--batch-sizes", batch_sizes, problems)
        from tqdm import tqdm

        from deepinfer.accelerator.selection import select
        from deepinfer.bench.drafts import DraftsSettings, compare_drafts
        from deepinfer.bench.environment import computing_threads
        from deepinfer.bench.generation import GenerationSettings
        from deepinfer.bench.model import model_problems, model_source
        from deepinfer.bench.prompts import read_prompts
        from deepinfer.bench.serving import serve
        from deepinfer.engine.options import EngineKeywords, EngineOptions

        problems += model_problems(model)
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
        _collect(problems, lambda: EngineOptions.from_keywords(keywords))
        settings = _checked(
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
            compared = _checked(
                f"deepinfer bench {kind}",
                problems,
                lambda: DraftsSettings(
                    generation=settings,
                    drafts=bench_drafts.numbers("--drafts", drafts, problems),
                    has_variable=varlen,
                    acceptance=None if own_drafts else acceptance,
                    clock="processor" if processor_time else "elapsed",
                ),
            )
        elif varlen or processor_time or own_drafts:
            problem = "--varlen, --own-drafts and --processor-time need --drafts"
            raise ArgumentError(f"deepinfer bench {kind}", [problem])
        is_name = model is not None and not Path(model).is_dir()
        given = read_prompts(prompts) if prompts is not None else []
        driver = select(accelerator, environment).driver()
        with ExitStack() as stack:
            with tqdm(desc="making", unit="B", unit_scale=True, leave=False, disable=not is_name) as made:
                source = stack.enter_context(model_source(model, form, lambda progress: _advance(made, progress)))
            stack.enter_context(computing_threads(threads))
            if compared is not None:
                bar = stack.enter_context(_bar(compared.all_runs))
                compared = replace(compared, model=source.name)
                comparison = compare_drafts(
                    source, driver, compared, environment, keywords=keywords, prompts=given, tick=bar.update
                )
                print(bench_drafts.heading(compared, len(given), _threads(comparison.environment.threads)))
                _finish(comparison, bench_drafts.table(comparison.results), save_result)
                return
            bar = stack.enter_context(_bar(settings.all_runs))
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
            f"{_threads(served.environment.threads)}, "
            f"asynchronous scheduling {'on' if facts.async_scheduling else 'off'}"
        )
        report: BenchReport[ThroughputResult] | BenchReport[LatencyResult]
        if kind == "throughput":
            report = served.throughput()
            text = bench_serving.throughput_table(report.results)
        else:
            report = served.latency()
            text = bench_serving.latency_table(report.results)
        _finish(report, text, save_result)

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


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _counts(option: str, text: str, problems: list[str]) -> tuple[int, ...]:
    counts: list[int] = []
    for part in text.split(","):
        word = part.strip()
        if word.isascii() and word.isdigit() and int(word) > 0:
            counts.append(int(word))
        else:
            problems.append(f"{option} {text!r}: {word!r} is no count; write whole numbers from 1, parted by commas")
    return tuple(counts) or (1,)


def _shares(option: str, text: str, problems: list[str]) -> tuple[float, ...]:
    shares: list[float] = []
    for part in text.split(","):
        try:
            shares.append(float(part))
        except ValueError:
            problems.append(f"{option} {text!r}: {part.strip()!r} is no number; write shares from 0 to 1")
    return tuple(shares) or (0.0,)


def _file_problems(file: Path | None) -> list[str]:
    """Say now, not after minutes of work, that a result could not be saved."""
    if file is not None and not file.absolute().parent.is_dir():
        return [f"--save-result {str(file)!r}: there is no directory {str(file.absolute().parent)!r}"]
    return []


def _collect(problems: list[str], make: Callable[[], Made]) -> Made | None:
    try:
        return make()
    except ArgumentError as error:
        problems += error.problems
    return None


def _checked(command: str, problems: list[str], make: Callable[[], Made]) -> Made:
    """Return what ``make`` makes; raise its problems together with those found before."""
    made = _collect(problems, make)
    if made is None or problems:
        raise ArgumentError(command, problems)
    return made


def _bar(total: int) -> tqdm[None]:
    from tqdm import tqdm

    return tqdm(total=total, desc="benchmarking", unit="run", leave=False)


def _advance(bar: tqdm[None], progress: Progress) -> None:
    bar.total = progress.total_bytes
    bar.update(progress.done_bytes - bar.n)


def _finish(report: BenchReport[Any], table: str, file: Path | None) -> None:
    print(table)
    environment = report.environment
    busy = "" if environment.load_average_1m is None else f", load {environment.load_average_1m:.1f}"
    print(f"{environment.cpu_model}, {environment.logical_cpus} processors{busy}; torch {environment.torch}")
    if file is not None:
        report.save(file)
