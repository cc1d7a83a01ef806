"""What the layers ask of a prompt step whose rows several ranks compute (model.md section 20).

Legend: T rows of the whole step, K rows of this rank.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import WindowCache
from deepinfer.accelerator.ops import Ops


class ContextShare(Protocol):
    """This rank's share of one prompt step."""

    @property
    def step(self) -> StepLayout:
        """The layout of this rank's rows."""

    def own(self, values_T: Tensor, padding: float = 0) -> Tensor:
        """Return this rank's rows of a tensor; rows of padding hold ``padding``."""

    def whole(self, values_K: Tensor) -> Tensor:
        """Return the rows of all ranks in the order of the whole step; all ranks call it together."""

    def window_before(self, window: WindowCache, records_Tb: Tensor, ops: Ops) -> WindowCache:
        """Return rings that hold what lies before this rank's rows, from records of the whole step."""


class ContextSplit(Protocol):
    """Splits prompt steps among ranks that have the same requests."""

    def share(self, step: StepLayout) -> ContextShare:
        """Return this rank's share of a prompt step."""
