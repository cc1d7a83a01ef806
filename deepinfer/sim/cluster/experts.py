"""The experts of a simulated group: made-up loads, a layout, and plans that come due."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer.parallel.exchange import ExpertPart, plan_exchange
from deepinfer.parallel.loads import LoadWindow, ReplanClock
from deepinfer.parallel.placement import PlacementShape
from deepinfer.parallel.policies import make_policy
from deepinfer.parallel.shares import busiest_over_mean


@dataclass(frozen=True, slots=True)
class ExpertSettings:
    """What the experts of the group are like.

    Attributes:
        policy: who plans.
        skew: exponent of the zipf law that experts are chosen by; the order of experts is drawn per layer.
        layers, experts, top_k: sizes that are simulated; few layers stand for all.
        model_layers: layers that the model has, for the bytes that move.
        redundant: slots asked for beyond one per expert.
        interval_steps: steps between plans.
        window_steps: steps that a plan is made from.
        expert_bytes: weights and scales of one expert.
    """

    policy: str = "balanced"
    skew: float = 0.8
    layers: int = 4
    model_layers: int = 40
    experts: int = 384
    top_k: int = 6
    redundant: int = 32
    interval_steps: int = 200
    window_steps: int = 10
    expert_bytes: int = 18_800_640


class SimulatedExperts:
    """Counts each step's choices, and changes the layout when a plan is due.

    Attributes:
        plans: plans that were made.
        moved_slots: slots that they changed, all layers together.
    """

    def __init__(self, settings: ExpertSettings, ranks: int, seed: int) -> None:
        """Start with the start-up layout and an empty window."""
        self._settings = settings
        self._ranks = ranks
        shape = PlacementShape(settings.layers, settings.experts, ranks, settings.redundant)
        self._layout_LS = shape.start_up_layout()
        self._policy = make_policy(settings.policy)
        self._clock = ReplanClock(settings.interval_steps)
        self._recent: list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]] = []
        self._generator = np.random.Generator(np.random.Philox(key=[seed, ranks]))
        weights_E = np.arange(1, settings.experts + 1) ** -settings.skew
        self._weights_LE = np.stack(
            [weights_E[self._generator.permutation(settings.experts)] for _ in range(settings.layers)]
        )
        self._weights_LE /= self._weights_LE.sum(axis=1)[:, None]
        self.plans = 0
        self.moved_slots = 0

    def route(self, rows: int) -> float:
        """Let the valid rows of one step choose experts; return busiest over mean, all layers together."""
        pairs = rows * self._settings.top_k
        counts_LE = np.stack([self._generator.multinomial(pairs, weights_E) for weights_E in self._weights_LE])
        counts_LE = counts_LE.astype(np.int64)
        self._recent = [*self._recent, counts_LE][-self._settings.window_steps :]
        return float(busiest_over_mean(LoadWindow(counts_LE[None]), self._layout_LS, self._ranks).mean())

    def end_step(self) -> int:
        """End a step; return the bytes that the rank that receives most gets, if a plan was due and moved something."""
        if not self._clock.end_step() or not self._recent:
            return 0
        planned_LS = self._policy.plan(LoadWindow(np.stack(self._recent)), self._layout_LS, self._ranks)
        exchange = plan_exchange(
            self._layout_LS, planned_LS, self._ranks, (ExpertPart("expert", self._settings.expert_bytes),)
        )
        self.plans += 1
        self.moved_slots += len(exchange.moves)
        self._layout_LS, self._recent = planned_LS, []
        received_R = [0] * self._ranks
        for move in exchange.crossing:
            received_R[move.destination // exchange.slots_per_rank] += exchange.slot_bytes
        return max(received_R) * self._settings.model_layers // self._settings.layers
