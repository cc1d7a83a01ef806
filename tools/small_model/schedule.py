"""When what is trained: the plan from steps to progress, and from progress to lengths, rates and formats.

Progress runs from 0 to 1. How many steps that takes is planned from the measured speed and planned again at every
save; the plan is stored, so that a run can be repeated step by step (``--plan``) on a machine of any speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .batches import Recipe
from .codecs import Codecs
from .run import Options

QUANTISED_FROM = 0.82
"""Progress from which the served formats are simulated."""

_WARM_UP = 0.02
_LOWEST = 0.03
_BALANCE_RATE = 2e-3


@dataclass(frozen=True, slots=True)
class Stage:
    """The recipes that steps take in turn up to some progress."""

    until: float
    recipes: tuple[Recipe, ...]


_SHORT, _MIDDLE, _LONG, _LONGER = Recipe(16, 128), Recipe(8, 256), Recipe(4, 512), Recipe(2, 1024)
_LONGEST = Recipe(1, 1792)
_DRILL, _LONG_DRILL = Recipe(16, 128, recall_share=0.95), Recipe(8, 256, recall_share=0.9)
STAGES = (
    Stage(0.25, (_DRILL, _SHORT)),
    Stage(0.40, (_LONG_DRILL, _SHORT)),
    Stage(0.55, (_LONG, _LONG_DRILL, _SHORT)),
    Stage(0.70, (_LONGER, _MIDDLE, _LONG, _SHORT)),
    Stage(1.01, (_LONGEST, _MIDDLE, _LONGER, _SHORT, _LONG, _MIDDLE)),
)
ATTEND_ALL_UP_TO = 256
"""Sequences up to this length attend to every entry until ``PICKS_FROM``: the indexer learns from all of them."""
PICKS_FROM = 0.60
EXPLORE = 8
_COACHED_UNTIL, _ALONE_FROM = 0.50, 0.80


@dataclass
class Plan:
    """Piecewise linear progress: from ``step`` at progress ``done``, ``total`` steps reach 1.

    Attributes:
        knots: (step, done, total) in order.
    """

    knots: list[tuple[int, float, int]] = field(default_factory=list)

    def progress(self, step: int) -> float:
        """Give the progress before a step."""
        first, done, total = max((knot for knot in self.knots if knot[0] <= step), key=lambda knot: knot[0])
        return min(1.0, done + (1.0 - done) * (step - first) / max(total - first, 1))

    def again(self, step: int, seconds_left: float, seconds_per_step: float) -> None:
        """Plan the rest anew: the steps that fit into the time that is left."""
        done = self.progress(step) if self.knots else 0.0
        total = step + max(1, int(seconds_left / seconds_per_step))
        self.knots = [*(knot for knot in self.knots if knot[0] < step), (step, done, total)]


def recipe_at(progress: float, step: int) -> Recipe:
    """Give what the batch of a step holds."""
    stage = next(stage for stage in STAGES if progress < stage.until)
    return stage.recipes[step % len(stage.recipes)]


def options_at(progress: float, recipe: Recipe) -> Options:
    """Give how a step's forward pass is run."""
    quantised = progress >= QUANTISED_FROM
    everything = recipe.length <= ATTEND_ALL_UP_TO and progress < PICKS_FROM
    return Options(
        codecs=Codecs(records=quantised, weights=quantised),
        attend_all=everything,
        explore=0 if everything or quantised else EXPLORE,
        index_loss=True,
        coaching=coaching_at(progress),
    )


def rate_at(progress: float, peak: float) -> float:
    """Give the learning rate: a linear rise, then a cosine."""
    if progress < _WARM_UP:
        return peak * max(progress / _WARM_UP, 0.01)
    fallen = (progress - _WARM_UP) / (1.0 - _WARM_UP)
    return peak * (_LOWEST + (1.0 - _LOWEST) * 0.5 * (1.0 + math.cos(math.pi * fallen)))


def coaching_at(progress: float) -> float:
    """Give the weight of the training aids."""
    return min(1.0, max(0.0, (_ALONE_FROM - progress) / (_ALONE_FROM - _COACHED_UNTIL)))


def balance_rate_at(progress: float) -> float:
    """Give how far a router's biases move in a step."""
    return _BALANCE_RATE * (1.0 - progress)
