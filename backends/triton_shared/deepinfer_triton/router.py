"""The router: scores of all experts, the best of them in a total order, and their weights.

Legend: T rows, D hidden size, E experts, k experts per token, p pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.accelerator.ops.experts import RouterWeights, Routing
from deepinfer_triton import pieces_product as product
from deepinfer_triton.arithmetic import ACTIVATION_DTYPES, refuse, require_float, require_width
from deepinfer_triton.configuration import Configuration, launch, pointers, power_of_two
from deepinfer_triton.jit import device_function, kernel
from deepinfer_triton.mixes import piece_sum
from deepinfer_triton.number_formats import order_keys
from deepinfer_triton.rows import consecutive
from deepinfer_triton.sizes import ModelSizes

PIECES = 4
_EXCLUDED = tl.constexpr(-(2**31))
_SUM_FLOOR = tl.constexpr(1e-20)


@device_function
def log_one_plus(x: tl.tensor) -> tl.tensor:
    """Return log(1 + x) for 0 <= x <= 1, to a few ulp also where x is tiny; NaN kept.

    ``2 * atanh(t)`` with ``t = x / (2 + x) <= 1/3``; nine terms leave less than 2^-29 of it out.
    """
    t = x / (2.0 + x)
    square = t * t
    series = 1.0 / 17.0
    series = series * square + 1.0 / 15.0
    series = series * square + 1.0 / 13.0
    series = series * square + 1.0 / 11.0
    series = series * square + 1.0 / 9.0
    series = series * square + 1.0 / 7.0
    series = series * square + 1.0 / 5.0
    series = series * square + 1.0 / 3.0
    return 2.0 * t + 2.0 * t * (series * square)


@device_function
def root_of_softplus(x: tl.tensor) -> tl.tensor:
    """Return sqrt(log(1 + exp(x))) without overflow or cancellation; NaN kept."""
    return tl.sqrt(log_one_plus(tl.exp(0.0 - tl.abs(x))) + tl.where(x > 0.0, x, 0.0))


@kernel(unaligned=("bias_ptr", "image_bias_ptr", "image_ptr", "valid_ptr"))
def route_kernel(
    partial_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    image_bias_ptr: tl.tensor,
    image_ptr: tl.tensor,
    valid_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    scale: tl.float32,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
) -> None:
    """One program a row: k times the largest key, the lowest expert among equals."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERT_BLOCK)
    real = expert < EXPERTS
    score = root_of_softplus(piece_sum(partial_ptr + row * PIECES * EXPERTS + expert, real, EXPERTS, PIECES))
    is_image = tl.load(image_ptr + row) != 0
    bias = tl.load(bias_ptr + expert, mask=real, other=0.0)
    image_bias = tl.load(image_bias_ptr + expert, mask=real, other=0.0)
    keys = tl.where(real, order_keys(score + tl.where(is_image, image_bias, bias)), _EXCLUDED)
    place = tl.arange(0, TOP_K_BLOCK)
    chosen = tl.zeros((TOP_K_BLOCK,), tl.int32)
    weights = tl.zeros((TOP_K_BLOCK,), tl.float32)
    total = 0.0
    for number in range(TOP_K):
        best = tl.min(tl.where(keys == tl.max(keys, 0), expert, EXPERT_BLOCK), 0)
        weight = tl.sum(tl.where(expert == best, score, 0.0), 0)
        keys = tl.where(expert == best, _EXCLUDED, keys)
        chosen = tl.where(place == number, best, chosen)
        weights = tl.where(place == number, weight, weights)
        total += weight
    if TOP_K > 1:
        weights = weights / (total + _SUM_FLOOR)
    valid = tl.load(valid_ptr + row) != 0
    inside = place < TOP_K
    tl.store(experts_ptr + row * TOP_K + place, tl.where(valid, chosen, -1).to(tl.int64), mask=inside)
    tl.store(weights_ptr + row * TOP_K + place, tl.where(valid, weights * scale, 0.0), mask=inside)


@cache
def configuration(experts: int, top_k: int, pieces: int) -> Configuration:
    """Return the configuration that chooses among so many experts."""
    floats = torch.float32
    signature = pointers(
        partial_ptr=floats,
        bias_ptr=floats,
        image_bias_ptr=floats,
        image_ptr=torch.uint8,
        valid_ptr=torch.uint8,
        experts_ptr=torch.int64,
        weights_ptr=floats,
    )
    constants = {
        "EXPERTS": experts,
        "EXPERT_BLOCK": power_of_two(experts),
        "TOP_K": top_k,
        "TOP_K_BLOCK": power_of_two(top_k),
        "PIECES": pieces,
    }
    return Configuration(route_kernel, {**signature, "scale": "fp32"}, constants, num_warps=1)


def configurations(sizes: ModelSizes) -> Iterator[Configuration]:
    """Yield what a model's routers use; gates may be stored in either dtype."""
    for experts, top_k in sizes.routers:
        for dtype in ACTIVATION_DTYPES:
            for gate in ACTIVATION_DTYPES:
                chosen = product.configuration(sizes.hidden, experts, PIECES, dtype, gate, squares=False)
                yield chosen
        yield configuration(experts, top_k, int(chosen.constants["PIECES"]))


def route(x_TD: Tensor, router: RouterWeights, image_T: Tensor, valid_T: Tensor, top_k: int, scale: float) -> Routing:
    """See :meth:`deepinfer.accelerator.ops.ExpertOps.route`."""
    require_float("experts.route", "x", x_TD)
    require_float("experts.route", "gate", router.gate_ED)
    require_width("experts.route", "x", x_TD, router.gate_ED.shape[1])
    experts = router.gate_ED.shape[0]
    if not 1 <= top_k <= experts:
        refuse("experts.route", f"top_k is {top_k}; there are {experts} experts")
    rows, device = x_TD.shape[0], x_TD.device
    experts_Tk = torch.empty((rows, top_k), dtype=torch.int64, device=device)
    weights_Tk = torch.empty((rows, top_k), dtype=torch.float32, device=device)
    if rows:
        pieces = product.pieces_product(x_TD, router.gate_ED, PIECES, squares=False)
        launch(
            configuration(experts, top_k, pieces.number),
            (rows,),
            pieces.partial_TpM,
            router.bias_E.to(torch.float32).contiguous(),
            router.image_bias_E.to(torch.float32).contiguous(),
            consecutive(image_T),
            consecutive(valid_T),
            experts_Tk,
            weights_Tk,
            scale,
        )
    return Routing(experts_Tk, weights_Tk)
