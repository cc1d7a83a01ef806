"""Whether an engine records its decode steps, and if not, why: decided from claims, before anything is built."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from deepinfer.accelerator import AcceleratorDriver, Plan, Repeatability
from deepinfer.engine.graphs.sizes import graph_sizes
from deepinfer.engine.options import EngineOptions
from deepinfer.errors import PlanError
from deepinfer.settings import Settings

RECORDED_OPS: tuple[str, ...] = (
    *("linear.embed", "linear.dense", "linear.grouped"),
    *("norm.rms", "norm.rotary"),
    *("codec.encode", "codec.store_window", "codec.store_entries", "codec.store_index_keys"),
    "compression.pool_pairs",
    "selection.top_entries",
    "attention.sparse",
    *("mixing.mixes", "mixing.collapse", "mixing.post"),
    "memory.gate",
    *("experts.route", "experts.local"),
    *("plumbing.window_slots", "plumbing.entry_slots"),
)
"""Ops of the pass from ids to hidden rows."""


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """What is recorded.

    Attributes:
        sizes: rows of the graphs; the sizes whose costs are measured where none is recorded.
        is_recorded: whether graphs of these sizes are recorded.
        why_not: why none is, in words; empty where they are.
    """

    sizes: tuple[int, ...]
    is_recorded: bool
    why_not: str

    def as_json(self) -> dict[str, object]:
        """Return the plan with plain values."""
        return {"recorded": self.is_recorded, "sizes": list(self.sizes), "why_not": self.why_not}

    def __str__(self) -> str:
        """Say it in one line."""
        rows = ", ".join(map(str, self.sizes))
        return f"recorded, rows {rows}" if self.is_recorded else f"not recorded: {self.why_not}"


def plan_graphs(driver: AcceleratorDriver, plan: Plan, options: EngineOptions, settings: Settings) -> GraphPlan:
    """Decide, or raise PlanError where graphs are asked for by name and cannot be.

    Left to the engine, graphs are recorded wherever they can be and save something: not on a host, where a replay makes
    the same calls as the step itself.
    """
    asked = options.decode_graphs if options.decode_graphs is not None else settings.decode_graphs
    interval = options.graph_interval if options.graph_interval is not None else settings.graph_interval
    sizes = graph_sizes(options.max_num_seqs * (1 + options.num_speculative_tokens), interval)
    if asked is False:
        return GraphPlan(sizes, is_recorded=False, why_not="decode_graphs is off")
    if problems := graph_problems(driver, plan):
        if asked:
            raise PlanError(f"decode graphs on accelerator {driver.name!r}", problems)
        return GraphPlan(sizes, is_recorded=False, why_not="; ".join(problems))
    if asked is None and driver.device.type == "cpu":
        why = f"driver {driver.name!r} computes on the host, where a replay saves nothing and padding costs rows; "
        return GraphPlan(sizes, is_recorded=False, why_not=f"{why}decode_graphs=True records them all the same")
    return GraphPlan(sizes, is_recorded=True, why_not="")


def graph_problems(driver: AcceleratorDriver, plan: Plan, ops: Collection[str] = RECORDED_OPS) -> list[str]:
    """Return why decode steps cannot be recorded under this plan, all reasons at once."""
    claims = driver.capabilities()
    if not claims.graphs:
        return [f"driver {driver.name!r} does not claim the capability 'graphs'"]
    problems = []
    for row in plan.rows:
        if row.op in ops and row.driver != driver.name:
            problems.append(f"{row.op} runs on {row.driver}, whose calls no graph of {driver.name!r} holds")
        elif row.op in ops and not claims.ops[row.op].graph_safe:
            problems.append(f"driver {driver.name!r} does not claim {row.op} as graph-safe")
        elif row.op in ops and row.repeatability < Repeatability.RUN_TO_RUN:
            problems.append(f"{row.op} does not repeat itself (R1), so that a graph could not be tried")
    return problems
