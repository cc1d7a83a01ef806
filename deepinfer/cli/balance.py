"""`deepinfer balance plan`: from counted loads to a layout, with a picture of before and after."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from deepinfer.cli import show
from deepinfer.errors import ArgumentError

if TYPE_CHECKING:
    from deepinfer.parallel.loads import LoadWindow
    from deepinfer.parallel.placement import Layout

_MOST_LAYERS = 8
_MOST_RANKS = 16
_BAR = 30
_EXPERT_BYTES = 18_800_640


def plan(
    ctx: typer.Context,
    loads: Annotated[
        Path,
        typer.Argument(
            metavar="LOADS.json",
            exists=True,
            dir_okay=False,
            help='Counts of a window: {"counts": [...]}, nested as steps, layers, experts.',
        ),
    ],
    *,
    ranks: Annotated[int, typer.Option(help="Ranks that share the experts.")] = 8,
    slots: Annotated[
        int | None, typer.Option(help="Expert slots of a rank; unset: those of --current, else the fewest that do.")
    ] = None,
    current: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN.json", exists=True, dir_okay=False, help="The layout now; unset: the one at start-up."
        ),
    ] = None,
    policy: Annotated[Literal["balanced", "greedy", "keep"], typer.Option(help="Who plans.")] = "balanced",
    expert_bytes: Annotated[int, typer.Option(help="Bytes of an expert's weights and scales.")] = _EXPERT_BYTES,
    output: Annotated[
        Path | None, typer.Option(metavar="PLAN.json", dir_okay=False, help="Write the layout and the figures.")
    ] = None,
) -> None:
    """Plan which rank holds which experts.

    The same counts give the same plan that a running group would make. A layer that keeps its layout had no gain that
    was worth its moves, chance deducted.
    """
    ctx.obj.start()
    problems = [
        f"{name} {value}: at least 1"
        for name, value in (("--ranks", ranks), ("--slots", slots), ("--expert-bytes", expert_bytes))
        if value is not None and value < 1
    ]
    if output is not None and not output.absolute().parent.is_dir():
        problems.append(f"--output {str(output)!r}: there is no directory {str(output.absolute().parent)!r}")
    if problems:
        raise ArgumentError("deepinfer balance plan", problems)
    from deepinfer.parallel.exchange import ExpertPart, plan_exchange
    from deepinfer.parallel.load_file import read_layout, read_loads
    from deepinfer.parallel.placement import PlacementShape
    from deepinfer.parallel.policies import make_policy
    from deepinfer.parallel.shares import busiest_over_mean

    window = read_loads(loads)
    if current is not None:
        before_LS = read_layout(current)
        if slots is not None and before_LS.shape[1] != ranks * slots:
            raise ArgumentError(
                "deepinfer balance plan",
                [f"--current has {before_LS.shape[1]} slots, --ranks and --slots ask {ranks * slots}"],
            )
    else:
        redundant = 0 if slots is None else ranks * slots - window.experts
        if redundant < 0:
            raise ArgumentError(
                "deepinfer balance plan", [f"{ranks} ranks x {slots} slots cannot hold {window.experts} experts"]
            )
        before_LS = PlacementShape(window.layers, window.experts, ranks, redundant).start_up_layout()
    after_LS = make_policy(policy).plan(window, before_LS, ranks)
    exchange = plan_exchange(before_LS, after_LS, ranks, (ExpertPart("expert", expert_bytes),))
    ratios = [busiest_over_mean(window, each, ranks) for each in (before_LS, after_LS)]
    moved_L = (before_LS != after_LS).sum(axis=1).tolist()
    print(
        f"{window.steps} steps, {window.layers} layers x {window.experts} experts on {ranks} ranks x "
        f"{exchange.slots_per_rank} slots, policy {policy}"
    )
    print(_layers(ratios[0].tolist(), ratios[1].tolist(), moved_L))
    print(f"busiest over mean rank, all layers: {ratios[0].mean():.4f} -> {ratios[1].mean():.4f}")
    print(
        f"{len(exchange.moves)} slots change, {len(exchange.crossing)} of them from another rank: "
        f"{show.binary_size(exchange.nbytes)}\n"
    )
    print(_picture(window, before_LS, after_LS, ranks, int((ratios[0] - ratios[1]).argmax())))
    if output is not None:
        document = {
            "policy": policy,
            "ranks": ranks,
            "slots_per_rank": exchange.slots_per_rank,
            "before": ratios[0].round(6).tolist(),
            "after": ratios[1].round(6).tolist(),
            "moved_slots": moved_L,
            "bytes": exchange.nbytes,
            "layout": after_LS.tolist(),
        }
        output.write_text(show.line_json(document) + "\n")


def _layers(before: list[float], after: list[float], moved: list[int]) -> str:
    worst = sorted(range(len(before)), key=lambda layer: (-before[layer], layer))[:_MOST_LAYERS]
    rows = [(str(layer), f"{before[layer]:.4f}", f"{after[layer]:.4f}", str(moved[layer])) for layer in sorted(worst)]
    text = show.table(("layer", "before", "after", "moved"), rows)
    left = len(before) - len(worst)
    return text if not left else f"{text}\n({left} layers that were more even are not shown)"


def _picture(window: LoadWindow, before_LS: Layout, after_LS: Layout, ranks: int, layer: int) -> str:
    """Return one line a rank, busiest first, for the layer that gains most."""
    from deepinfer.parallel.shares import rank_loads

    before, after = (rank_loads(window, each, ranks)[layer].tolist() for each in (before_LS, after_LS))
    order = sorted(range(ranks), key=lambda rank: (-before[rank], rank))
    shown = order if ranks <= _MOST_RANKS else [*order[: _MOST_RANKS - 4], *order[-4:]]
    scale = max(*before, *after, 1e-9)
    lines = [f"layer {layer}: each rank's load over the mean, before and after"]
    for rank in shown:
        bars = [f"{'#' * round(_BAR * load / scale):<{_BAR}} {load:5.3f}" for load in (before[rank], after[rank])]
        lines.append(f"rank {rank:>3}  {bars[0]}  {bars[1]}")
    if len(shown) < ranks:
        lines.append(f"({ranks - len(shown)} ranks in the middle are not shown)")
    return "\n".join(lines)
