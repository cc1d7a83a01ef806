"""Drafts around one step: who has some, which rows verify them, what became of them, and the next round.

Drafts lie in a pool on the device, a slot for each state slot. They belong to one occupation of the slot, known by its
epoch: whoever comes after a preemption, an end, a fork or a fault finds placeholders, never somebody else's drafts.

Legend: T rows, R requests, n drafts a request, B rows that are judged, V vocabulary, Z slots, A taps times D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from deepinfer.accelerator import Ops
from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.ops.drafting import PLACEHOLDER, DraftBlock, DraftDistributions
from deepinfer.accelerator.ops.sampling import RowStatus, SamplingRows
from deepinfer.accelerator.upload import on_device
from deepinfer.cache.pools import CachePools
from deepinfer.engine.readback import NextDrafts
from deepinfer.engine.step_inputs import StepInputs
from deepinfer.model.draft import ContextRows, DraftModel
from deepinfer.model.draft_weights import DraftWeights
from deepinfer.sampling.draft_pool import DraftPool, Drafts
from deepinfer.sampling.drafting import DraftDraws, DraftPolicy, cumulative_chances
from deepinfer.sampling.verification import RunRequest, VerifiedStep, Verifier, build_verification_step
from deepinfer.scheduling.step import ScheduledStep

LATE_STEPS = 8
"""So many steps of one row a request may pass before their context is stored."""

_NO_EPOCH = -1


class Round(NamedTuple):
    """What a round of drafting gave.

    Attributes:
        token_ids_Rn: int64 [R, n], -1 where there is none.
        chances_Rn: float32 [R, n], cumulative chances of acceptance.
        distributions: what the drafts were drawn from; None in coupled verification.
    """

    token_ids_Rn: torch.Tensor
    chances_Rn: torch.Tensor
    distributions: DraftDistributions | None

    def padded(self, made: int, drafts: int) -> Round:
        """Return the round with ``drafts`` places for each request, those behind the first ``made`` empty."""
        if made == drafts:
            return self
        missing = (0, drafts - made)
        kept = self.distributions
        if kept is not None:
            kept = DraftDistributions(
                ids_RnK=pad(kept.ids_RnK[:, :made], (0, 0, *missing), value=-1),
                weights_RnK=pad(kept.weights_RnK[:, :made], (0, 0, *missing)),
                sums_Rn=pad(kept.sums_Rn[:, :made], missing),
            )
        token_ids_Rn = pad(self.token_ids_Rn[:, :made], missing, value=PLACEHOLDER)
        return Round(token_ids_Rn, pad(self.chances_Rn[:, :made], missing), kept)


class Newest(NamedTuple):
    """The requests of a round, each behind its newest token.

    Attributes:
        token_ids_R: the newest tokens, which the target has not run; -1 where there is none.
        block: positions that count as context, state slots, and who takes part.
        rows: sampling settings, with the fresh stream of each request's first draft.
    """

    token_ids_R: torch.Tensor
    block: DraftBlock
    rows: SamplingRows


class Speculation:
    """The drafts of one worker.

    Attributes:
        drafts: n, most drafts that a request has.
        policy: how they are drawn and judged.
        round_drafts: how many the round at hand makes.
    """

    def __init__(self, ops: Ops, policy: DraftPolicy, *, drafts: int, num_slots: int, device: torch.device) -> None:
        """Begin without drafts; the plan's ops have the feature "drafts"."""
        self.drafts = self.round_drafts = drafts
        self.policy = policy
        self._ops = ops
        self._device = device
        self._pool = DraftPool(num_slots=num_slots, drafts=drafts, kept_tokens=policy.kept_tokens, device=device)
        self._verifier = Verifier(ops.sampling, ops.drafting, policy)
        self._epoch_Z = np.full(num_slots, _NO_EPOCH, dtype=np.int64)

    @property
    def needs_taps(self) -> bool:
        """Whether :meth:`store_context` reads what enters the tap layers."""
        return False

    def forget(self) -> None:
        """Drop all drafts: the epochs begin anew."""
        self._epoch_Z[:] = _NO_EPOCH

    def token_ids(self, step: ScheduledStep) -> list[list[int]]:
        """Wait for the device and return the drafts that each row of a step verifies, up to the first placeholder."""
        if step.kind != "decode":
            return [[] for _ in step.sequences]
        ids_Rn = self._pool.gather(self._claimed_slots(step)).token_ids_Rn.tolist()
        return [
            list(takewhile(lambda token_id: token_id >= 0, ids_n[: q - 1]))
            for ids_n, q in zip(ids_Rn, step.q_R.tolist(), strict=True)
        ]

    def chances(self, rows_R: NDArray[np.int64], epoch_R: NDArray[np.int64]) -> NDArray[np.float64]:
        """Wait for the device and return the cumulative chances [R, n] of rows; 0 where drafts are not theirs."""
        chances_Rn: NDArray[np.float64] = self._pool.chances(self._moved(rows_R)).to("cpu", torch.float64).numpy()
        chances_Rn[self._epoch_Z[rows_R] != epoch_R] = 0.0
        return chances_Rn

    def newest_chances(self, step: ScheduledStep) -> torch.Tensor:
        """Return the cumulative chances [R, n] of a step's drafts, without waiting for the device."""
        return self._pool.chances(self._claimed_slots(step))

    def fill_in(self, step: ScheduledStep, inputs: StepInputs) -> tuple[StepInputs, Drafts]:
        """Return the inputs with the drafts in their places, and the drafts; rows from a placeholder on are invalid."""
        drafts = self._pool.gather(self._claimed_slots(step))
        if step.kind != "decode":
            return inputs, drafts
        layout = inputs.layout
        # A draft without a position of its own is none: a step that was planned ahead has rows that turn out too many.
        drafts = drafts.where(layout.valid_T, layout.row_starts_R1)
        place_T = torch.arange(layout.rows, device=self._device) - layout.row_starts_R1[layout.request_T]
        draft_T = drafts.input_ids()[layout.request_T, (place_T - 1).clamp(min=0)]
        ids_T = torch.where(place_T > 0, draft_T, inputs.ids_T)
        valid_T = layout.valid_T & (place_T <= drafts.usable()[layout.request_T])
        return replace(inputs, ids_T=ids_T, layout=replace(layout, valid_T=valid_T)), drafts

    def stored(self, step: ScheduledStep) -> NextDrafts:
        """Return what lies ready for the requests of a step, without waiting for the device."""
        drafts = self._pool.gather(self._moved(step.table_row_R))
        return NextDrafts(drafts.token_ids_Rn, drafts.chances_Rn)

    def store_context(self, taps_TA: torch.Tensor | None, layout: StepLayout, pools: CachePools) -> None:
        """Remember what the target made of rows, for the rounds to come."""

    def settle_context(self, pools: CachePools) -> None:
        """Make the rings hold all that :meth:`store_context` was given: they are about to be read, or copied."""

    def verify_and_draft(
        self,
        logits_BV: torch.Tensor,
        step: ScheduledStep,
        requests: Sequence[RunRequest],
        drafts: Drafts,
        layout: StepLayout,
        pools: CachePools,
        most_drafts: int | None = None,
    ) -> VerifiedStep:
        """Judge the drafts and draft the next ones, without waiting for the device.

        Args:
            logits_BV: float32 [B, V], all rows of a decode step, the last row of each prompt chunk.
            step: the step.
            requests: what its rows want.
            drafts: what :meth:`fill_in` gave.
            layout: the layout that was run: where each request really stands.
            pools: the caches.
            most_drafts: drafts of a request in the round; None for n. A round of none costs nothing.
        """
        verification = build_verification_step(requests, self._device, keying=self.policy.keying)
        verified = self._verifier.verify(logits_BV, verification, drafts)
        if step.is_partial_R.all():
            return verified
        accepted_R, status_R = verified.verdicts.accepted_R, verified.verdicts.status_R
        # A decode step verifies from its newest token on; all rows of a prompt are verified.
        rows_R = layout.row_starts_R1.diff()
        verified_R = layout.cached_R + (rows_R if step.kind == "prefill" else 1)
        settings = verification.sampling.rows.select(verification.first_row_R)
        first_draft_R = settings.streams_B + int(self.policy.keying) * (accepted_R + 1)
        slots_R = self._moved(step.table_row_R)
        newest = Newest(
            token_ids_R=verified.verdicts.token_ids_Rm.gather(1, accepted_R[:, None])[:, 0],
            block=DraftBlock(
                context_R=verified_R + accepted_R,
                state_slots_R=slots_R,
                # A truncated prefill keeps more rows than a window holds.
                window_start_R=torch.zeros_like(slots_R),
                valid_R=(status_R == int(RowStatus.OK)) & self._moved(~step.is_partial_R),
            ),
            rows=replace(settings, streams_B=first_draft_R),
        )
        self.round_drafts = self.drafts if most_drafts is None else min(most_drafts, self.drafts)
        if self.round_drafts:
            self.settle_context(pools)
            made = self._round(step, newest, pools).padded(self.round_drafts, self.drafts)
            token_ids_Rn = torch.where(newest.block.valid_R[:, None], made.token_ids_Rn, PLACEHOLDER)
            self._pool.store(slots_R, token_ids_Rn, made.chances_Rn, made.distributions)
        else:
            self._pool.clear(slots_R)
        self._epoch_Z[step.table_row_R] = step.epoch_R
        return verified

    def _round(self, step: ScheduledStep, newest: Newest, pools: CachePools) -> Round:
        raise NotImplementedError

    def _claimed_slots(self, step: ScheduledStep) -> torch.Tensor:
        """Return the slots of a step's requests, emptied where the drafts are an earlier occupant's."""
        foreign = step.table_row_R[self._epoch_Z[step.table_row_R] != step.epoch_R]
        if len(foreign):
            self._pool.clear(self._moved(foreign))
            self._epoch_Z[foreign] = _NO_EPOCH
        return self._moved(step.table_row_R)

    def _moved(self, values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
        return on_device(np.array(values), self._device)  # a copy: arrays of a step are read-only


Rewrite = Callable[[ScheduledStep, Newest, Round], Round]
"""Takes a step, the requests of its round and what the round gave; returns what is kept instead."""


class ModelSpeculation(Speculation):
    """Drafts of the model's own draft stages.

    Attributes:
        rewrite: changes each round, for measurements whose acceptance is set; None for none.
    """

    rewrite: Rewrite | None = None

    def __init__(
        self, model: DraftModel, policy: DraftPolicy, *, drafts: int, num_slots: int, device: torch.device
    ) -> None:
        """Begin without drafts."""
        super().__init__(model.ops, policy, drafts=drafts, num_slots=num_slots, device=device)
        self._model = model
        self._late: list[ContextRows] = []

    @property
    def weights(self) -> DraftWeights:
        """The stages' parameters."""
        return self._model.weights

    @property
    def needs_taps(self) -> bool:
        """The stages' context is made of the taps."""
        return True

    def forget(self) -> None:
        """Drop all drafts, and the context that nobody will read."""
        super().forget()
        self._late.clear()

    def store_context(self, taps_TA: torch.Tensor | None, layout: StepLayout, pools: CachePools) -> None:
        """Write the rows' records into the stages' rings; those of rejected rows are overwritten before a read.

        While no drafts are made, every step adds one row a request, and the stages cost as much for it as for several.
        So these rows wait for each other; who enters a slot meanwhile, by a prompt or a copy, has them stored first.
        """
        if taps_TA is None:
            return
        # By the numbers of rows and requests: of a step whose rows the device has handed out the host knows no more.
        if layout.kind == "prefill" or layout.rows > len(layout.cached_R):
            self.settle_context(pools)
            self._model.store_context(taps_TA, layout, pools)
            return
        # Copies: a recorded step leaves its taps where the next one leaves them.
        self._late.append(ContextRows(*(each.clone() for each in self._model.context_rows(taps_TA, layout))))
        if len(self._late) >= min(LATE_STEPS, layout.ring):
            self.settle_context(pools)

    def settle_context(self, pools: CachePools) -> None:
        """Store the rows that wait."""
        if self._late:
            self._model.store_rows(ContextRows(*map(torch.cat, zip(*self._late, strict=True))), pools)
            self._late.clear()

    def _round(self, step: ScheduledStep, newest: Newest, pools: CachePools) -> Round:
        draws = DraftDraws(self._ops.drafting, self.policy, newest.rows)
        made = self._model.round(newest.token_ids_R, newest.block, self.round_drafts, pools, draws)
        drawn = Round(made.token_ids_Rn, cumulative_chances(made.confidence_logits_Rn), draws.distributions())
        return drawn if self.rewrite is None else self.rewrite(step, newest, drawn)
