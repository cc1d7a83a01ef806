"""L2: fused ops against the ops they are made of, on the driver itself, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.accelerator.ops import ExpertOps, SamplingOps
from deepinfer_conformance.bench import Bench, effects, invoke
from deepinfer_conformance.case import Case
from deepinfer_conformance.checks.comparison import bit_finding
from deepinfer_conformance.checks.invariance import invariant
from deepinfer_conformance.outcomes import Finding


def parts(bench: Bench, case: Case) -> Sequence[Finding]:
    """``experts.local`` equals routed, shared and combine; ``sampling.sample`` equals weigh, uniforms and draw."""
    options = invariant(case.options)
    groups = bench.groups(bench.driver, options)
    call = bench.prepared(case.inputs(), options)
    fused = bench.run(call, options)
    arguments = bench.placed(bench.driver, call, options)
    group = groups[call.op.partition(".")[0]]
    if isinstance(group, ExpertOps):
        slots = invoke(
            groups, "experts.routed", {name: arguments[name] for name in ("x_TD", "routing", "experts")}, bench.driver
        )
        shared = invoke(
            groups, "experts.shared", {"x_TD": arguments["x_TD"], "expert": arguments["shared"]}, bench.driver
        )
        result = invoke(groups, "experts.combine", {"shared_TD": shared, "slots_TkD": slots}, bench.driver)
        wanted = effects("experts.combine", result, {})
    elif isinstance(group, SamplingOps):
        wanted = effects("sampling.sample", _sampled(bench, case, arguments), {})
    else:
        raise TypeError(f"{case.op} is not made of other ops")
    return [bit_finding(part, fused[part], wanted[part], "against its parts: ") for part in wanted]


def _sampled(bench: Bench, case: Case, arguments: dict[str, object]) -> object:
    import torch

    from deepinfer.accelerator.ops.sampling import RowStatus, SampledTokens, SamplingRows, TokenWeights

    groups = bench.groups(bench.driver, invariant(case.options))
    rows = arguments["rows"]
    weights = invoke(groups, "sampling.weigh", arguments, bench.driver)
    if not isinstance(rows, SamplingRows) or not isinstance(weights, TokenWeights):
        raise TypeError("sampling.weigh: no weights")
    seeds = {"seeds_B": rows.seeds_B, "streams_B": rows.streams_B}
    uniforms_B = invoke(groups, "sampling.uniforms", seeds, bench.driver)
    drawn_B = invoke(groups, "sampling.draw", {"weights": weights, "uniforms_B": uniforms_B}, bench.driver)
    if not isinstance(drawn_B, torch.Tensor):
        raise TypeError("sampling.draw: no tokens")
    forced_B = (rows.forced_ids_B >= 0) & (weights.status_B == RowStatus.OK)
    return SampledTokens(torch.where(forced_B, rows.forced_ids_B, drawn_B), weights.status_B)
