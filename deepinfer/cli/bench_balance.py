"""`deepinfer bench balance`: the policies that place experts, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer.cli import bench_shared, show

if TYPE_CHECKING:
    from deepinfer.bench.balance import BalanceResult


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
    seed: bench_shared.Seed = 0,
    save_result: bench_shared.SaveResult = None,
) -> None:
    """Compare the policies that place experts on ranks.

    Each plans from one window of made-up or recorded load and is judged on the next. No device is used.
    """
    ctx.obj.start_alone(ctx.command_path)
    problems = bench_shared.file_problems(save_result)
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
    settings = bench_shared.checked(
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
    with bench_shared.bar(settings.cases) as bar:
        report = run_balance(settings, tick=bar.update)
    print(
        f"{layers} layers x {experts} experts on {ranks} ranks x {slots} slots, windows of {settings.steps} steps; "
        f"busiest over mean rank, {continuations} next windows"
    )
    bench_shared.finish(report, _balance_table(report.results), save_result)


def _recorded_balance(file: Path, ranks: int, slots: int, problems: list[str], save_result: Path | None) -> None:
    from deepinfer.bench.balance_recorded import RecordedSettings, run_recorded
    from deepinfer.parallel.policies import POLICY_NAMES

    settings = bench_shared.checked("deepinfer bench balance", problems, lambda: RecordedSettings(file, ranks, slots))
    with bench_shared.bar(len(POLICY_NAMES)) as bar:
        report = run_recorded(settings, tick=bar.update)
    print(
        f"{file} on {ranks} ranks x {slots} slots, windows of {settings.steps} steps, each judged on the one after it; "
        "busiest over mean rank"
    )
    bench_shared.finish(report, _balance_table(report.results), save_result)


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


def _shares(option: str, text: str, problems: list[str]) -> tuple[float, ...]:
    shares: list[float] = []
    for part in text.split(","):
        try:
            shares.append(float(part))
        except ValueError:
            problems.append(f"{option} {text!r}: {part.strip()!r} is no number; write shares from 0 to 1")
    return tuple(shares) or (0.0,)
