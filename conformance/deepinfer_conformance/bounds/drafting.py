"""Bounds of drafting: attention as :mod:`deepinfer_conformance.bounds.attention`; kept weights as any weight.

Legend: R requests, n drafts, H heads, C width, k keys of a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from deepinfer.accelerator import OpOptions, WindowCache
from deepinfer.accelerator.ops.drafting import DraftBlock
from deepinfer_conformance.bench import Effects
from deepinfer_conformance.bounds.attention import bound_over_keys
from deepinfer_conformance.data.call import OpCall


def attend(call: OpCall, options: OpOptions, exact: Effects) -> Mapping[str, torch.Tensor]:
    """Return the bound [R, n, H, C]; infinite for padding requests, whose results are free but finite."""
    block, window = call.at("block"), call.at("window")
    if not isinstance(block, DraftBlock) or not isinstance(window, WindowCache):
        raise TypeError("drafting.attend: no block or no window")
    result = exact["result"]
    bound = torch.full_like(result, math.inf)
    query_RnHC, sinks_H = call.tensor("query_RnHC"), call.tensor("sinks_H")
    for request in range(result.shape[0]):
        if bool(block.valid_R[request]):
            keys_kC = keys_of_request(call, block, window, request)
            for draft in range(result.shape[1]):
                query_HC, output_HC = query_RnHC[request, draft], result[request, draft]
                bound[request, draft] = bound_over_keys(call.op, query_HC, keys_kC, sinks_H, options, output_HC)
    return {"result": bound}


def keys_of_request(call: OpCall, block: DraftBlock, window: WindowCache, request: int) -> torch.Tensor:
    """Return float64 [k, C]: the context's keys in order of position, then the block's."""
    context, slot = int(block.context_R[request]), int(block.state_slots_R[request])
    size = int(call.arguments["window_size"])  # type: ignore[call-overload]
    first = max(int(block.window_start_R[request]), context - size, 0)
    ring = [window.bytes_ZRb[slot, position % window.ring] for position in range(first, context)]
    records = torch.stack([*ring, *call.tensor("block_records_Rnb")[request]])
    return window.format.decode(records).to(torch.float64)


def propose(call: OpCall, options: OpOptions, exact: Effects) -> Mapping[str, torch.Tensor]:
    """One unit a weight, and a row's number of weights for its sum; tokens, ids and statuses are exact."""
    del call, options
    has_weight = exact["result.weights_BK"] > 0
    return {
        "result.weights_BK": has_weight.to(torch.float64),
        "result.sums_B": has_weight.sum(-1).to(torch.float64),
    }
