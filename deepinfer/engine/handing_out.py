"""Rows of a step that was planned ahead, handed out anew on the device, which knows the newest chances of its drafts.

The host has fixed how many rows the step has, by chances that are a round older, and owns memory for as many drafts of
each request as there may be. Who gets the rows is decided when the step before has run, without a value read on the
host; the host reads the outcome before it describes the sampling.

Legend: T rows, R requests, n drafts a request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from deepinfer.engine.step_inputs import StepInputs
from deepinfer.sampling.verify_budget import rank_drafts

_NO_ID = -1


class HandedOut(NamedTuple):
    """A step whose rows were handed out.

    Attributes:
        inputs: what it runs, the worker's own affair. The step itself changes when the host learns of the outcome,
            which may be before its layers run: they must not look there again.
        drafts_R: int64 [R], how many drafts each request verifies, readable on the host once the work that made it has
            ended.
    """

    inputs: Any
    drafts_R: torch.Tensor


def hand_out(chances_Rn: torch.Tensor, room_R: torch.Tensor, total: int) -> torch.Tensor:
    """Return int64 [R], drafts of each request, ``total`` together.

    Every row is somebody's, because a step's rows cannot become fewer: where all rooms together hold less than the
    total, the rest goes to drafts without room, whose rows turn out invalid.

    Args:
        chances_Rn: cumulative chances of acceptance.
        room_R: int64 [R], drafts that each request has positions for.
        total: at most R * n.
    """
    place_n = torch.arange(chances_Rn.shape[1], device=chances_Rn.device)
    return rank_drafts(torch.where(place_n < room_R[:, None], chances_Rn, 0.0), total)


def with_drafts(inputs: StepInputs, drafts_R: torch.Tensor, most_drafts: int) -> StepInputs:
    """Return inputs in which each request has one row and so many more; positions follow where it really stands.

    Args:
        inputs: as planned, with the same number of rows.
        drafts_R: int64 [R].
        most_drafts: no request has more.
    """
    layout = inputs.layout
    row_starts_R1 = torch.zeros_like(layout.row_starts_R1)
    row_starts_R1[1:] = torch.cumsum(drafts_R + 1, dim=0)
    place_T = torch.arange(layout.rows, device=drafts_R.device)
    request_T = torch.searchsorted(row_starts_R1[1:].contiguous(), place_T, right=True)
    place_T = place_T - row_starts_R1[request_T]
    # The first row of a request is that of its newest token, wherever it lies.
    planned_T = layout.row_starts_R1[request_T]
    return replace(
        inputs,
        ids_T=torch.where(place_T == 0, inputs.ids_T[planned_T], _NO_ID),
        last_row_R=row_starts_R1[1:] - 1,
        layout=replace(
            layout,
            row_starts_R1=row_starts_R1,
            request_T=request_T,
            position_T=layout.cached_R[request_T] + place_T,
            image_T=layout.image_T[planned_T] & (place_T == 0),
            max_rows=1 + most_drafts,
        ),
    )
