"""`deepinfer eval`: what the model can do, task by task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepinfer.cli import options, show
from deepinfer.errors import ArgumentError


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
    save_result: Annotated[
        Path | None, typer.Option(metavar="FILE.json", dir_okay=False, help="Write settings and results.")
    ] = None,
) -> None:
    """Ask questions whose right answers are known, and count.

    The questions are of the world that the packaged model was trained on; none of those that can be learned by heart
    was part of its training, facts and phrases aside.
    """
    ctx.obj.start()
    if save_result is not None and not save_result.absolute().parent.is_dir():
        problem = f"--save-result {str(save_result)!r}: there is no directory {str(save_result.absolute().parent)!r}"
        raise ArgumentError("deepinfer eval", [problem])
    from tqdm import tqdm

    from deepinfer.eval import evaluate as measure
    from deepinfer.eval import load_items
    from deepinfer.llm import LLM

    items = load_items(None if tasks is None else [task.strip() for task in tasks.split(",")], limit)
    llm = LLM(model, accelerator, dtype=dtype, numerics=numerics, kv_cache_dtype=kv_cache_dtype)
    settings: dict[str, object] = {
        "model": "packaged" if model is None else str(model),
        "accelerator": accelerator,
        "dtype": dtype,
        "numerics": numerics,
        "kv_cache_dtype": kv_cache_dtype,
    }
    with tqdm(total=len(items), desc="asking", unit="item", leave=False) as bar:
        report = measure(llm, items, settings, tick=bar.update)
    rows = [
        (
            row.task,
            str(row.distance) if row.distance else "-",
            str(row.items),
            "-" if row.exact_match is None else f"{100 * row.exact_match:.1f} %",
            "-" if row.perplexity is None else f"{row.perplexity:.2f}",
        )
        for row in report.results
    ]
    print(show.table(("task", "distance", "items", "exact match", "perplexity"), rows))
    if save_result is not None:
        report.save(save_result)
