"""Bound of sparse attention, from its own slow and plain float64 evaluation, key by key.

An error d_j of score j moves the output by ``p_j (k_j - o) d_j`` (the derivative of the softmax), so a row's bound adds
``p_j |k_j - o|`` times the score's own bound, which is that of a product over C plus the exponential's cost of the
distance to the largest score. The weighted sum of n keys adds the growth of n. In served numerics every probability is
rounded to bfloat16 by driver and yardstick, each at its own scale: two roundings a key, independent of each other.

Legend: T rows, H heads, C head width, n keys of a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from deepinfer.accelerator import OpOptions, StepLayout, WindowCache
from deepinfer.accelerator.ops.attention import LongRange
from deepinfer_conformance.bench import Effects
from deepinfer_conformance.data.call import OpCall
from deepinfer_conformance.tolerance import UNIT_ROUNDOFF, growth, independent, tol


def sparse(call: OpCall, options: OpOptions, exact: Effects) -> Mapping[str, torch.Tensor]:
    """Return the bound [T, H, C]; infinite for padding rows, whose results are free but finite."""
    step = call.at("step")
    if not isinstance(step, StepLayout):
        raise TypeError("attention.sparse: no step")
    result = exact["result"]
    bound = torch.full_like(result, math.inf)
    for row in range(step.rows):
        if bool(step.valid_T[row]):
            bound[row] = _row_bound(call, options, step, row, result[row])
    return {"result": bound}


def keys_of_row(call: OpCall, step: StepLayout, row: int) -> torch.Tensor:
    """Return float64 [n, C]: the window's keys in order of position, then the selected entries."""
    window, long_range = call.at("window"), call.at("long_range")
    if not isinstance(window, WindowCache):
        raise TypeError("attention.sparse: no window")
    request, position = int(step.request_T[row]), int(step.position_T[row])
    cached, slot = int(step.cached_R[request]), int(step.state_slots_R[request])
    first = max(int(step.window_start_R[request]), position - int(call.arguments["window_size"]) + 1, 0)  # type: ignore[call-overload]
    start = int(step.row_starts_R1[request])
    own = call.tensor("own_records_Tb")
    records = [
        own[start + other - cached] if other >= cached else window.bytes_ZRb[slot, other % window.ring]
        for other in range(first, position + 1)
    ]
    keys = [window.format.decode(torch.stack(records))] if records else []
    if isinstance(long_range, LongRange):
        cache = long_range.cache
        entries = long_range.entries_TK[row]
        entries = entries[entries >= 0]
        block = step.block_table_RB[request][entries // cache.entries_per_block]
        keys.append(cache.format.decode(cache.bytes_NEb[block, entries % cache.entries_per_block]))
    if not keys:
        return own.new_zeros((0, window.format.width), dtype=torch.float64)
    return torch.cat(keys).to(torch.float64)


def _row_bound(call: OpCall, options: OpOptions, step: StepLayout, row: int, output_HC: torch.Tensor) -> torch.Tensor:
    query_HC, keys_nC = call.tensor("query_THC")[row], keys_of_row(call, step, row)
    return bound_over_keys(call.op, query_HC, keys_nC, call.tensor("sinks_H"), options, output_HC)


def bound_over_keys(
    op: str,
    query_HC: torch.Tensor,
    keys_nC: torch.Tensor,
    sinks_H: torch.Tensor,
    options: OpOptions,
    output_HC: torch.Tensor,
) -> torch.Tensor:
    """Return the bound [H, C] of one row over its keys, given its exact output."""
    dtype = query_HC.dtype
    query_HC = query_HC.to(torch.float64)
    width, count = query_HC.shape[1], keys_nC.shape[0]
    score_factors = tol(op, dtype, width)
    scale = width**-0.5
    score_Hn = (query_HC @ keys_nC.T) * scale
    sink_H1 = sinks_H.to(torch.float64).unsqueeze(1)
    if count == 0:
        return torch.full_like(output_HC, score_factors.floor)
    terms_Hn = (query_HC.abs() @ keys_nC.abs().T) * scale
    top_H1 = score_Hn.amax(1, keepdim=True)
    weight_Hn = torch.exp(score_Hn - top_H1)
    share_Hn = weight_Hn / (weight_Hn.sum(1, keepdim=True) + torch.exp(sink_H1 - top_H1))
    unit = UNIT_ROUNDOFF[torch.float64 if dtype == torch.float64 else torch.float32]
    distance = (score_Hn - top_H1).abs() + (sink_H1 - top_H1).abs()
    error_Hn = score_factors.terms * terms_Hn + score_factors.elementary + 2 * unit * distance
    moved_HnC = share_Hn[:, :, None] * (keys_nC[None] - output_HC[:, None]).abs() * error_Hn[:, :, None]
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    summed_HC = growth(count + 1, accumulator) * ((share_Hn @ keys_nC.abs()) + output_HC.abs())
    bound: torch.Tensor = moved_HnC.sum(1) + summed_HC + score_factors.result * output_HC.abs() + score_factors.floor
    if options.numerics == "served":
        rounded_HnC = 2 * UNIT_ROUNDOFF[torch.bfloat16] * share_Hn[:, :, None] * keys_nC.abs()[None]
        bound = bound + independent(rounded_HnC, 1)
    return bound
