"""The draft model: from the target's taps to a block of drafts, written in ops (model.md section 9).

Two paths. *Context*: every row that the target has run, accepted or not, leaves one record per stage in the stage's
ring; records of rejected positions are overwritten before anything reads them. *Round*: the newest token and noise
tokens behind it pass the stages as one block, whose rows see the context and each other, and leave nothing behind.

Legend: T rows of a step, R requests, n drafts a request, t = R * n block rows, D hidden size, A taps times D,
V vocabulary, M Markov rank, H heads, C head width, b record bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.drafting import DraftBlock
from deepinfer.accelerator.ops.norm import RotaryTable
from deepinfer.errors import ArgumentError
from deepinfer.model.attention import AttentionWeights, project, query_of, window_records
from deepinfer.model.block import Residual, block
from deepinfer.model.config import ModelConfig
from deepinfer.model.draft_weights import DraftWeights
from deepinfer.model.feed_forward import mixture
from deepinfer.model.forward_pass import LayerCaches
from deepinfer.model.roles import LayerRole
from deepinfer.model.rotary import RotaryTables

Choose = Callable[[int, Tensor], Tensor]
"""Takes a draft's number and its logits [R, V]; returns the chosen ids int64 [R], -1 where there is none.

The logits are float32 (float64 with float64 activations) and the callee's own.
"""

MOST_DRAFTS = 32
"""Longest block that a round may have."""


@dataclass(frozen=True, slots=True)
class DraftRound:
    """What one round leaves.

    Attributes:
        token_ids_Rn: int64 [R, n], the drafts as they were chosen, -1 where there is none.
        confidence_logits_Rn: float32 [R, n] (float64 with float64 activations): the sigmoid of each is the chance
            that the draft is accepted if all earlier ones are.
    """

    token_ids_Rn: Tensor
    confidence_logits_Rn: Tensor


class ContextRows(NamedTuple):
    """Rows that become context, of one step or of several.

    Attributes:
        taps_TA: what entered the tap layers.
        position_T: int64, where each row stands.
        slot_T: int64, its slot in the rings, -1 for a row that leaves nothing.
    """

    taps_TA: Tensor
    position_T: Tensor
    slot_T: Tensor


@dataclass(frozen=True, slots=True)
class _BlockRows:
    """The rows of a round, request by request.

    Attributes:
        block: the requests.
        position_t: int64, where each row is rotated.
        valid_t: bool.
        image_t: bool, all False: a draft is no image.
    """

    block: DraftBlock
    position_t: Tensor
    valid_t: Tensor
    image_t: Tensor


class DraftModel:
    """The draft stages over their rings; like the target it keeps no state between steps."""

    def __init__(self, config: ModelConfig, weights: DraftWeights, ops: Ops, rotary: RotaryTables) -> None:
        """Bind weights and ops, planned with the feature "drafts"; ``rotary`` lies on the driver's device."""
        self.config = config
        self.weights = weights
        self.ops = ops
        self.rotary = rotary

    def store_context(self, taps_TA: Tensor, step: StepLayout, caches: LayerCaches) -> None:
        """Write the context record of every row of a step into every stage's ring.

        Args:
            taps_TA: ``Hidden.taps_TA`` of the step's rows.
            step: the layout of these rows, prefill or decode; of a long chunk only the newest ``ring`` rows are kept.
            caches: views of the draft stages' rings, updated in place.
        """
        self.store_rows(self.context_rows(taps_TA, step), caches)

    def context_rows(self, taps_TA: Tensor, step: StepLayout) -> ContextRows:
        """Return the rows of a step as :meth:`store_rows` takes them, now or later."""
        return ContextRows(taps_TA, step.position_T, self.ops.plumbing.window_slots(step))

    def store_rows(self, rows: ContextRows, caches: LayerCaches) -> None:
        """Write the context records of rows, of which no two may have one slot."""
        ops, heads, eps = self.ops, self.weights.heads, self.config.rms_norm_eps
        main_TD = ops.norm.rms(ops.linear.dense(rows.taps_TA, heads.main_proj), heads.main_norm_D, eps)
        for stage in self.weights.stages:
            window = caches.window(stage.role.layer)
            weights, table = stage.attention_block.attention, self.rotary.of(stage.role.rope)
            records_Tb = window_records(main_TD, weights, table, rows.position_T, window.format, self.config, ops)
            ops.codec.store_window(window, records_Tb, rows.slot_T)

    def round(
        self, anchor_R: Tensor, requests: DraftBlock, drafts: int, caches: LayerCaches, choose: Choose
    ) -> DraftRound:
        """Draft ``drafts`` tokens for each request.

        The block's rows stand at positions ``context .. context + drafts - 1``; draft j is the token at position
        ``context + 1 + j``. Rows behind the last position of the rotary tables are rotated as if they stood there:
        no request gets that far, so their drafts serve nobody.

        Args:
            anchor_R: int64 [R], the newest token of each request, which the target has not run; any id for a padding
                request.
            requests: contexts and state slots.
            drafts: n, 1 to ``MOST_DRAFTS``; it need not be the released block size.
            caches: views of the draft stages' rings; only read.
            choose: draws each draft in turn, since its logits depend on the one before.
        """
        if not 1 <= drafts <= MOST_DRAFTS:
            raise ArgumentError("draft round", [f"drafts: {drafts} is outside 1 .. {MOST_DRAFTS}"])
        hidden_tD = self._stages(anchor_R, requests, drafts, caches)
        ops, heads = self.ops, self.weights.heads
        normed_tD = ops.norm.rms(hidden_tD, heads.norm_D, self.config.rms_norm_eps)
        base_tV = ops.linear.dense(normed_tD, self.weights.outer.head)
        base_RnV = torch.unflatten(base_tV, 0, (anchor_R.shape[0], drafts))
        before_R = anchor_R
        chosen: list[Tensor] = []
        markov: list[Tensor] = []
        for draft in range(drafts):
            # A place without a draft is nobody's index: what stands behind it is never verified.
            markov_RM = ops.linear.embed(before_R.clamp(min=0), heads.markov_embed_VM)
            before_R = choose(draft, base_RnV[:, draft] + ops.linear.dense(markov_RM, heads.markov_head))
            chosen.append(before_R)
            markov.append(markov_RM)
        seen_tN = torch.cat((hidden_tD, torch.stack(markov, 1).flatten(0, 1)), 1)
        confidence_t = ops.linear.dense(seen_tN, heads.confidence)[:, 0]
        return DraftRound(torch.stack(chosen, 1), confidence_t.view(anchor_R.shape[0], drafts))

    def _stages(self, anchor_R: Tensor, requests: DraftBlock, drafts: int, caches: LayerCaches) -> Tensor:
        """Return the collapsed streams [t, D] behind the last stage."""
        config, ops = self.config, self.ops
        ids_Rn = anchor_R.clamp(min=0).unsqueeze(1).repeat(1, drafts)
        ids_Rn[:, 1:] = config.dspark_noise_token_id
        position_Rn = requests.context_R.unsqueeze(1) + torch.arange(drafts, device=anchor_R.device)
        valid_t = requests.valid_R.repeat_interleave(drafts)
        last = self.rotary.plain.cos_PR.shape[0] - 1
        rows = _BlockRows(requests, position_Rn.flatten().clamp(max=last), valid_t, torch.zeros_like(valid_t))
        residual = Residual.of(ops.linear.embed(ids_Rn.flatten(), self.weights.outer.embed_VD), config)
        for stage in self.weights.stages:
            attention = partial(
                self._attention, weights=stage.attention_block.attention, role=stage.role, rows=rows, caches=caches
            )
            experts = partial(
                mixture,
                weights=stage.feed_forward_block.feed_forward,
                image_T=rows.image_t,
                valid_T=rows.valid_t,
                config=config,
                ops=ops,
            )
            residual = block(residual, stage, attention, experts, config, ops)
        return ops.mixing.collapse(residual.streams_TSD, residual.pre_TS)

    def _attention(
        self, x_tD: Tensor, weights: AttentionWeights, role: LayerRole, rows: _BlockRows, caches: LayerCaches
    ) -> Tensor:
        config, ops = self.config, self.ops
        table: RotaryTable = self.rotary.of(role.rope)
        requests = rows.block.context_R.shape[0]
        blocked = (requests, x_tD.shape[0] // max(requests, 1))
        window = caches.window(role.layer)
        qr_tL = ops.norm.rms(ops.linear.dense(x_tD, weights.wq_a), weights.q_norm_L, config.rms_norm_eps)
        query_tHC = query_of(qr_tL, weights, table, rows.position_t, config, ops)
        records_tb = window_records(x_tD, weights, table, rows.position_t, window.format, config, ops)
        output_RnHC = ops.drafting.attend(
            torch.unflatten(query_tHC, 0, blocked),
            torch.unflatten(records_tb, 0, blocked),
            window,
            weights.sinks_H,
            config.sliding_window,
            rows.block,
        )
        return project(output_RnHC.flatten(0, 1), weights, table, rows.position_t, config, ops)
