# ruff: noqa: ARG001 - all bounds share one signature
"""Bounds of the ops that act on rows alone: products, norms, rotary, pooling, mixing, gate.

Each function says which terms its sum has; `tolerance` says what they may cost.

Legend: T rows, K in features, N out features, G groups, D width, S streams, M mixing outputs, C latent width, W = 2C.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from deepinfer.accelerator import OpOptions, PendingCache, StepLayout, StoredWeight
from deepinfer.accelerator.ops.mixing import Mix, MixWeights
from deepinfer.accelerator.ops.norm import RotaryTable
from deepinfer_conformance.bench import Effects
from deepinfer_conformance.data.call import OpCall, Recipe
from deepinfer_conformance.data.weights import exact_values, seen_input
from deepinfer_conformance.tolerance import tol

RESULT = "result"
Bounds = Mapping[str, torch.Tensor]


def stored_of(call: OpCall, name: str) -> tuple[StoredWeight, bool]:
    """Return the stored weight behind a prepared one, and whether the product is exact in precision."""
    recipe = call.arguments[name]
    if not isinstance(recipe, Recipe) or not isinstance(stored := recipe.arguments["stored"], StoredWeight):
        raise TypeError(f"{call.op}: {name!r} is no recipe of a stored weight")
    return stored, recipe.arguments.get("precision") == "float32"


def dense(call: OpCall, options: OpOptions, exact: Effects) -> Bounds:
    """``sum_k |x_k| |w_k|`` over K, of what the product sees (quantised input in served numerics)."""
    stored, is_exact = stored_of(call, "weight")
    dtype = options.activation_dtype
    if is_exact:
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
    served = options.numerics == "served" and not is_exact
    x_TK = seen_input(call.tensor("x_TK"), stored, served=served)
    terms = x_TK.abs() @ exact_values(stored).abs().T
    factors = tol(call.op, dtype, stored.in_features)
    return {RESULT: factors.terms * terms + factors.result * exact[RESULT].abs() + factors.floor}


def grouped(call: OpCall, options: OpOptions, exact: Effects) -> Bounds:
    """As `dense`, per group."""
    stored, _ = stored_of(call, "weight")
    x_TGK = seen_input(call.tensor("x_TGK"), stored, served=options.numerics == "served")
    weight_GNK = exact_values(stored).view(x_TGK.shape[1], -1, stored.in_features)
    terms = torch.einsum("tgk,gnk->tgn", x_TGK.abs(), weight_GNK.abs())
    factors = tol(call.op, options.activation_dtype, stored.in_features)
    return {RESULT: factors.terms * terms + factors.result * exact[RESULT].abs() + factors.floor}


def rms(call: OpCall, options: OpOptions, exact: Effects) -> Bounds:
    """The mean of squares has positive terms: its relative error is the growth, halved by the root."""
    x = call.tensor("x_TD")
    factors = tol(call.op, x.dtype, x.shape[-1])
    return {RESULT: (0.5 * factors.terms + factors.result) * exact[RESULT].abs() + factors.floor}


def rotary(call: OpCall, options: OpOptions, exact: Effects) -> Bounds:
    """Two products and their sum; channels that are not rotated are copies."""
    x, table = call.tensor("x"), call.at("table")
    if not isinstance(table, RotaryTable):
        raise TypeError("norm.rotary: no table")
    width = table.rotary_width
    factors = tol(call.op, x.dtype, 1)
    pairs = torch.unflatten(x[..., -width:].to(torch.float64).abs(), -1, (-1, 2))
    position_T = call.tensor("position_T")
    cos, sin = table.cos_PR[position_T].to(torch.float64).abs(), table.sin_PR[position_T].to(torch.float64).abs()
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    even, odd = pairs[..., 0], pairs[..., 1]
    terms = torch.stack([even * cos + odd * sin, odd * cos + even * sin], -1).flatten(-2)
    bound = torch.zeros_like(exact[RESULT])
    rounding = factors.result * exact[RESULT][..., -width:].abs()
    bound[..., -width:] = factors.elementary * terms + rounding + factors.floor
    return {RESULT: bound}


def pool_pairs(call: OpCall, options: OpOptions, exact: Effects) -> Bounds:
    """Softmax of two: a difference of gates costs its own size in ulps once it is exponentiated."""
    step, pending = call.at("step"), call.at("pending")
    if not isinstance(step, StepLayout) or not isinstance(pending, PendingCache):
        raise TypeError("compression.pool_pairs: no step or no pending rows")
    gate_TC, latent_TC = call.tensor("gate_TC").to(torch.float64), call.tensor("latent_TC").to(torch.float64)
    factors = tol(call.op, call.tensor("gate_TC").dtype, 2)
    if step.requests == 0 or step.rows == 0:
        return {RESULT: torch.zeros_like(gate_TC)}
    request_T = step.request_T
    waiting_TW = pending.rows_ZPW[step.state_slots_R[request_T], (step.position_T - 1) % pending.capacity]
    width = gate_TC.shape[1]
    from_step_T1 = (step.position_T - 1 >= step.cached_R[request_T]).unsqueeze(1)
    before = torch.where(from_step_T1, gate_TC.roll(1, 0), waiting_TW[:, :width].to(torch.float64))
    latent_before = torch.where(from_step_T1, latent_TC.roll(1, 0), waiting_TW[:, width:].to(torch.float64))
    share = torch.sigmoid(before - gate_TC)
    terms = share * latent_before.abs() + (1 - share) * latent_TC.abs()
    cost = factors.elementary + factors.terms * (1 + (before - gate_TC).abs())
    bound = cost * terms + factors.result * exact[RESULT].abs() + factors.floor
    completes_T = step.valid_T & (step.position_T % 2 == 1)
    return {RESULT: torch.where(completes_T.unsqueeze(1), bound, 0.0)}


def mixes(call: OpCall, options: OpOptions, exact: Effects) -> Bounds:
    """One product over S*D and one statistic, then sigmoids, a softmax and the Sinkhorn iterations.

    A sigmoid's slope is at most its value times one minus it. For ``comb``: an error d of the logits is a factor
    within exp(+-2d) of the softmax. Row and column normalisations do not expand Hilbert's projective metric (Birkhoff),
    so what enters comes out at most doubled, elementwise; each iteration adds two sums of S terms and two divisions.
    """
    streams, weights = call.tensor("streams_TSD"), call.at("weights")
    if not isinstance(weights, MixWeights):
        raise TypeError("mixing.mixes: no weights")
    x_TK = streams.to(torch.float64).flatten(1)
    fn_MK, base_M = weights.fn_MK.to(torch.float64), weights.base_M.to(torch.float64)
    scale_3 = weights.scale_3.to(torch.float64).abs()
    wide = torch.float64 if streams.dtype == torch.float64 else torch.float32
    factors = tol(call.op, wide, x_TK.shape[1])
    count = streams.shape[1]
    rate = torch.rsqrt(x_TK.square().mean(1, keepdim=True) + float(call.arguments["norm_eps"]))  # type: ignore[arg-type]
    mixed_TM = (x_TK @ fn_MK.T) * rate
    terms_TM = (x_TK.abs() @ fn_MK.abs().T) * rate
    error_TM = factors.terms * (terms_TM + 0.5 * mixed_TM.abs()) + factors.elementary * (mixed_TM.abs() + base_M.abs())
    pre_error, post_error = scale_3[0] * error_TM[:, :count], scale_3[1] * error_TM[:, count : 2 * count]
    comb_error = torch.unflatten(scale_3[2] * error_TM[:, 2 * count :], 1, (count, count)).amax((1, 2), keepdim=True)
    iterations = int(call.arguments["iterations"])  # type: ignore[call-overload]
    sinkhorn = iterations * 2 * (count + 4) * factors.elementary / 20
    pre, post, comb = exact["result.pre_TS"], exact["result.post_TS"], exact["result.comb_TSS"]
    return {
        "result.pre_TS": pre * (pre_error + factors.result) + factors.floor,
        "result.post_TS": post * (post_error + factors.result) + factors.floor,
        "result.comb_TSS": comb * (4 * comb_error + 2 * sinkhorn + factors.result) + factors.floor,
    }


def collapse(call: OpCall, options: OpOptions, exact: Effects) -> Bounds:
    """``sum_i |pre_i| |x_i|`` over S."""
    streams = call.tensor("streams_TSD")
    terms = (call.tensor("pre_TS").to(torch.float64).abs()[:, :, None] * streams.to(torch.float64).abs()).sum(1)
    factors = tol(call.op, streams.dtype, streams.shape[1])
    return {RESULT: factors.terms * terms + factors.result * exact[RESULT].abs() + factors.floor}


def post(call: OpCall, options: OpOptions, exact: Effects) -> Bounds:
    """``|post_j| |output| + sum_i |comb_ij| |x_i|`` over S + 1."""
    streams, mix = call.tensor("streams_TSD"), call.at("mix")
    if not isinstance(mix, Mix):
        raise TypeError("mixing.post: no mix")
    comb, weight = mix.comb_TSS.to(torch.float64).abs(), mix.post_TS.to(torch.float64).abs()
    terms = torch.einsum("tij,tid->tjd", comb, streams.to(torch.float64).abs())
    terms = terms + weight[:, :, None] * call.tensor("output_TD").to(torch.float64).abs()[:, None]
    factors = tol(call.op, streams.dtype, streams.shape[1] + 1)
    return {RESULT: factors.terms * terms + factors.result * exact[RESULT].abs() + factors.floor}


def gate(call: OpCall, options: OpOptions, exact: Effects) -> Bounds:
    """The gate is evaluated at both ends of the product's error: near zero its root is steep and its sign may turn."""
    x, key = call.tensor("streams_TSD"), call.tensor("key_TSD").to(torch.float64)
    factors = tol(call.op, x.dtype, x.shape[-1])
    wide, eps = x.to(torch.float64), float(call.arguments["norm_eps"])  # type: ignore[arg-type]
    weight_SD = call.tensor("query_weight_SD").to(torch.float64) * call.tensor("key_weight_SD").to(torch.float64)
    products = wide * weight_SD * key
    rate = torch.rsqrt(wide.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps) * x.shape[-1] ** -0.5
    dot_TS, terms_TS = products.sum(-1) * rate, products.abs().sum(-1) * rate
    error_TS = (factors.terms + factors.elementary) * terms_TS + factors.terms * dot_TS.abs()

    def opening(dot: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))

    gate_TS = opening(dot_TS)
    swing_TS = torch.maximum((opening(dot_TS + error_TS) - gate_TS).abs(), (opening(dot_TS - error_TS) - gate_TS).abs())
    value_T1D = call.tensor("value_TD").to(torch.float64).abs().unsqueeze(1)
    bound = (swing_TS + factors.elementary).unsqueeze(-1) * value_T1D
    bound = bound + factors.result * (exact[RESULT].abs() + value_T1D) + factors.floor
    return {RESULT: torch.where(call.tensor("alive_T")[:, None, None], bound, 0.0)}
