"""`deepinfer plan`: who computes every op, how repeatably, and why others were refused."""

from __future__ import annotations

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
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Show who computes every op, and why.

    It is the plan that an engine with these options starts with. Status 1 when an op cannot be served, with every
    reason. Nothing is loaded or computed.
    """
    settings = ctx.obj.start()
    from deepinfer.accelerator.selection import select
    from deepinfer.engine.build import plan_ops
    from deepinfer.engine.options import EngineKeywords, EngineOptions

    keywords = EngineKeywords(dtype=dtype, numerics=numerics, kv_cache_dtype=kv_cache_dtype)
    engine_options = EngineOptions.from_keywords(keywords)
    made = plan_ops(select(accelerator, settings).driver(), engine_options, settings)
    print(show.pretty_json(made.as_json()) if as_json else _text(made))


def _text(made: Plan) -> str:
    facts = made.as_json()
    variables = made.runtime_variables
    head = [f"{name:<15}  {value}" for name, value in facts.items() if name not in ("ops", "runtime_variables")]
    head += [f"{name:<15}  {value or 'not set'}" for name, value in variables.items()]
    rows = [(row.op, row.driver, row.provider, f"R{int(row.repeatability)}", row.note) for row in made.rows]
    return "\n".join([*head, "", show.table(("op", "driver", "provider", "level", "why not its own"), rows)])
