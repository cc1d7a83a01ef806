"""Mixture of experts, batched and differentiable: rows sorted by expert, one slice a matrix product.

Legend: N rows, D hidden size, E experts, k experts per row, I intermediate size, n rows of one expert.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.model import ModelConfig

from .parameters import Weights

_WEIGHT_SUM_FLOOR = 1e-20


def mixture(x_ND: Tensor, weights: Weights, stem: str, config: ModelConfig, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the sublayer's output [N, D] and how many rows each expert served [E]."""
    score_NE = F.softplus(x_ND @ weights[f"{stem}.gate.weight"].T).sqrt()
    with torch.no_grad():
        biased_NE = score_NE + weights[f"{stem}.gate.bias"]
        choice_Nk = biased_NE.topk(top_k, dim=1).indices
    weight_Nk = score_NE.gather(1, choice_Nk)
    if top_k > 1:
        weight_Nk = weight_Nk / (weight_Nk.sum(1, keepdim=True) + _WEIGHT_SUM_FLOOR)
    weight_Nk = weight_Nk * config.routed_scaling_factor

    choice_n = choice_Nk.flatten()
    order_n = choice_n.argsort(stable=True)
    counts_E = torch.bincount(choice_n, minlength=score_NE.shape[1])
    sorted_nD = x_ND.index_select(0, order_n // top_k)
    gate_up = torch.cat((weights[f"{stem}.experts.w1.weight"], weights[f"{stem}.experts.w3.weight"]), 1)
    down = weights[f"{stem}.experts.w2.weight"]
    outputs = [
        _feed_forward(part_nD, gate_up[expert], down[expert], config.swiglu_limit)
        for expert, part_nD in enumerate(torch.split(sorted_nD, counts_E.tolist()))
    ]
    place_n = torch.empty_like(order_n).index_copy_(0, order_n, torch.arange(order_n.shape[0]))
    slots_NkD = torch.cat(outputs).index_select(0, place_n).view(-1, top_k, x_ND.shape[1])
    routed_ND = torch.bmm(weight_Nk.unsqueeze(1), slots_NkD).squeeze(1)

    shared_gate_up = torch.cat(
        (weights[f"{stem}.shared_experts.w1.weight"], weights[f"{stem}.shared_experts.w3.weight"])
    )
    shared_ND = _feed_forward(x_ND, shared_gate_up, weights[f"{stem}.shared_experts.w2.weight"], config.swiglu_limit)
    return shared_ND + routed_ND, counts_E


def balance(bias_E: Tensor, counts_E: Tensor, rate: float) -> None:
    """Move the bias of each expert by ``rate`` towards an even load; only the choice depends on it."""
    share_E = counts_E / counts_E.sum().clamp(min=1)
    bias_E.data.add_(torch.sign(1.0 / share_E.numel() - share_E), alpha=rate)


def _feed_forward(x_nD: Tensor, gate_up: Tensor, down: Tensor, limit: float) -> Tensor:
    gate_nI, up_nI = (x_nD @ gate_up.T).chunk(2, 1)
    return (F.silu(gate_nI.clamp(max=limit)) * up_nI.clamp(-limit, limit)) @ down.T
