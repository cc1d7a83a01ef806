"""A seeded simulation of an engine's life, in which every scheduling mistake shows as a wrong token or a lost block.

``python -m deepinfer.sim --seed N --steps N`` replays one life exactly; see :mod:`deepinfer.sim.life`.
"""

from deepinfer.sim.life import LifeReport, live
from deepinfer.sim.scenario import Scenario

__all__ = ["LifeReport", "Scenario", "live"]
