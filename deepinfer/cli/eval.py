"""`deepinfer eval`: what the model can do, task by task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer.cli import options, show
from deepinfer.errors import ArgumentError

if TYPE_CHECKING:
    from deepinfer.engine.options import EngineKeywords
    from deepinfer.eval import EvalReport, Internals


def evaluate(
    ctx: typer.Context,
    *,
    model: options.Model = None,
    accelerator: options.Accelerator = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="NAME,NAME,...", help="Only these tasks; unset: all of them.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Most items of every task and distance; unset: all.")] = None,
    dtype: options.Dtype = None,
    numerics: options.Numerics = "portable",
    kv_cache_dtype: options.KvCacheDtype = "released",
    drafts: Annotated[
        int | None,
        typer.Option("--num-speculative-tokens", help="Drafts a step; unset: as many as the model drafts in one go."),
    ] = None,
    long_range: Annotated[
        bool,
        typer.Option("--long-range/--no-long-range", help="Without: attention sees its window alone, as a control."),
    ] = True,
    internals: Annotated[
        bool, typer.Option("--internals/--no-internals", help="Show acceptance, attention shares and expert load too.")
    ] = True,
    save_loads: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            dir_okay=False,
            help="Write expert loads, for `deepinfer bench balance --recorded`.",
        ),
    ] = None,
    save_result: Annotated[
        Path | None, typer.Option(metavar="FILE.json", dir_okay=False, help="Write settings and results.")
    ] = None,
) -> None:
    """Ask questions whose right answers are known, and count.

    The questions are of the world that the packaged model was trained on; none of those that can be learned by heart
    was part of its training, facts and phrases aside.
    """
    ctx.obj.start_alone(ctx.command_path)
    problems = [
        f"{name} {str(file)!r}: there is no directory {str(file.absolute().parent)!r}"
        for name, file in (("--save-result", save_result), ("--save-loads", save_loads))
        if file is not None and not file.absolute().parent.is_dir()
    ]
    if save_loads is not None and save_result is not None and save_loads.absolute() == save_result.absolute():
        problems.append(f"--save-result and --save-loads are both {str(save_loads)!r}; each needs a file of its own")
    if problems:
        raise ArgumentError("deepinfer eval", problems)
    from tqdm import tqdm

    from deepinfer.engine.options import EngineOptions
    from deepinfer.eval import Internals, load_items, watched_llm
    from deepinfer.eval import evaluate as measure

    items = load_items(None if tasks is None else [task.strip() for task in tasks.split(",")], limit)
    asked: EngineKeywords = {"dtype": dtype, "numerics": numerics, "kv_cache_dtype": kv_cache_dtype}
    engine_options = EngineOptions.from_keywords(asked)
    llm, watching = watched_llm(model, accelerator, engine_options, drafts=drafts, long_range=long_range)
    settings: dict[str, object] = {
        "model": "packaged" if model is None else str(model),
        "accelerator": accelerator,
        "dtype": dtype,
        "numerics": numerics,
        "kv_cache_dtype": kv_cache_dtype,
        "long_range": long_range,
    }
    with tqdm(total=len(items), desc="asking", unit="item", leave=False) as bar:
        report = measure(llm, items, settings, tick=bar.update)
    report = replace(report, internals=Internals.of(llm.engine.stats(), watching))
    print(show.table(("task", "distance", "items", "exact match", "perplexity"), _result_rows(report)))
    if internals and report.internals is not None:
        for headers, rows in _internal_tables(report.internals):
            print()
            print(show.table(headers, rows))
    if save_result is not None:
        report.save(save_result)
    if save_loads is not None:
        save_loads.write_text(
            show.line_json({"counts": watching.loads(llm.engine.config.num_hidden_layers)}) + "\n", encoding="utf-8"
        )


def _result_rows(report: EvalReport) -> list[tuple[str, ...]]:
    return [
        (
            row.task,
            str(row.distance) if row.distance else "-",
            str(row.items),
            "-" if row.exact_match is None else show.percent(row.exact_match),
            "-" if row.perplexity is None else f"{row.perplexity:.2f}",
        )
        for row in report.results
    ]


def _internal_tables(internals: Internals) -> Iterator[tuple[tuple[str, ...], Sequence[tuple[str, ...]]]]:
    """Give header and rows of each table that has any rows."""
    if sum(internals.verified_by_place):
        yield (
            ("draft", "verified", "accepted"),
            [
                (str(place + 1), str(verified), show.percent(accepted / verified) if verified else "-")
                for place, (verified, accepted) in enumerate(
                    zip(internals.verified_by_place, internals.accepted_by_place, strict=True)
                )
            ],
        )
        yield (
            ("confidence", "drafts", "expected", "accepted"),
            [
                (
                    f"{number / len(internals.chance_ranges):.1f} to {(number + 1) / len(internals.chance_ranges):.1f}",
                    str(each.verified),
                    show.percent(each.expected / each.verified),
                    show.percent(each.accepted / each.verified),
                )
                for number, each in enumerate(internals.chance_ranges)
                if each.verified
            ]
            + [("error", "", "", show.percent(internals.calibration_error))],
        )
    yield (
        ("layer", "window", "entries", "sink"),
        [
            (str(each.layer), show.percent(each.window), show.percent(each.entries), show.percent(each.sink))
            for each in internals.attention
        ],
    )
    yield (
        ("layer", "busiest / mean", "expert load in percent"),
        [
            (
                str(each.layer),
                f"{each.busiest_to_mean:.2f}",
                " ".join(f"{100 * rows / max(sum(each.rows), 1):.0f}" for rows in each.rows),
            )
            for each in internals.experts
        ],
    )
