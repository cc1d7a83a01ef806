"""The worker: one scheduled step on the device, from pending copies to sampled tokens.

Legend: T rows, R requests, D hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from deepinfer.accelerator import AcceleratorDriver, Ops
from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.upload import on_device
from deepinfer.cache.pools import CachePools
from deepinfer.engine.continuation import Continuation
from deepinfer.engine.draft_tally import ChanceRange, DraftTally
from deepinfer.engine.graphs.decode_steps import DecodeInputs, DecodeSteps
from deepinfer.engine.handing_out import HandedOut, hand_out, with_drafts
from deepinfer.engine.options import EngineOptions
from deepinfer.engine.readback import JudgedDrafts, Readback, Results, ToHost, on_host
from deepinfer.engine.speculation import Speculation
from deepinfer.engine.step_costs import Clock, is_time
from deepinfer.engine.step_inputs import StepInputs, build_step_inputs
from deepinfer.engine.verify_lengths import VerifyLengths
from deepinfer.errors import InvariantError
from deepinfer.model.transformer import GivenEmbeddings, Hidden, Transformer
from deepinfer.model.truncation import Truncation, TruncationMode, truncate
from deepinfer.model.weights import TransformerWeights
from deepinfer.parallel.ranks.experts import SpreadExperts
from deepinfer.parallel.ranks.reports import BalanceReport
from deepinfer.sampling.draft_pool import Drafts
from deepinfer.sampling.prompt import ROWS_PER_PIECE, PromptLogProbabilities
from deepinfer.sampling.rows import RowRequest, build_sampling_step
from deepinfer.sampling.sampler import SampledStep, Sampler
from deepinfer.sampling.verification import RunRequest, VerifiedRun, VerifiedStep
from deepinfer.scheduling.step import CopyPair, ScheduledStep


@dataclass(slots=True)
class LogitsRequest:
    """Where the logits of every prompt position of one request are collected.

    Attributes:
        rows: float32 [positions so far, V] pieces, in order of positions.
        collected: positions collected so far; a position that is computed again is not collected twice.
    """

    rows: list[torch.Tensor]
    collected: int = 0


@dataclass(frozen=True, slots=True)
class RowExtras:
    """What one request of a step wants beyond a token; all None for most.

    Attributes:
        embeddings_PD: embeddings of its prompt positions [P, D], read at image positions.
        prompt_log_probabilities: the list that its prompt rows fill.
        logits: the collection that its prompt rows fill.
    """

    embeddings_PD: torch.Tensor | None = None
    prompt_log_probabilities: PromptLogProbabilities | None = None
    logits: LogitsRequest | None = None


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A step that has passed the layers, and waits to be sampled.

    Attributes:
        inputs: what it ran.
        hidden: what it left.
        last_row_R: int64 [R], the row of each request that is sampled.
        drafts: what its rows verify; None without drafts.
    """

    inputs: StepInputs
    hidden: Hidden
    last_row_R: torch.Tensor
    drafts: Drafts | None


class _Begun(NamedTuple):
    """A step that waits to be sampled, and the logits of its rows."""

    forwarded: Forwarded
    logits_BV: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Which rows of a prompt run the layers behind the last owner.

    Attributes:
        mode: "off" for all of them.
        keep_tokens: how many last rows are kept otherwise.
    """

    mode: TruncationMode = "off"
    keep_tokens: int = 0

    @classmethod
    def of(cls, options: EngineOptions) -> PrefillRows:
        """Read them from options that the environment has completed."""
        return cls(options.truncated_prefill or "off", options.truncated_prefill_keep_tokens or 0)

    def truncation(self, step: ScheduledStep, layout: StepLayout) -> Truncation | None:
        """Return what is left out of a step; None for a decode step and where nothing is."""
        if self.mode == "off" or step.kind != "prefill":
            return None
        # The root's prompt, for a request that is computed anew after a preemption or a fork: the same rows again.
        starts = [max(0, sequence.root_prompt_tokens - self.keep_tokens) for sequence in step.sequences]
        return truncate(layout, starts, self.mode)


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """What a worker has counted; see :class:`deepinfer.engine.outputs.EngineStats`."""

    replayed_steps: int = 0
    verified_by_place: tuple[int, ...] = ()
    accepted_by_place: tuple[int, ...] = ()
    confidence_error: float = 0.0
    chance_ranges: tuple[ChanceRange, ...] = ()


class Worker:
    """Runs steps on one device. It keeps nothing about requests: what it remembers lies in the pools.

    Attributes:
        pools: the caches.
        speculation: the drafts; None for an engine without.
        decode_steps: the forward pass of decode steps, call by call or from recorded graphs.
        tally: what became of drafts.
        lengths: how many drafts are verified, where each step chooses; its costs learn from every decode step.
    """

    lengths: VerifyLengths | None = None

    def __init__(
        self,
        transformer: Transformer,
        pools: CachePools,
        driver: AcceleratorDriver,
        ops: Ops,
        prefill: PrefillRows | None = None,
        speculation: Speculation | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.pools = pools
        self.speculation = speculation
        self._prefill = prefill if prefill is not None else PrefillRows()
        self._transformer = transformer
        self._driver = driver
        self._ops = ops
        self._clock = clock
        self._sampler = Sampler(ops.sampling)
        self._continuation: Continuation | None = None
        self.tally = DraftTally(0 if speculation is None else speculation.drafts)
        with_taps = speculation is not None and speculation.needs_taps
        self.decode_steps = DecodeSteps(transformer, pools, driver, with_taps=with_taps)

    @property
    def device(self) -> torch.device:
        """Where the step runs."""
        return self._driver.device

    @property
    def weights(self) -> TransformerWeights:
        """The model's parameters, as the driver's ops take them."""
        return self._transformer.weights

    @property
    def balance(self) -> BalanceReport | None:
        """What balancing has done with the experts; None where they stay where they are."""
        spread = self.weights.spread
        return spread.report() if isinstance(spread, SpreadExperts) else None

    def copy(self, step: ScheduledStep) -> None:
        """Execute the pending copies of forks; they come before anything of this step touches the caches."""
        if step.slot_copies and self.speculation is not None:
            self.speculation.settle_context(self.pools)
        self._copy(self.pools.block_bytes_Nb, step.block_copies)
        self._copy(self.pools.slot_bytes_Zb, step.slot_copies)

    def drafts(self, step: ScheduledStep) -> list[list[int]]:
        """Return the drafts that each request of a step verifies; fewer than its rows where there are not as many."""
        return [[] for _ in step.sequences] if self.speculation is None else self.speculation.token_ids(step)

    def forget(self) -> None:
        """Drop what is remembered beside the pools: the scheduler's books begin anew."""
        if self.speculation is not None:
            self.speculation.forget()

    def counts(self) -> WorkerCounts:
        """Return what was counted so far."""
        return WorkerCounts(
            replayed_steps=self.decode_steps.replays,
            verified_by_place=tuple(self.tally.verified_n.tolist()),
            accepted_by_place=tuple(self.tally.accepted_n.tolist()),
            confidence_error=self.tally.confidence_error,
            chance_ranges=self.tally.chance_ranges,
        )

    def trial_run(self, inputs: DecodeInputs) -> None:
        """Run what a cost curve measures, the pass and the logits of all its rows, and wait for its end."""
        with torch.inference_mode():
            self._project(self.decode_steps.run_prepared(inputs).hidden_TD)
        self._driver.synchronize()

    def run(
        self, step: ScheduledStep, requests: Sequence[RunRequest], extras: Sequence[RowExtras]
    ) -> list[VerifiedRun]:
        """Run a step with at least one request and return what each request emits.

        Args:
            step: what the scheduler decided; its copies have been executed.
            requests: the sampling of each request, in the order of the step; with as many drafts as it has rows beside
                the first in a decode step.
            extras: what each request wants beyond tokens.
        """
        with torch.inference_mode():
            begun_s = self._clock()
            forwarded = self._forward(step, extras, self._inputs(step))
            logits_BV = self._logits(step, forwarded)
            projected_s = self._mark(step)
            runs = Readback(*self._sample(logits_BV, forwarded, step, requests, extras)).runs()
            self.learn(step, projected_s - begun_s, self._clock() - projected_s)
            return runs

    def learn(self, step: ScheduledStep, step_s: float, sampler_s: float) -> None:
        """Remember what a decode step took, the pass with its logits, and what is behind them; no time is no news."""
        is_told = is_time(step_s) and is_time(sampler_s)
        if self.lengths is not None and step.kind == "decode" and is_told:
            self.lengths.costs.note(self.decode_steps.rows_run(step.num_tokens), step_s, sampler_s)
            self.lengths.note_round(step.num_requests, step.round_drafts, sampler_s)

    def plan_round(self, step: ScheduledStep) -> None:
        """Fix how many drafts the round behind a step makes; called on the host, before the step is sampled."""
        if self.lengths is not None:
            step.round_drafts = self.lengths.round_drafts

    def hands_out(self, step: ScheduledStep) -> bool:
        """Whether the device decides how many drafts each request of a step verifies: lengths vary, planned ahead."""
        return self.lengths is not None and bool(step.in_flight_R.any())

    def hand_out(self, step: ScheduledStep, to_host: ToHost) -> HandedOut:
        """Share out the rows of a step that was planned ahead, by the newest chances; nothing waits for the device."""
        if self.speculation is None or self._continuation is None:
            raise InvariantError(f"step {step.number} was planned ahead of no step that drafted")
        with torch.inference_mode():
            room_R = self._continuation.room(step)
            total = step.num_tokens - step.num_requests
            drafts_R = hand_out(self.speculation.newest_chances(step), room_R, total)
            return HandedOut(with_drafts(self._inputs(step), drafts_R, self.speculation.drafts), to_host(drafts_R))

    def stand_by(self) -> None:
        """Take part in a step of other ranks without a row of one's own."""
        with torch.inference_mode():
            self._transformer.stand_by()
            self._transformer.end_step()

    def begin(self, step: ScheduledStep, extras: Sequence[RowExtras], handed: HandedOut | None = None) -> Any:
        """Execute a step's copies and run its rows through the layers; what was assumed is put right first.

        Asynchronous scheduling runs this and :meth:`finish` on the device's queue. Nothing waits for the device in a
        decode step.

        Args:
            step: the step.
            extras: what each request wants beyond tokens.
            handed: what :meth:`hand_out` gave; None where the step's rows are as they were planned.
        """
        self.copy(step)
        with torch.inference_mode():
            inputs: StepInputs = self._inputs(step) if handed is None else handed.inputs
            if self._continuation is not None:
                inputs = self._continuation.corrected(step, inputs)
            forwarded = self._forward(step, extras, inputs)
            return _Begun(forwarded, self._logits(step, forwarded))

    def finish(
        self,
        begun: Any,
        step: ScheduledStep,
        requests: Sequence[RunRequest],
        extras: Sequence[RowExtras],
        to_host: ToHost,
    ) -> Results:
        """Sample a step that has begun, and draft; where each request stands is remembered for the next step.

        Args:
            begun: what :meth:`begin` returned; what that is, is the worker's own affair.
            step: the step.
            requests: the sampling of each request, as for :meth:`run`.
            extras: what each request wants beyond tokens.
            to_host: copies a tensor for the host, without waiting if the device can.
        """
        forwarded, logits_BV = begun
        with torch.inference_mode():
            result, judged = self._sample(logits_BV, forwarded, step, requests, extras)
            if step.kind == "decode":
                self._remember(forwarded.inputs, result)
            drafts = None if self.speculation is None else self.speculation.stored(step)
            return on_host(Readback(result, judged, drafts), to_host)

    def _remember(self, inputs: StepInputs, result: SampledStep | VerifiedStep) -> None:
        if self._continuation is None:
            num_slots = len(self.pools.slot_bytes_Zb)
            self._continuation = Continuation.empty(num_slots, inputs.history_RG.shape[1], self.device)
        if isinstance(result, VerifiedStep):
            accepted_R = result.verdicts.accepted_R
            token_ids_R = result.verdicts.token_ids_Rm.gather(1, accepted_R[:, None])[:, 0]
        else:
            token_ids_R = result.tokens.token_ids_B
            accepted_R = torch.zeros_like(token_ids_R)
        self._continuation.store(inputs, token_ids_R, accepted_R)

    def _inputs(self, step: ScheduledStep) -> StepInputs:
        layout = self.pools.layout
        return build_step_inputs(step, block_size=layout.block_size, ring=layout.ring, device=self.device)

    def _mark(self, step: ScheduledStep) -> float:
        """Return the time at which everything so far is done, where somebody learns from it."""
        if self.lengths is not None and step.kind == "decode":
            self._driver.synchronize()
        return self._clock()

    def _forward(self, step: ScheduledStep, extras: Sequence[RowExtras], inputs: StepInputs) -> Forwarded:
        speculation = self.speculation
        drafts = None
        if speculation is not None:
            inputs, drafts = speculation.fill_in(step, inputs)
        truncation = self._prefill.truncation(step, inputs.layout)
        hidden = self._hidden(step, extras, inputs, truncation)
        self._transformer.end_step()
        if speculation is not None:
            kept = inputs.layout if truncation is None else truncation.step
            speculation.store_context(hidden.taps_TA, kept, self.pools)
        last_row_R = inputs.last_row_R if truncation is None else truncation.last_row_R
        return Forwarded(inputs, hidden, last_row_R, drafts)

    def _hidden(
        self, step: ScheduledStep, extras: Sequence[RowExtras], inputs: StepInputs, truncation: Truncation | None
    ) -> Hidden:
        embeddings = self._given_embeddings(step, extras, inputs.layout.image_T)
        if step.kind == "decode" and embeddings is None:
            return self.decode_steps.run(inputs)
        return self._transformer.forward(
            inputs.ids_T,
            self._transformer.ngram_tokens(inputs.ids_T, inputs.history_RG, inputs.layout),
            inputs.layout,
            self.pools,
            embeddings,
            with_taps=self.speculation is not None and self.speculation.needs_taps,
            truncation=truncation,
        )

    def _logits(self, step: ScheduledStep, forwarded: Forwarded) -> torch.Tensor:
        """Return the logits of the rows that are sampled: all those of a decode step that verifies drafts."""
        hidden_TD = forwarded.hidden.hidden_TD
        is_judged = forwarded.drafts is not None and step.kind == "decode"
        return self._project(hidden_TD if is_judged else hidden_TD.index_select(0, forwarded.last_row_R))

    def _sample(
        self,
        logits_BV: torch.Tensor,
        forwarded: Forwarded,
        step: ScheduledStep,
        requests: Sequence[RunRequest],
        extras: Sequence[RowExtras],
    ) -> tuple[SampledStep | VerifiedStep, JudgedDrafts | None]:
        drafts, judged = forwarded.drafts, None
        result: SampledStep | VerifiedStep
        if self.speculation is None or drafts is None:
            result = self._sampler.sample(logits_BV, build_sampling_step(_plain(requests), self.device))
        else:
            layout = forwarded.inputs.layout
            result = self.speculation.verify_and_draft(
                logits_BV, step, requests, drafts, layout, self.pools, step.round_drafts
            )
            if step.kind == "decode":
                verified_R = torch.minimum(drafts.usable(), layout.row_starts_R1.diff() - 1)
                judged = JudgedDrafts(
                    self.tally, verified_R, drafts.chances_Rn, tuple(request.is_due for request in requests)
                )
        self._fill_extras(step, extras, forwarded.hidden.hidden_TD)
        return result, judged

    def _project(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        return self._transformer.logits(hidden_BD).to(torch.float32)

    def _copy(self, pool_Nb: torch.Tensor, pairs: Sequence[CopyPair]) -> None:
        if pairs:
            source_n = on_device(np.array([pair.source for pair in pairs], np.int64), self.device)
            target_n = on_device(np.array([pair.destination for pair in pairs], np.int64), self.device)
            self._ops.moves.copy(pool_Nb, source_n, target_n)

    def _given_embeddings(
        self, step: ScheduledStep, extras: Sequence[RowExtras], image_T: torch.Tensor
    ) -> GivenEmbeddings | None:
        cached_R, q_R = step.cached_R.tolist(), step.q_R.tolist()
        given = [
            None if extra.embeddings_PD is None else extra.embeddings_PD[cached : cached + q]
            for cached, q, extra in zip(cached_R, q_R, extras, strict=True)
        ]
        # Rows behind the prompt have none, so a decode step pays nothing.
        if not any(rows_QD is not None and len(rows_QD) for rows_QD in given):
            return None
        width = self._transformer.config.hidden_size
        pieces = []
        is_given = []
        for q, rows_QD in zip(q_R, given, strict=True):
            known_QD = torch.zeros(0, width) if rows_QD is None else rows_QD.cpu()
            pieces += [known_QD, known_QD.new_zeros(q - len(known_QD), width)]
            is_given += [torch.ones(len(known_QD), dtype=torch.bool), torch.zeros(q - len(known_QD), dtype=torch.bool)]
        mask_T = on_device(torch.cat(is_given), self.device) & image_T
        return GivenEmbeddings(on_device(torch.cat(pieces), self.device), mask_T)

    def _fill_extras(self, step: ScheduledStep, extras: Sequence[RowExtras], hidden_TD: torch.Tensor) -> None:
        start = 0
        for cached, q, extra in zip(step.cached_R.tolist(), step.q_R.tolist(), extras, strict=True):
            listed = extra.prompt_log_probabilities
            if listed is not None and (wanted := listed.wanted(cached, q)):
                rows_TD = hidden_TD[start + wanted.start - cached : start + wanted.stop - cached]
                listed.record(wanted, rows_TD, self._project, self._ops.sampling)
            if extra.logits is not None:
                first = max(cached, extra.logits.collected)
                rows_TD = hidden_TD[start + first - cached : start + q]
                extra.logits.rows += _in_pieces(rows_TD, self._project)
                extra.logits.collected = max(extra.logits.collected, cached + q)
            start += q


def _plain(requests: Sequence[RunRequest]) -> list[RowRequest]:
    return [
        RowRequest(sampling, index, outputs, None if allowed_mW is None else allowed_mW[0])
        for sampling, index, outputs, _, allowed_mW, _ in requests
    ]


def _in_pieces(hidden_TD: torch.Tensor, project: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    starts = range(0, len(hidden_TD), ROWS_PER_PIECE)
    return [project(hidden_TD[start : start + ROWS_PER_PIECE]).cpu() for start in starts]
