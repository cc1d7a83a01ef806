"""Where each request stands, on the device: what a step that was planned ahead puts in the place of assumptions.

The host plans such a step as if the step before it accepted all drafts. What really came of that one lies here, by
state slot, when the planned step runs; a slot changes hands only when no launched step can touch it.

Legend: T rows, R requests, G look-back, Z state slots, m most rows of a request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.accelerator.upload import on_device
from deepinfer.engine.step_inputs import StepInputs
from deepinfer.scheduling.step import ScheduledStep


class _Places(NamedTuple):
    """Where the requests of a step stand.

    Attributes:
        flies_R: bool [R], whether the step was planned before the request's last step was read.
        stop_R: int64 [R], the last position that it owns memory for, plus one.
        newest_R: int64 [R], the token that it begins with where it flies: -1 if there is none; else 0.
        cached_R: int64 [R], positions that are computed and stay.
    """

    flies_R: torch.Tensor
    stop_R: torch.Tensor
    newest_R: torch.Tensor
    cached_R: torch.Tensor


@dataclass(frozen=True, slots=True)
class Continuation:
    """The state that a slot's next decode step begins with.

    Attributes:
        cached_Z: int64 [Z], positions that are computed and stay.
        newest_Z: int64 [Z], the token behind them, -1 where there is none: the request has ended.
        history_ZG: int64 [Z, G], the ids before it, nearest first, -1 where there is none.
    """

    cached_Z: torch.Tensor
    newest_Z: torch.Tensor
    history_ZG: torch.Tensor

    @classmethod
    def empty(cls, num_slots: int, history_tokens: int, device: torch.device) -> Continuation:
        """Return one that says nothing of any slot."""
        nothing_Z = torch.full((num_slots,), -1, dtype=torch.int64, device=device)
        history_ZG = torch.full((num_slots, history_tokens), -1, dtype=torch.int64, device=device)
        return cls(nothing_Z.clone(), nothing_Z, history_ZG)

    def room(self, step: ScheduledStep) -> torch.Tensor:
        """Return int64 [R]: for how many drafts each request of a step has positions; none without a newest token."""
        place = self._places(step)
        return torch.where(place.newest_R >= 0, (place.stop_R - 1 - place.cached_R).clamp(min=0), 0)

    def corrected(self, step: ScheduledStep, inputs: StepInputs) -> StepInputs:
        """Return inputs in which each request that was planned ahead stands where it really does.

        Key lengths lose the drafts that were rejected, the newest token and its look-back take their places. Rows
        behind the last planned position, and those of a request without a token, are invalid.
        """
        if not step.in_flight_R.any():
            return inputs
        layout = inputs.layout
        device = layout.cached_R.device
        slots_R = layout.state_slots_R
        flies_R, stop_R, newest_R, cached_R = self._places(step)
        first_row_R = layout.row_starts_R1[:-1]
        place_T = torch.arange(layout.rows, device=device) - first_row_R[layout.request_T]
        position_T = cached_R[layout.request_T] + place_T
        stop_T = stop_R[layout.request_T]
        valid_T = layout.valid_T & (position_T < stop_T) & (newest_R >= 0)[layout.request_T]
        is_newest_T = flies_R[layout.request_T] & (place_T == 0)
        # The places of drafts hold no id yet; one that is never filled in must still be an index.
        ids_T = torch.where(is_newest_T, newest_R[layout.request_T], inputs.ids_T).clamp(min=0)
        return replace(
            inputs,
            ids_T=ids_T,
            history_RG=torch.where(flies_R[:, None], self.history_ZG[slots_R], inputs.history_RG),
            layout=replace(
                layout,
                cached_R=torch.minimum(cached_R, stop_R - 1),
                position_T=torch.minimum(position_T, stop_T - 1),
                valid_T=valid_T,
            ),
        )

    def _places(self, step: ScheduledStep) -> _Places:
        def moved(values: NDArray[np.generic]) -> torch.Tensor:
            return on_device(values, self.cached_Z.device)

        flies_R, slots_R = moved(step.in_flight_R > 0), moved(step.state_slot_R.astype(np.int64))
        return _Places(
            flies_R=flies_R,
            stop_R=moved(step.k_R.astype(np.int64)),
            newest_R=torch.where(flies_R, self.newest_Z[slots_R], 0),
            cached_R=torch.where(flies_R, self.cached_Z[slots_R], moved(step.cached_R.astype(np.int64))),
        )

    def store(self, inputs: StepInputs, token_ids_R: torch.Tensor, accepted_R: torch.Tensor) -> None:
        """Remember what a decode step came to.

        Args:
            inputs: what it ran, corrected and with its drafts filled in.
            token_ids_R: the last token that each request emitted, -1 where it has none.
            accepted_R: how many drafts come before it.
        """
        layout = inputs.layout
        slots_R = layout.state_slots_R
        self.newest_Z[slots_R] = token_ids_R
        self.cached_Z[slots_R] = layout.cached_R + 1 + accepted_R
        if not inputs.history_RG.shape[1]:
            return
        places_m = torch.arange(layout.max_rows, device=accepted_R.device)
        row_Rm = layout.row_starts_R1[:-1, None] + places_m
        run_Rm = inputs.ids_T[row_Rm.clamp(max=layout.rows - 1)]
        known_RN = torch.cat([inputs.history_RG.flip(1), run_Rm], dim=1)
        back_G = torch.arange(inputs.history_RG.shape[1], device=accepted_R.device)
        newest_first_RG = (inputs.history_RG.shape[1] + accepted_R)[:, None] - back_G
        self.history_ZG[slots_R] = known_RN.gather(1, newest_first_RG)
