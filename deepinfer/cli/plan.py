"""`deepinfer plan`: who computes every op, how repeatably, and why others were refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer.cli import options, show

if TYPE_CHECKING:
    from deepinfer.accelerator.plan import Plan


def plan(
    ctx: typer.Context,
    *,
    accelerator: options.Accelerator = None,
    dtype: options.Dtype = None,
    numerics: options.Numerics = "portable",
    kv_cache_dtype: options.KvCacheDtype = "released",
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at once.")] = 64,
    num_state_slots: Annotated[int | None, typer.Option(help="State slots; unset: 1.2 for each request.")] = None,
    num_speculative_tokens: options.Drafts = 0,
    verification: options.Verification = "standard",
    decode_graphs: options.DecodeGraphs = None,
    graph_interval: options.GraphInterval = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Show who computes every op, and why, whether decode steps are recorded as graphs, and what drafts take.

    It is the plan that an engine with these options starts with. Status 1 when an op cannot be served, with every
    reason. Nothing is loaded or computed.
    """
    settings = ctx.obj.start()
    from deepinfer.accelerator.selection import select
    from deepinfer.engine.build import plan_ops
    from deepinfer.engine.graphs.planning import plan_graphs
    from deepinfer.engine.memory import draft_pool_bytes
    from deepinfer.engine.options import EngineKeywords, EngineOptions
    from deepinfer.sampling.drafting import DEFAULT_CAPACITY

    keywords = EngineKeywords(
        dtype=dtype,
        numerics=numerics,
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=max_num_seqs,
        num_state_slots=num_state_slots,
        num_speculative_tokens=num_speculative_tokens,
        verification=verification,
        decode_graphs=decode_graphs,
        graph_interval=graph_interval,
    )
    engine_options = EngineOptions.from_keywords(keywords)
    driver = select(accelerator, settings).driver()
    made = plan_ops(driver, engine_options, settings)
    graphs = plan_graphs(driver, made, engine_options, settings)
    slots, drafts = engine_options.state_slots, num_speculative_tokens
    drafts_bytes = draft_pool_bytes(engine_options, DEFAULT_CAPACITY)
    pool = {"state_slots": slots, "drafts": drafts, "verification": verification, "bytes": drafts_bytes}
    facts = {**made.as_json(), "decode_graphs": graphs.as_json(), "draft_pool": pool}
    told = {"decode_graphs": str(graphs), "draft_pool": _pool_text(slots, drafts, drafts_bytes)}
    print(show.pretty_json(facts) if as_json else _text(made, {**facts, **told}))


def _pool_text(slots: int, drafts: int, drafts_bytes: int) -> str:
    if not drafts:
        return "no drafts"
    each = drafts_bytes // (slots * drafts)
    return f"{slots} state slots x {drafts} drafts x {each:,} B = {drafts_bytes:,} B, of the memory budget"


def _text(made: Plan, facts: Mapping[str, object]) -> str:
    variables = made.runtime_variables
    head = [f"{name:<15}  {value}" for name, value in facts.items() if name not in ("ops", "runtime_variables")]
    head += [f"{name:<15}  {value or 'not set'}" for name, value in variables.items()]
    rows = [(row.op, row.driver, row.provider, f"R{int(row.repeatability)}", row.note) for row in made.rows]
    return "\n".join([*head, "", show.table(("op", "driver", "provider", "level", "why not its own"), rows)])
