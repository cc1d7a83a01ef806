"""The experts of an engine that is one of several, as its options ask for them: spread, copied, and moved."""

from __future__ import annotations

import torch

from deepinfer.engine.options import EngineOptions
from deepinfer.model.config import ModelConfig
from deepinfer.parallel.placement import PlacementShape
from deepinfer.parallel.policies import make_policy
from deepinfer.parallel.ranks.experts import SpreadExperts
from deepinfer.parallel.ranks.groups import RankGroups
from deepinfer.parallel.ranks.moving import MovingExperts


def spread_experts(
    config: ModelConfig, options: EngineOptions, ranks: RankGroups | None, device: torch.device
) -> SpreadExperts | None:
    """Return the experts of an expert group; None where every rank holds all of them.

    Args:
        config: the model.
        options: the engine's, which the environment has completed.
        ranks: this rank's groups; None for an engine alone.
        device: where the group's exchanges take place.
    """
    if ranks is None or ranks.experts is None:
        return None
    redundant = options.redundant_experts or 0
    shape = PlacementShape(config.num_hidden_layers, config.n_routed_experts, ranks.experts.world_size, redundant)
    policy, interval = options.expert_balancing, options.expert_balancing_interval
    window = options.expert_balancing_window
    if policy in (None, "off") or interval is None or window is None:
        return SpreadExperts(ranks.experts, shape, device)
    return MovingExperts(
        ranks.experts, shape, device, make_policy(policy), interval_steps=interval, window_steps=window
    )
