"""Bounds of the expert feed-forward: errors carried through two products and a gate.

portable: ``g``, ``u`` are products over D, ``h = silu(min(g, limit)) * clamp(u)`` has slopes of at most 1.1 in g
(the largest slope of silu) and ``|silu(g)|`` in u, and ``y`` is a product over I. In a narrow activation dtype g, u and
h may each be rounded to it once: independent errors, added by their norm.

served: g and u are rounded to bfloat16 (twice, by driver and yardstick), and ``h`` times the routing weight is
quantised per 32 to e4m3. A value near a tie may be quantised to the other neighbour: one step, 2^-3 of the value or
the block's smallest step. Those flips are rare and independent; their bound is again the norm's.

Legend: T rows, D hidden size, k slots, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from deepinfer.accelerator import OpOptions, StoredExpert
from deepinfer.accelerator.ops.experts import Routing
from deepinfer_conformance.bench import Effects
from deepinfer_conformance.data.call import OpCall, Recipe
from deepinfer_conformance.data.weights import QUANTISED, exact_values, seen_input
from deepinfer_conformance.tolerance import FLUSH, UNIT_ROUNDOFF, growth, independent, tol

_STEEPEST_SILU = 1.1
_E4M3_STEP = 2.0**-3
_E4M3_SMALLEST_STEP = 2.0**-9 / 448 * 2  # of the block's maximum; the scale is at most twice amax / 448
_GROUP = 32
Bounds = Mapping[str, torch.Tensor]


class _Branch(NamedTuple):
    """Outputs of one or more experts: their error bound, and their absolute values."""

    error: torch.Tensor
    size: torch.Tensor


def routed(call: OpCall, options: OpOptions, exact: Effects) -> Bounds:
    """Return the bound of slot outputs [T, k, D]."""
    slots_TkD = _slots(call, options)
    return {"result": slots_TkD.error + tol(call.op, _wide(options), 1).result * exact["result"].abs()}


def shared(call: OpCall, options: OpOptions, exact: Effects) -> Bounds:
    """Return the bound of the shared expert's output [T, D]."""
    recipe = _recipe(call, "expert")
    error = _feed_forward(call.tensor("x_TD"), recipe["expert"], recipe["limit"], None, options).error
    return {"result": error + tol(call.op, _wide(options), 1).result * exact["result"].abs() + FLUSH}


def combine(call: OpCall, options: OpOptions, exact: Effects) -> Bounds:
    """``|shared| + sum |slot|`` over 1 + k, rounded once."""
    slots_TkD = call.tensor("slots_TkD").to(torch.float64)
    terms = call.tensor("shared_TD").to(torch.float64).abs() + slots_TkD.abs().sum(1)
    factors = tol(call.op, options.activation_dtype, slots_TkD.shape[1] + 1)
    return {"result": factors.terms * terms + factors.result * exact["result"].abs() + factors.floor}


def local(call: OpCall, options: OpOptions, exact: Effects) -> Bounds:
    """The three ops one after the other."""
    routing = call.at("routing")
    if not isinstance(routing, Routing):
        raise TypeError("experts.local: no routing")
    recipe = _recipe(call, "shared")
    alone = _feed_forward(call.tensor("x_TD"), recipe["expert"], recipe["limit"], None, options)
    slots = _slots(call, options)
    factors = tol(call.op, options.activation_dtype, routing.experts_Tk.shape[1] + 1)
    error = alone.error + slots.error.sum(1)
    terms = alone.size + slots.size.sum(1) + error
    return {"result": error + factors.terms * terms + factors.result * exact["result"].abs() + FLUSH}


def _slots(call: OpCall, options: OpOptions) -> _Branch:
    x_TD, routing, recipe = call.tensor("x_TD"), call.at("routing"), _recipe(call, "experts")
    if not isinstance(routing, Routing):
        raise TypeError(f"{call.op}: no routing")
    experts: Sequence[StoredExpert] = recipe["experts"]
    shape = (x_TD.shape[0], routing.experts_Tk.shape[1], x_TD.shape[1])
    found = _Branch(torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64))
    for number, expert in enumerate(experts):
        row, slot = (routing.experts_Tk == number).nonzero(as_tuple=True)
        if len(row):
            weight_n1 = routing.weights_Tk[row, slot].to(torch.float64).unsqueeze(1)
            branch = _feed_forward(x_TD[row], expert, recipe["limit"], weight_n1, options)
            found.error[row, slot], found.size[row, slot] = branch.error + FLUSH, branch.size
    return found


def _feed_forward(
    x_nD: torch.Tensor, expert: StoredExpert, limit: float, weight_n1: torch.Tensor | None, options: OpOptions
) -> _Branch:
    """Return error bound and size of one expert's outputs [n, D], before their last rounding."""
    served = options.numerics == "served"
    wide = _wide(options)
    unit, narrow = UNIT_ROUNDOFF[wide], UNIT_ROUNDOFF[options.activation_dtype]
    if served:
        narrow = UNIT_ROUNDOFF[torch.bfloat16]
    x = seen_input(x_nD, expert.w1, served=served)
    w1, w2, w3 = exact_values(expert.w1), exact_values(expert.w2), exact_values(expert.w3)
    gate, up = (x @ w1.T), (x @ w3.T)
    inner = growth(x.shape[1], wide)
    rounding = 2 * narrow if served else narrow
    gate_error = inner * (x.abs() @ w1.abs().T) + rounding * gate.abs()
    up_error = inner * (x.abs() @ w3.abs().T) + rounding * up.abs()
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    opened = torch.nn.functional.silu(gate)
    hidden = opened * up
    error = _STEEPEST_SILU * gate_error * up.abs() + opened.abs() * up_error + 10 * unit * hidden.abs()
    carried = torch.ones_like(hidden[:, :1]) if weight_n1 is None else weight_n1
    if served:
        hidden, error = hidden * carried, error * carried.abs()
        if expert.w2.format in QUANTISED:
            width = hidden.shape[1]
            padded = torch.nn.functional.pad(hidden.abs(), (0, -width % _GROUP))
            largest = torch.unflatten(padded, 1, (-1, _GROUP)).amax(-1).repeat_interleave(_GROUP, 1)[:, :width]
            error = error + _E4M3_STEP * hidden.abs() + _E4M3_SMALLEST_STEP * largest
    else:
        error = error + narrow * hidden.abs()
    out_terms = hidden.abs() @ w2.abs().T
    output = (hidden @ w2.T).abs()
    through = independent(error[:, None, :] * w2.abs()[None], 2)
    # The product's own rounding to the activation dtype, and to bfloat16 a slot in served numerics (both sides).
    total = through + growth(hidden.shape[1], wide) * out_terms + rounding * (output + through)
    return _Branch(total, output) if served else _Branch(total * carried.abs(), output * carried.abs())


def _recipe(call: OpCall, name: str) -> Mapping[str, Any]:
    recipe = call.arguments[name]
    if not isinstance(recipe, Recipe):
        raise TypeError(f"{call.op}: {name!r} is no recipe")
    return recipe.arguments


def _wide(options: OpOptions) -> torch.dtype:
    return torch.float64 if options.activation_dtype == torch.float64 else torch.float32
