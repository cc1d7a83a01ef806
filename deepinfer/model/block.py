"""One layer over the residual streams: two sublayers, each between a collapse and a post (model.md section 2).

Legend: T rows, S streams, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from deepinfer.accelerator.ops import Ops
from deepinfer.model.config import ModelConfig
from deepinfer.model.hyper_connections import first_stream_only, mix_of, spread
from deepinfer.model.weights import AttentionBlock, FeedForwardBlock, LayerWeights

Sublayer = Callable[[Tensor], Tensor]
"""From the normalised rows [T, D] to the output [T, D]."""


class Residual(NamedTuple):
    """The streams [T, S, D] and the weights [T, S] with which the next collapse reads them."""

    streams_TSD: Tensor
    pre_TS: Tensor

    @classmethod
    def of(cls, embedding_TD: Tensor, config: ModelConfig) -> Residual:
        """Return what enters the first layer."""
        streams_TSD = spread(embedding_TD, config.hc_mult)
        return cls(streams_TSD, first_stream_only(streams_TSD))


def block(
    residual: Residual,
    layer: LayerWeights,
    attention: Sublayer,
    feed_forward: Sublayer,
    config: ModelConfig,
    ops: Ops,
) -> Residual:
    """Run one layer: attention, then experts.

    The weights of a collapse are one sublayer late: attention reads the streams with the weights of the previous
    layer's feed-forward, the feed-forward with those of this layer's attention.
    """
    residual = _half(residual, layer.attention_block, attention, config, ops)
    return _half(residual, layer.feed_forward_block, feed_forward, config, ops)


def _half(
    residual: Residual, half: AttentionBlock | FeedForwardBlock, sublayer: Sublayer, config: ModelConfig, ops: Ops
) -> Residual:
    streams_TSD, pre_TS = residual
    mix = mix_of(streams_TSD, half.mix, config, ops)
    x_TD = ops.norm.rms(ops.mixing.collapse(streams_TSD, pre_TS), half.norm_D, config.rms_norm_eps)
    return Residual(ops.mixing.post(sublayer(x_TD), streams_TSD, mix), mix.pre_TS)
