"""Lengths of verification that nobody can foresee: what is emitted must not depend on them."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.engine.step_costs import StepCosts
from deepinfer.engine.verify_lengths import VerifyLengths
from deepinfer.sampling.verify_budget import CostCurve
from deepinfer.sim.faults import FailingWorker

_MOST_ROUND = 7


def lots(step: int, rows_R: NDArray[np.int64], epoch_R: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a number for each row of a step that looks like any."""
    names = [f"{step}:{row}:{epoch}" for row, epoch in zip(rows_R, epoch_R, strict=True)]
    return np.array([zlib.crc32(name.encode()) for name in names], dtype=np.int64)


class ErraticLengths(VerifyLengths):
    """Chooses by lot, for each request and step; rounds make none to six drafts, or as many as there may be."""

    def __init__(self) -> None:
        """Begin; the same steps give the same lots."""
        super().__init__(StepCosts(CostCurve((1,), (1.0,))), lambda rows_R, _: np.zeros((len(rows_R), 0)))
        self._steps = 0

    def choose(
        self, rows_R: NDArray[np.int64], epoch_R: NDArray[np.int64], most_R: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return anything from none to one more than there is room for."""
        self._steps += 1
        self.round_drafts = int(lots(self._steps, rows_R[:1], epoch_R[:1]).sum()) // 7 % _MOST_ROUND
        return lots(self._steps, rows_R, epoch_R) % (most_R + 2)


class VaryingWorker(FailingWorker):
    """A worker whose steps verify by lot."""

    def __init__(self, *parts: Any) -> None:
        """Take what every worker takes."""
        super().__init__(*parts)
        self.lengths = ErraticLengths()
