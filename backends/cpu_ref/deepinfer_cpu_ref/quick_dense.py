"""Draws from rows of which nearly every token matters, a few readings of the logits each.

A draw needs only to know on which side of its target each partial sum of kept weights lies. So it is tried with masses
in float32 first, which are off by known bounds (`deepinfer_cpu_ref.quick_masses`), and what they cannot decide is done
with exact weights. The cut of top-p is found without sorting the row (`deepinfer_cpu_ref.quick_cut`).

Why an approximate draw that is believed is right: of the kept weights let B come before the token, and K be all, so
that the token is drawn if B <= u * K < B + its weight. ``u * K - B`` is ``u * (K - B) - (1 - u) * B``: what lies before
the token is off with the factor 1 - u and what lies behind with the factor u. So it is off by at most

    u * (E(K) - E(B)) + (1 - u) * E(B) + doubt + rounding + 1,    E(X) = relative * X + absolute * tokens of X,

where the doubt is what may be kept beside what is known to be, and 1 is what the floor of the target comes to (true
sums are whole, so that they do not see it). The end of the token is off by no more, since its own block is weighed
exactly. When the target is farther than that from both ends, the true target lies within the token, which is kept for
certain. With exact masses all of that is 0, and every draw is believed.

Legend: B all rows, R rows of a group, V vocabulary, N blocks of a row, C tokens of a block, M entries of a list.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_cpu_ref.quick_blocks import BlockedRows, DrawnRows
from deepinfer_cpu_ref.quick_cut import (
    UNDECIDED,
    Cuts,
    cut_rows,
    keys,
)
from deepinfer_cpu_ref.quick_guess import CutRows, CutSettings, Guesser, SampledGuess, guess_everything
from deepinfer_cpu_ref.quick_masses import (
    ApproximateMasses,
    ExactMasses,
    Masses,
    add_up,
    can_be_approximate,
    to_weights,
)
from deepinfer_cpu_ref.quick_scratch import Scratch

WIDEST_VOCABULARY = 2**21
"""Sums of this many weights stay below 2**53, so that float64 holds them exactly."""


def draw_dense(blocked: BlockedRows, drawn: DrawnRows, vocabulary: int, scratch: Scratch) -> torch.Tensor:
    """Return the tokens (int64 [R]) of some rows; `UNDECIDED` for those with a top-k, which have no way here."""
    rows = drawn.settings
    has_no_top_k_R = (rows.top_k_B == 0) | (rows.top_k_B >= vocabulary)
    # The guess at a cut by min-p needs exact weights.
    can_be_first_R = can_be_approximate(blocked, drawn) & (rows.min_weight_B <= 1)
    tokens_R = torch.full_like(drawn.rows_R, UNDECIDED)
    ways: tuple[tuple[type[Masses], Guesser], ...] = (
        (ApproximateMasses, SampledGuess.of),
        (ExactMasses, SampledGuess.of),
        (ExactMasses, guess_everything),
    )
    for kind, guesser in ways:
        is_asked_R = has_no_top_k_R & (tokens_R == UNDECIDED)
        if kind is ApproximateMasses:
            is_asked_R &= can_be_first_R
        asked_M = is_asked_R.nonzero()[:, 0]
        if len(asked_M):
            part = drawn.select(asked_M)
            tokens_R[asked_M] = _draw(blocked, part, kind(blocked, part), guesser, scratch)
    return tokens_R


def _draw(blocked: BlockedRows, drawn: DrawnRows, masses: Masses, guesser: Guesser, scratch: Scratch) -> torch.Tensor:
    count, width = blocked.logits_BNC.shape[1:]
    kept = _cut(blocked, drawn, masses, guesser, scratch)
    rows, uniforms_R1 = drawn.settings, drawn.uniforms_R[:, None]
    sums_RN, least_key_R1 = torch.from_numpy(kept.sums_RN), torch.from_numpy(kept.least_key_R)[:, None]
    through_RN = sums_RN.cumsum(-1)
    total_R1 = through_RN[:, -1:]
    target_R1 = torch.minimum((uniforms_R1 * total_R1).floor(), total_R1 - 1)
    block_R1 = torch.searchsorted(through_RN, target_R1, right=True).clamp(max=count - 1)
    inside_RC = blocked.logits_BNC[drawn.rows_R, block_R1[:, 0]].to(torch.float64)
    inside_RC.sub_(blocked.largest_B[drawn.rows_R, None]).div_(rows.temperature_B[:, None])
    to_weights(inside_RC)
    keys_RC = keys(inside_RC.to(torch.int64), block_R1 * width + torch.arange(width))
    is_kept_RC = (keys_RC >= least_key_R1) & (inside_RC >= rows.min_weight_B[:, None])
    inside_RC = torch.where(is_kept_RC, inside_RC, 0.0)
    before_R1 = through_RN.gather(1, block_R1) - sums_RN.gather(1, block_R1)
    through_RC = before_R1 + inside_RC.cumsum(-1)
    place_R1 = torch.searchsorted(through_RC, target_R1, right=True).clamp(max=width - 1)
    end_R1 = through_RC.gather(1, place_R1)
    begin_R1 = end_R1 - inside_RC.gather(1, place_R1)
    room_R = kept.doubt_R + masses.accuracy.room_of_draw(
        uniform_R=drawn.uniforms_R.numpy(),
        before_R=before_R1[:, 0].numpy(),
        tokens_before_R=block_R1[:, 0].numpy() * width,
        total_R=total_R1[:, 0].numpy(),
        tokens=count * width,
    )
    distance_R1 = torch.minimum(target_R1 - begin_R1, end_R1 - target_R1)
    is_certain_R1 = (distance_R1 >= torch.from_numpy(room_R)[:, None]) & (least_key_R1 != UNDECIDED)
    return torch.where(is_certain_R1, block_R1 * width + place_R1, UNDECIDED)[:, 0]


def _cut(blocked: BlockedRows, drawn: DrawnRows, masses: Masses, guesser: Guesser, scratch: Scratch) -> Cuts:
    row_count, count, width = (len(drawn.rows_R), *blocked.logits_BNC.shape[1:])
    rows, accuracy, places_R = drawn.settings, masses.accuracy, drawn.rows_R.numpy()
    sums_RN = scratch.take("sums", (row_count, count), torch.float64)
    found = Cuts(sums_RN.numpy(), np.zeros(row_count, dtype=np.int64), np.zeros(row_count))
    columns = (blocked.largest_B[drawn.rows_R], rows.temperature_B, rows.top_p_B, rows.min_weight_B.clamp(min=1))
    settings = CutSettings(*(column_R.numpy() for column_R in columns))
    is_cut_R = (settings.top_p_R < 1) | (settings.least_weight_R > 1)
    logits_BV = blocked.logits_BNC.flatten(1).numpy()
    for part, masses_RNC in masses.pieces(scratch):
        add = partial(_sums, unit_R=accuracy.unit_R[part], scratch=scratch)
        if not is_cut_R[part].any():
            add_up(masses_RNC, accuracy.unit_R[part], sums_RN[part], scratch)
        else:
            some = CutRows(
                masses_RNC=masses_RNC,
                logits_BV=logits_BV,
                places_R=places_R[part],
                # As one block, of which the halves lie farther apart and are laid upon each other in fewer steps.
                total_R=add(masses_RNC.view(len(masses_RNC), 1, -1))[:, 0],
                settings=settings.select(part),
                accuracy=accuracy.select(part),
                add_up=partial(add, masses_RNC),
            )
            flags_2RV = scratch.take("flags", (2, len(masses_RNC), count * width), torch.bool).numpy()
            for column_R, values_R in zip(found, cut_rows(some, guesser, flags_2RV), strict=True):
                column_R[part] = values_R
    return found


def _sums(masses_RNC: torch.Tensor, unit_R: NDArray[np.float64], scratch: Scratch) -> NDArray[np.float64]:
    sums_RN = torch.empty(masses_RNC.shape[:2], dtype=torch.float64)
    add_up(masses_RNC, unit_R, sums_RN, scratch)
    found_RN: NDArray[np.float64] = sums_RN.numpy()
    return found_RN
