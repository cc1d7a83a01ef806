"""Options that several commands share, and values that need more than a conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Model = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", exists=True, file_okay=False, help="Checkpoint directory; unset: the small model of the package."
    ),
]
Accelerator = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Driver; unset: DEEPINFER_ACCELERATOR, else the first available of ascend, nvidia, cpu_ref.",
    ),
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float64"] | None,
    typer.Option(help="Activations; unset: float32, or bfloat16 with --numerics served."),
]
DataParallelSize = Annotated[
    int | None,
    typer.Option(help="Ranks, one process each with requests of its own; unset: what a launcher has started, else 1."),
]
ExpertParallelSize = Annotated[
    int, typer.Option(help="Ranks over which experts are spread; 1: every rank holds all of them.")
]
RedundantExperts = Annotated[
    int | None,
    typer.Option(help="Expert slots beyond one an expert, on all ranks together; unset: the environment's, else 0."),
]
ExpertBalancing = Annotated[
    Literal["off", "greedy", "balanced"] | None,
    typer.Option(help="Who moves experts while serving; unset: the environment's, else balanced with spare slots."),
]
ExpertBalancingInterval = Annotated[
    int | None, typer.Option(metavar="STEPS", help="Steps between plans of moves; unset: 10,000.")
]
ExpertBalancingWindow = Annotated[
    int | None, typer.Option(metavar="STEPS", help="Steps that a plan is made from; unset: a tenth of the interval.")
]
ContextParallelSize = Annotated[
    int, typer.Option(help="Ranks that share the rows of each prompt; 1: every rank has prompts of its own.")
]
SpreadNgramTables = Annotated[
    bool, typer.Option("--spread-ngram-tables", help="Keep a share of each n-gram table on every rank, not all of it.")
]
RankDeadline = Annotated[
    float, typer.Option("--rank-deadline-s", metavar="SECONDS", help="How long ranks wait for one another.")
]
Numerics = Annotated[Literal["portable", "served"], typer.Option(help="Numerics contract.")]
AsyncScheduling = Annotated[
    bool | None,
    typer.Option(
        "--async-scheduling/--no-async-scheduling",
        help="Plan a decode step before the one before it was read; unset: what the environment says, else yes.",
    ),
]
KvCacheDtype = Annotated[
    Literal["released", "float32"], typer.Option(help="Quantised cache records as released, or unquantised ones.")
]

Drafts = Annotated[int, typer.Option("--num-speculative-tokens", help="Drafts that a decode step verifies.")]
Verification = Annotated[
    Literal["standard", "coupled"],
    typer.Option(help="Drafts keep the distribution of the tokens, or the very tokens of a run without."),
]
DecodeGraphs = Annotated[
    bool | None,
    typer.Option(
        "--decode-graphs/--no-decode-graphs",
        help="Record decode steps as graphs; unset: what the environment says, else where it saves time.",
    ),
]
GraphInterval = Annotated[
    int | None,
    typer.Option(help="Graphs hold 1, 2, 4, ... rows up to it, then its multiples; unset: the environment's, else 8."),
]


def token_ids(option: str, text: str, problems: list[str]) -> list[int]:
    """Return the ids of ``"1,2,3"``; what is not an id of 0 or more becomes one problem."""
    ids: list[int] = []
    wrong: list[str] = []
    for part in text.split(","):
        word = part.strip()
        if word.isascii() and word.isdigit():
            ids.append(int(word))
        else:
            wrong.append(repr(word))
    if wrong:
        problems.append(f"{option} {text!r}: no token ids: {', '.join(wrong)}; write whole numbers parted by commas")
    return ids
