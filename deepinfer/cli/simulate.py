"""`deepinfer simulate cluster`: many ranks in one process, on paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer

from deepinfer.cli import show
from deepinfer.errors import ArgumentError, ConfigurationError

_BLOCK_SIZE = 128
Made = TypeVar("Made")


def cluster(
    ctx: typer.Context,
    *,
    ranks: Annotated[int, typer.Option(help="Ranks of the group.")] = 8,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            exists=True,
            dir_okay=False,
            help='Requests, one {"at_ms": ..., "prompt_tokens": ..., "output_tokens": ...} a line; unset: drawn ones.',
        ),
    ] = None,
    requests: Annotated[int, typer.Option(help="Drawn requests.")] = 200,
    rate: Annotated[float, typer.Option(help="Drawn requests a second, for the group; 0: all at once.")] = 20.0,
    prompt_tokens: Annotated[int, typer.Option(help="Mean length of drawn prompts.")] = 500,
    output_tokens: Annotated[int, typer.Option(help="Mean length of drawn answers.")] = 100,
    drafts: Annotated[int, typer.Option(help="Drafts that a decode step verifies per request.")] = 0,
    acceptance: Annotated[float, typer.Option(help="Chance that a draft is accepted after those before it.")] = 0.7,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that one rank runs at once.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of one rank's prompt step.")] = 8192,
    num_blocks: Annotated[int, typer.Option(help="Cache blocks of one rank, 128 positions each.")] = 8192,
    all_interval: Annotated[int, typer.Option(help="Decode steps between votes that every rank must win.")] = 70,
    any_interval: Annotated[int, typer.Option(help="Decode steps between votes that one rank can win.")] = 100,
    decode_ms: Annotated[float, typer.Option(help="A decode step without rows.")] = 8.8,
    decode_row_ms: Annotated[float, typer.Option(help="Each row of the fullest rank.")] = 0.0168,
    prefill_ms: Annotated[float, typer.Option(help="A prompt step without tokens.")] = 24.0,
    prefill_token_ms: Annotated[float, typer.Option(help="Each token of the fullest rank.")] = 308 / 28_672,
    policy: Annotated[
        Literal["even", "balanced", "greedy", "keep"],
        typer.Option(help="Who balances the experts; even: no imbalance is simulated."),
    ] = "even",
    skew: Annotated[float, typer.Option(help="Exponent of the zipf law that experts are chosen by.")] = 0.8,
    redundant: Annotated[int, typer.Option(help="Expert slots beyond one per expert.")] = 32,
    replan_interval: Annotated[int, typer.Option(help="Steps between plans.")] = 1000,
    seed: Annotated[int, typer.Option(help="Changes all that is drawn.")] = 0,
    save_result: Annotated[
        Path | None, typer.Option(metavar="FILE.json", dir_okay=False, help="Write settings and results.")
    ] = None,
) -> None:
    """Run the real scheduler and balancer of many ranks against a cost model.

    Nothing is computed and no time passes: the figures say what the rules cost under these assumptions, not how fast
    any machine is. The defaults are straight lines through published figures of V4.1-Flash.
    """
    ctx.obj.start_alone(ctx.command_path)
    from tqdm import tqdm

    from deepinfer.scheduling.config import SchedulerConfig
    from deepinfer.sim.cluster.arrivals import drawn_arrivals, read_trace
    from deepinfer.sim.cluster.cluster import Cluster, ClusterSettings
    from deepinfer.sim.cluster.costs import CostModel
    from deepinfer.sim.cluster.experts import ExpertSettings
    from deepinfer.sim.cluster.report import ClusterReport

    least = (
        ("--requests", requests, 1),
        ("--rate", rate, 0),
        ("--prompt-tokens", prompt_tokens, 1),
        ("--output-tokens", output_tokens, 1),
        ("--skew", skew, 0),
        ("--redundant", redundant, 0),
        ("--replan-interval", replan_interval, 1),
    )
    problems = [f"{name} {value}: at least {bound}" for name, value, bound in least if not value >= bound]
    if save_result is not None and not save_result.absolute().parent.is_dir():
        problems.append(f"--save-result {str(save_result)!r}: there is no directory for it")
    scheduler = _collected(
        problems,
        lambda: SchedulerConfig(
            num_blocks=num_blocks,
            num_state_slots=max_num_seqs + max_num_seqs // 5 + 1,
            max_model_len=max(1, (num_blocks - 1) * _BLOCK_SIZE),
            block_size=_BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefill_attempt_interval=all_interval,
            prefill_any_attempt_interval=any_interval,
            num_speculative_tokens=drafts,
        ),
    )
    costs = _collected(problems, lambda: CostModel(decode_ms, decode_row_ms, prefill_ms, prefill_token_ms))
    experts = None
    if policy != "even":
        experts = ExpertSettings(policy=policy, skew=skew, redundant=redundant, interval_steps=replan_interval)
    # Where a part is refused, a stand-in lets the rest be checked too.
    settings = _collected(
        problems,
        lambda: ClusterSettings(
            ranks,
            scheduler or SchedulerConfig(num_blocks=2, num_state_slots=2, max_model_len=1),
            costs or CostModel(),
            acceptance,
            experts,
            seed,
        ),
    )
    if settings is None or problems:
        raise ArgumentError("deepinfer simulate cluster", problems)
    arrivals = (
        read_trace(trace)
        if trace is not None
        else drawn_arrivals(
            requests, per_second=rate, prompt_tokens=prompt_tokens, output_tokens=output_tokens, seed=seed
        )
    )
    with tqdm(total=len(arrivals), desc="simulating", unit="request", leave=False) as bar:
        run = Cluster(settings, arrivals).run(tick=bar.update)
    report = ClusterReport.of(run, ranks)
    rows = [(name, "-" if value is None else f"{value:,}") for name, value in asdict(report).items()]
    print(f"{ranks} ranks, {len(arrivals)} requests; a simulation with a cost model, not a measurement")
    print(show.table(("figure", "value"), rows))
    if save_result is not None:
        document = {"simulation": "cluster", "settings": asdict(settings), "results": asdict(report)}
        save_result.write_text(show.pretty_json(document) + "\n")


def _collected(problems: list[str], make: Callable[[], Made]) -> Made | None:
    try:
        return make()
    except (ArgumentError, ConfigurationError) as error:
        problems += error.problems
    return None
