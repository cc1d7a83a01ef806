"""Op group ``experts``, the ops that act on rows alone: router and combine.

Legend: T rows, D hidden size, E experts, k experts per token.
"""

from __future__ import annotations

from torch import Tensor

from deepinfer.accelerator.ops.experts import ExpertOps, RouterWeights, Routing
from deepinfer_triton.arithmetic import TritonGroup
from deepinfer_triton.router import route
from deepinfer_triton.slot_sum import combine


class TritonRoutingOps(TritonGroup, ExpertOps):
    """Router and combine; whoever has kernels for the feed-forward derives from this class and adds them."""

    def route(
        self, x_TD: Tensor, router: RouterWeights, image_T: Tensor, valid_T: Tensor, top_k: int, scale: float
    ) -> Routing:
        """See :meth:`ExpertOps.route`."""
        return route(x_TD, router, image_T, valid_T, top_k, scale)

    def combine(self, shared_TD: Tensor, slots_TkD: Tensor) -> Tensor:
        """See :meth:`ExpertOps.combine`."""
        return combine(shared_TD, slots_TkD, self.arithmetic.activation)
