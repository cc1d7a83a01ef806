"""The text model from token ids to logits, written in ops (model.md section 2).

Legend: T rows, B rows that are sampled, V vocabulary, G n-gram length, S streams, D hidden size, A taps times D.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.ops import Ops
from deepinfer.model.attention import attention
from deepinfer.model.block import Residual, block
from deepinfer.model.config import ModelConfig
from deepinfer.model.context import ContextShare, ContextSplit
from deepinfer.model.engram import DEAD, engram, engram_memory, fetched_memories, ngram_tokens
from deepinfer.model.feed_forward import feed_forward, mixture
from deepinfer.model.forward_pass import ForwardPass, LayerCaches
from deepinfer.model.hyper_connections import mean_of_streams
from deepinfer.model.long_range import store_entries
from deepinfer.model.rotary import RotaryTables
from deepinfer.model.truncation import Truncation, first_truncated_layer
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
        hidden_TD: the collapsed streams after the last layer, before the last norm; activation dtype. Of the kept
            rows only, where the pass was truncated.
        taps_TA: the mean streams that entered the tap layers, concatenated in layer order; None unless asked for.
    """

    hidden_TD: Tensor
    taps_TA: Tensor | None


class Transformer:
    """The text model over paged caches. It keeps no state between steps: what it remembers lies in the caches."""

    def __init__(
        self,
        config: ModelConfig,
        weights: TransformerWeights,
        ops: Ops,
        rotary: RotaryTables,
        context: ContextSplit | None = None,
    ) -> None:
        """Bind weights and ops.

        Args:
            config: the model.
            weights: its parameters.
            ops: the plan's ops.
            rotary: tables on the driver's device that cover every position to come.
            context: shares the rows of prompt steps with other ranks; None where this one computes all.
        """
        self.config = config
        self.weights = weights
        self.ops = ops
        self.rotary = rotary
        self._context = context
        self._last_owner = first_truncated_layer(config)

    def forward(
        self,
        ids_T: Tensor,
        tokens_TG: Tensor,
        step: StepLayout,
        caches: LayerCaches,
        embeddings: GivenEmbeddings | None = None,
        *,
        with_taps: bool = False,
        truncation: Truncation | None = None,
        memories: Mapping[int, Tensor] | None = None,
    ) -> Hidden:
        """Run every layer over the rows of one step and write their cache records.

        Args:
            ids_T: int64 [T] token ids, each inside the vocabulary (padding and image rows too).
            tokens_TG: int64 [T, G] mapped ids of the Engram look-back, from :meth:`ngram_tokens`.
            step: the ragged layout; the cache holds positions before ``step.cached_R`` of every request.
            caches: the views on the pools, updated in place.
            embeddings: rows that replace the embedding of their id.
            with_taps: also return what the draft stages read.
            truncation: rows that run the layers behind the last owner; None means all rows run all layers.
            memories: what :meth:`recall` gave for these rows, where their tables must not be read in the pass itself
                (a recorded graph holds no reads of host memory); None means that the layers read them.
        """
        share: ContextShare | None = None
        whole = step
        if self._context is not None and step.kind == "prefill":
            share = self._context.share(step)
            step, ids_T, tokens_TG = share.step, share.own(ids_T), share.own(tokens_TG, DEAD)
            if embeddings is not None:
                embeddings = GivenEmbeddings(share.own(embeddings.rows_TD), share.own(embeddings.mask_T))
        if memories is None and self.weights.tables is not None:
            memories = self.recall(tokens_TG)
        spread = self.weights.spread
        row_key_T = None if spread is None else spread.row_keys(ids_T, step.position_T)
        run = ForwardPass.begin(self.config, self.ops, self.rotary, step, caches, row_key_T)
        if share is not None:
            run = run.shared_out(whole, share)
        alive_T = tokens_TG[:, 0] != DEAD
        residual = Residual.of(self._embed(ids_T, embeddings), self.config)
        taps: list[Tensor] = []
        for layer in self.weights.layers:
            if layer.engram is not None:
                memory_TF = (
                    engram_memory(tokens_TG, layer.engram, self.ops) if memories is None else memories[layer.role.layer]
                )
                remembered_TSD = engram(residual.streams_TSD, memory_TF, alive_T, layer.engram, self.config, self.ops)
                residual = residual._replace(streams_TSD=remembered_TSD)
            if with_taps and layer.role.is_tap:
                taps.append(mean_of_streams(residual.streams_TSD, self.ops))
            if truncation is not None and layer.role.layer == self._last_owner:
                _store_entries(residual, layer, run)
                run = truncation.continue_pass(run, stored_owner=layer.role.layer)
                residual = Residual(truncation.kept(residual.streams_TSD), truncation.kept(residual.pre_TS))
                taps = [truncation.kept(tap_TD) for tap_TD in taps]
            residual = block(
                residual,
                layer,
                partial(attention, weights=layer.attention_block.attention, role=layer.role, run=run),
                partial(feed_forward, weights=layer.feed_forward_block.feed_forward, run=run),
                self.config,
                self.ops,
            )
        hidden_TD = self.ops.mixing.collapse(residual.streams_TSD, residual.pre_TS)
        taps_TA = torch.cat(taps, dim=1) if taps else None
        if share is not None:
            hidden_TD, taps_TA = share.whole(hidden_TD), None if taps_TA is None else share.whole(taps_TA)
        return Hidden(hidden_TD, taps_TA)

    def stand_by(self) -> None:
        """Do what other ranks' rows ask of this one, in a step in which it has no row."""
        nothing = torch.empty(0, dtype=torch.int64, device=self.weights.token_map_V.device)
        if self.weights.tables is not None:
            self.recall(nothing.new_empty((0, self.config.engram_max_ngram_size)))
        spread = self.weights.spread
        if spread is None:
            return
        x_0D, nobody = self._embed(nothing, None), nothing.to(torch.bool)
        key_0 = spread.row_keys(nothing, nothing)
        for layer in self.weights.layers:
            mixture(x_0D, layer.feed_forward_block.feed_forward, nobody, nobody, self.config, self.ops, key_0)

    def end_step(self) -> None:
        """Say that a step of the group has passed the layers: experts may move now, between steps and on all ranks."""
        if self.weights.spread is not None:
            self.weights.spread.end_step()

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """Return float32 [B, V] (float64 with float64 activations) of the rows that are sampled."""
        normed_BD = self.ops.norm.rms(hidden_BD, self.weights.outer.norm_D, self.config.rms_norm_eps)
        return self.ops.linear.dense(normed_BD, self.weights.outer.head)

    def recall(self, tokens_TG: Tensor) -> dict[int, Tensor]:
        """Return what every layer with an n-gram memory reads for these rows, by layer: it depends on ids only.

        Where ranks hold the tables together, all of them call it together, once a step.
        """
        engrams = self.weights.engrams
        if self.weights.tables is not None and engrams:
            return fetched_memories(tokens_TG, engrams, self.weights.tables, self.ops)
        return {layer: engram_memory(tokens_TG, weights, self.ops) for layer, weights in engrams.items()}

    def ngram_tokens(self, ids_T: Tensor, history_RG: Tensor, step: StepLayout) -> Tensor:
        """Return the look-back of every row [T, G] through this model's token map (``engram.ngram_tokens``)."""
        return ngram_tokens(ids_T, history_RG, step, self.weights.token_map_V)

    def _embed(self, ids_T: Tensor, embeddings: GivenEmbeddings | None) -> Tensor:
        embedded_TD = self.ops.linear.embed(ids_T, self.weights.outer.embed_VD)
        if embeddings is None:
            return embedded_TD
        given_TD = embeddings.rows_TD.to(embedded_TD.dtype)
        return torch.where(embeddings.mask_T.unsqueeze(1), given_TD, embedded_TD)


def _store_entries(residual: Residual, layer: LayerWeights, run: ForwardPass) -> None:
    """Store the long-range entries of every row of an owner layer, ahead of its block."""
    weights = layer.attention_block
    if weights.attention.compressor is not None:
        x_TD = run.rms(run.ops.mixing.collapse(residual.streams_TSD, residual.pre_TS), weights.norm_D)
        store_entries(x_TD, weights.attention.compressor, layer.role, run)
