"""Hyper-connections: how a sublayer reads the residual streams and writes back to them (model.md sections 2 and 3).

Legend: T rows, S streams, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.mixing import Mix, MixWeights
from deepinfer.model.config import ModelConfig
from deepinfer.model.weight_reader import WeightReader


def load_mix(reader: WeightReader, stem: str) -> MixWeights:
    """Load one sublayer's mixing parameters, all in float32."""
    return MixWeights(reader.float32(f"{stem}_fn"), reader.float32(f"{stem}_base"), reader.float32(f"{stem}_scale"))


def mix_of(streams_TSD: Tensor, weights: MixWeights, config: ModelConfig, ops: Ops) -> Mix:
    """Compute the coefficients of one sublayer from the streams as they enter it."""
    return ops.mixing.mixes(streams_TSD, weights, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps)


def spread(embedding_TD: Tensor, streams: int) -> Tensor:
    """Return the streams of a row before the first layer: its embedding in each."""
    return embedding_TD.unsqueeze(1).repeat(1, streams, 1)


def first_stream_only(streams_TSD: Tensor) -> Tensor:
    """Return the collapse weights [T, S] before the first layer: stream 0 alone."""
    weights_TS = _weights(streams_TSD, 0.0)
    weights_TS[:, 0] = 1.0
    return weights_TS


def mean_of_streams(streams_TSD: Tensor, ops: Ops) -> Tensor:
    """Return the mean over the streams [T, D]: the tap that the draft stages read."""
    return ops.mixing.collapse(streams_TSD, _weights(streams_TSD, 1.0 / streams_TSD.shape[1]))


def _weights(streams_TSD: Tensor, value: float) -> Tensor:
    # Coefficients are float32 whatever the activations, except for the float64 yardstick.
    dtype = torch.float64 if streams_TSD.dtype == torch.float64 else torch.float32
    return torch.full(streams_TSD.shape[:2], value, dtype=dtype, device=streams_TSD.device)
