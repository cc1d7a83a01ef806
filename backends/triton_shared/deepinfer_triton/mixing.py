"""Op group ``mixing``: hyper-connection coefficients, collapse, post.

Legend: T rows, S streams, D hidden size.
"""

from __future__ import annotations

from torch import Tensor

from deepinfer.accelerator.ops.mixing import Mix, MixingOps, MixWeights
from deepinfer_triton.arithmetic import TritonGroup
from deepinfer_triton.mixes import mixes
from deepinfer_triton.streams import collapse, post


class TritonMixingOps(TritonGroup, MixingOps):
    """Everything in float32; the product over all streams is cut into sixteen pieces whatever the batch is."""

    def mixes(self, streams_TSD: Tensor, weights: MixWeights, iterations: int, mix_eps: float, norm_eps: float) -> Mix:
        """See :meth:`MixingOps.mixes`."""
        return mixes(streams_TSD, weights, iterations, mix_eps, norm_eps)

    def collapse(self, streams_TSD: Tensor, pre_TS: Tensor) -> Tensor:
        """See :meth:`MixingOps.collapse`."""
        return collapse(streams_TSD, pre_TS)

    def post(self, output_TD: Tensor, streams_TSD: Tensor, mix: Mix) -> Tensor:
        """See :meth:`MixingOps.post`."""
        return post(output_TD, streams_TSD, mix)
