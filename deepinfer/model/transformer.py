"""The text model from token ids to logits, written in ops (model.md section 2).

Legend: T rows, B rows that are sampled, V vocabulary, G n-gram length, S streams, D hidden size, A taps times D.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.ops import Ops
from deepinfer.model.attention import attention
from deepinfer.model.config import ModelConfig
from deepinfer.model.engram import DEAD, engram, engram_rows, ngram_tokens
from deepinfer.model.feed_forward import feed_forward
from deepinfer.model.forward_pass import ForwardPass, LayerCaches
from deepinfer.model.hyper_connections import first_stream_only, mean_of_streams, mix_of, spread
from deepinfer.model.rotary import RotaryTables
from deepinfer.model.weights import LayerWeights, TransformerWeights


@dataclass(frozen=True, slots=True)
class GivenEmbeddings:
    """Embeddings from outside, for image rows.

    Attributes:
        rows_TD: embeddings, read where the mask is set.
        mask_T: bool, True where a row is given.
    """

    rows_TD: Tensor
    mask_T: Tensor


@dataclass(frozen=True, slots=True)
class Hidden:
    """What a forward pass leaves.

    Attributes:
        hidden_TD: the collapsed streams after the last layer, before the last norm; activation dtype.
        taps_TA: the mean streams that entered the tap layers, concatenated in layer order; None unless asked for.
    """

    hidden_TD: Tensor
    taps_TA: Tensor | None


class _Residual(NamedTuple):
    """The streams [T, S, D] and the weights [T, S] with which the next collapse reads them."""

    streams_TSD: Tensor
    pre_TS: Tensor


class Transformer:
    """The text model over paged caches. It keeps no state between steps: what it remembers lies in the caches."""

    def __init__(self, config: ModelConfig, weights: TransformerWeights, ops: Ops, rotary: RotaryTables) -> None:
        """Bind weights and ops; ``rotary`` lies on the driver's device and covers every position to come."""
        self.config = config
        self.weights = weights
        self.ops = ops
        self.rotary = rotary

    def forward(
        self,
        ids_T: Tensor,
        tokens_TG: Tensor,
        step: StepLayout,
        caches: LayerCaches,
        embeddings: GivenEmbeddings | None = None,
        *,
        with_taps: bool = False,
    ) -> Hidden:
        """Run every layer over the rows of one step and write their cache records.

        Args:
            ids_T: int64 [T] token ids, each inside the vocabulary (padding and image rows too).
            tokens_TG: int64 [T, G] mapped ids of the Engram look-back, from :meth:`ngram_tokens`.
            step: the ragged layout; the cache holds positions before ``step.cached_R`` of every request.
            caches: the views on the pools, updated in place.
            embeddings: rows that replace the embedding of their id.
            with_taps: also return what the draft stages read.
        """
        run = ForwardPass.begin(self.config, self.ops, self.rotary, step, caches)
        alive_T = tokens_TG[:, 0] != DEAD
        # The hash needs ids only: all tables' rows are known before the first layer runs.
        rows = {
            layer.role.layer: engram_rows(tokens_TG, layer.engram, self.ops)
            for layer in self.weights.layers
            if layer.engram is not None
        }
        streams_TSD = spread(self._embed(ids_T, embeddings), self.config.hc_mult)
        residual = _Residual(streams_TSD, first_stream_only(streams_TSD))
        taps: list[Tensor] = []
        for layer in self.weights.layers:
            if layer.engram is not None:
                remembered_TSD = engram(
                    residual.streams_TSD, rows[layer.role.layer], alive_T, layer.engram, self.config, self.ops
                )
                residual = residual._replace(streams_TSD=remembered_TSD)
            if with_taps and layer.role.is_tap:
                taps.append(mean_of_streams(residual.streams_TSD, self.ops))
            residual = _block(residual, layer, run)
        hidden_TD = self.ops.mixing.collapse(residual.streams_TSD, residual.pre_TS)
        return Hidden(hidden_TD, torch.cat(taps, dim=1) if taps else None)

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """Return float32 [B, V] (float64 with float64 activations) of the rows that are sampled."""
        normed_BD = self.ops.norm.rms(hidden_BD, self.weights.outer.norm_D, self.config.rms_norm_eps)
        return self.ops.linear.dense(normed_BD, self.weights.outer.head)

    def ngram_tokens(self, ids_T: Tensor, history_RG: Tensor, step: StepLayout) -> Tensor:
        """Return the look-back of every row [T, G] through this model's token map (``engram.ngram_tokens``)."""
        return ngram_tokens(ids_T, history_RG, step, self.weights.token_map_V)

    def _embed(self, ids_T: Tensor, embeddings: GivenEmbeddings | None) -> Tensor:
        embedded_TD = self.ops.linear.embed(ids_T, self.weights.outer.embed_VD)
        if embeddings is None:
            return embedded_TD
        given_TD = embeddings.rows_TD.to(embedded_TD.dtype)
        return torch.where(embeddings.mask_T.unsqueeze(1), given_TD, embedded_TD)


def _block(residual: _Residual, layer: LayerWeights, run: ForwardPass) -> _Residual:
    """Run one layer: attention, then experts, each between a collapse and a post of the streams.

    The weights of a collapse are one sublayer late: attention reads the streams with the weights of the previous
    layer's feed-forward, the feed-forward with those of this layer's attention.
    """
    mixing, config = run.ops.mixing, run.config
    streams_TSD, pre_TS = residual

    mix = mix_of(streams_TSD, layer.attention_block.mix, config, run.ops)
    x_TD = run.rms(mixing.collapse(streams_TSD, pre_TS), layer.attention_block.norm_D)
    output_TD = attention(x_TD, layer.attention_block.attention, layer.role, run)
    streams_TSD, pre_TS = mixing.post(output_TD, streams_TSD, mix), mix.pre_TS

    mix = mix_of(streams_TSD, layer.feed_forward_block.mix, config, run.ops)
    x_TD = run.rms(mixing.collapse(streams_TSD, pre_TS), layer.feed_forward_block.norm_D)
    output_TD = feed_forward(x_TD, layer.feed_forward_block.feed_forward, run)
    return _Residual(mixing.post(output_TD, streams_TSD, mix), mix.pre_TS)
