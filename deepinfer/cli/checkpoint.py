"""`deepinfer checkpoint inspect` and `deepinfer checkpoint make`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from deepinfer.cli import show

if TYPE_CHECKING:
    from deepinfer.model.checkpoint import CheckpointSummary


def inspect(
    ctx: typer.Context,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint directory.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, with configuration and layer roles.")] = False,
) -> None:
    """Describe a checkpoint from its headers.

    Status 1 when it cannot be loaded, with every reason.
    """
    ctx.obj.start()
    from deepinfer.model.checkpoint import inspect_checkpoint

    summary = inspect_checkpoint(directory)
    print(show.pretty_json(summary.to_json()) if as_json else _text(summary))
    if summary.problems:
        count = len(summary.problems)
        print(f"error: {summary.directory}: {count} problem{'' if count == 1 else 's'}", file=sys.stderr)
        raise typer.Exit(1)


def make(
    ctx: typer.Context,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New or empty directory.")],
    *,
    config: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="tiny8, tiny6-wide, mini276, another preset, or a config.json.")
    ],
    seed: Annotated[int, typer.Option(help="Changes every weight; the same seed gives the same checkpoint.")],
    form: Annotated[
        Literal["float32", "bfloat16", "released"], typer.Option("--format", help="Form of the stored weights.")
    ] = "float32",
    shards: Annotated[int, typer.Option(help="Number of files.")] = 1,
) -> None:
    """Make a checkpoint with random weights.

    Files and names are as in the released checkpoint.
    """
    ctx.obj.start_alone(ctx.command_path)
    from tqdm import tqdm

    from deepinfer.model.checkpoint import Progress, make_checkpoint
    from deepinfer.model.presets import preset

    model = preset(config)
    with tqdm(desc="making", unit="B", unit_scale=True) as bar:

        def advance(progress: Progress) -> None:
            bar.total = progress.total_bytes
            bar.update(progress.done_bytes - bar.n)

        directory = make_checkpoint(model, seed, out, form, shards=shards, progress=advance)
    print(directory)


def _text(summary: CheckpointSummary) -> str:
    config = summary.config
    facts = [
        ("directory", summary.directory),
        ("form", summary.form or "unknown"),
        ("tensors", f"{summary.num_tensors:,}"),
        ("bytes", f"{summary.num_bytes:,} ({show.binary_size(summary.num_bytes)})"),
    ]
    if config is not None:
        facts += [
            ("layers", str(config.num_hidden_layers)),
            ("hidden size", str(config.hidden_size)),
            ("vocabulary", str(config.vocab_size)),
            ("positions", str(config.max_position_embeddings)),
        ]
    parts = ["\n".join(f"{label:<12}  {text}" for label, text in facts)]
    if summary.kinds:
        rows = [(kind.group, kind.dtype, f"{kind.num_tensors:,}", f"{kind.num_bytes:,}") for kind in summary.kinds]
        parts.append(show.table(("group", "type", "tensors", "bytes"), rows))
    if summary.shards:
        files = [(shard.file, f"{shard.num_tensors:,}", f"{shard.num_bytes:,}") for shard in summary.shards]
        parts.append(show.table(("file", "tensors", "bytes"), files))
    if summary.notices:
        parts.append("\n".join(f"note: {notice}" for notice in summary.notices))
    parts.append("\n".join(f"problem: {problem}" for problem in summary.problems) or "can be loaded")
    return "\n\n".join(parts)
