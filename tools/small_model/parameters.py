"""The trainable parameters: checkpoint names to float32 tensors, the routed experts of a layer stacked into one.

Stacked experts stand under ``<layer>.ffn.experts.w1.weight`` [E, I, D] (w3 likewise, w2 [E, D, I]); every other name is
the checkpoint's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from deepinfer.model import ModelConfig
from deepinfer.model.inventory import Parameter, parameters
from deepinfer.model.statistics import random_values

Weights = Mapping[str, Tensor]

_EXPERT = re.compile(r"^(.*\.ffn\.experts)\.(\d+)\.(w[123]\.weight)$")
_STREAM_PREFERENCE = 1.5
_IDENTITY = 3.0
_MIX_SCALE = 0.1


def stacked_name(parameter: Parameter) -> tuple[str, int | None]:
    """Give the name that a checkpoint parameter has here, and its place in the stack of experts."""
    found = _EXPERT.match(parameter.name)
    if found is None:
        return parameter.name, None
    return f"{found[1]}.{found[3]}", int(found[2])


def value_of(parameter: Parameter, weights: Weights) -> Tensor:
    """Give the float32 values of one checkpoint parameter."""
    name, place = stacked_name(parameter)
    held = weights[name].detach()
    return held if place is None else held[place]


def stack(config: ModelConfig, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Turn checkpoint-named float32 values into this module's layout."""
    parts: dict[str, list[Tensor]] = {}
    plain: dict[str, Tensor] = {}
    for parameter in parameters(config, ("text", "draft")):
        name, place = stacked_name(parameter)
        if place is None:
            plain[name] = values[parameter.name].clone()
        else:
            parts.setdefault(name, []).append(values[parameter.name])
    return plain | {name: torch.stack(tensors) for name, tensors in parts.items()}


def random_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Give the weights that ``make_checkpoint`` would write for this seed."""
    values = {parameter.name: random_values(parameter, seed) for parameter in parameters(config, ("text", "draft"))}
    return stack(config, values)


def initial_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Give the weights that training begins with: unit norms, fan-in projections, streams that differ from the start.

    Each sublayer first reads mainly one stream and keeps the streams apart; what it reads and writes is then learned.
    """
    generator = torch.Generator().manual_seed(seed)
    depth = (2 * config.num_hidden_layers) ** -0.5
    values: dict[str, Tensor] = {}
    for number, parameter in enumerate(parameters(config, ("text", "draft"))):
        values[parameter.name] = _initial(parameter, config, number, depth, generator)
    return stack(config, values)


def is_matrix(name: str, weight: Tensor) -> bool:
    """Say whether a weight is a projection, which weight decay holds small; tables, norms and mixes are not."""
    tables = ("embed.weight", "head.weight", "_fn")
    return weight.dim() >= 2 and not name.endswith(tables) and not name.endswith(("q_weight", "k_weight"))


def _initial(
    parameter: Parameter, config: ModelConfig, number: int, depth: float, generator: torch.Generator
) -> Tensor:
    name, shape = parameter.name, parameter.shape
    streams = config.hc_mult
    if name.endswith("_base"):
        base = torch.zeros(shape)
        base[:streams] = -_STREAM_PREFERENCE
        base[number % streams] = _STREAM_PREFERENCE
        base[2 * streams :] = (torch.eye(streams) * _IDENTITY).flatten()
        return base
    if name.endswith("_scale"):
        return torch.full(shape, _MIX_SCALE)
    if name.endswith(("norm.weight", "q_weight", "k_weight")):
        return torch.ones(shape)
    if name.endswith(("attn_sink", ".bias", ".bias_vl", "confidence_head.proj.weight")):
        return torch.zeros(shape)
    spread = float(shape[-1]) ** -0.5
    if name.endswith("embed.weight"):
        spread = 0.02 if ".engram." in name else 0.5
    elif name.endswith(("wo_b.weight", "w2.weight")):
        spread *= depth * 2.0
    elif name == "head.weight" or name.endswith("markov_head.head.weight"):
        spread *= 0.3
    return torch.randn(shape, generator=generator) * spread
