"""Truncated prefill (model.md section 12): the layers behind the last owner run only a prompt's last rows.

The last owner's long-range entries are made of every row; from its attention on, only kept rows count, and their
windows begin no earlier than the first kept one. ``mask`` computes the other rows too and throws them away: the slow,
plain meaning that ``compact`` must equal.

Legend: T rows of the step, K rows that the last layers run, R requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.ops.selection import Selection
from deepinfer.accelerator.upload import on_device
from deepinfer.model.config import ModelConfig
from deepinfer.model.forward_pass import ForwardPass
from deepinfer.model.roles import derive_roles

TruncationMode = Literal["off", "mask", "compact"]


@dataclass(frozen=True, slots=True)
class Truncation:
    """Which rows of one prefill step the last layers run.

    Attributes:
        rows_K: int64 [K], rows of the step in ascending order; None means all of them (mode ``mask``).
        step: the layout of those rows.
        last_row_R: int64 [R], the last of them of each request.
    """

    rows_K: torch.Tensor | None
    step: StepLayout
    last_row_R: torch.Tensor

    def continue_pass(self, run: ForwardPass, *, stored_owner: int) -> ForwardPass:
        """Return the pass over the kept rows that goes on where ``run`` stands.

        Args:
            run: the pass over all rows.
            stored_owner: the owner layer whose entries of all rows are stored already.
        """
        key_K = None if run.row_key_T is None else self.kept(run.row_key_T)
        shortened = ForwardPass.begin(run.config, run.ops, run.rotary, self.step, run.caches, key_K)
        picks = {layer: self._kept(pick) for layer, pick in run.picks.items()}
        return replace(shortened, picks=picks, stored_owner=stored_owner)

    def kept(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return the kept rows of a tensor."""
        return values_T if self.rows_K is None else values_T.index_select(0, self.rows_K)

    def _kept(self, pick: Selection) -> Selection:
        candidates = None if pick.candidates_TB is None else self.kept(pick.candidates_TB)
        return replace(pick, entries_TK=self.kept(pick.entries_TK), candidates_TB=candidates)


def first_truncated_layer(config: ModelConfig) -> int | None:
    """Return the last owner's number, from whose attention on rows may be left out; None without an owner."""
    owners = [role.layer for role in derive_roles(config) if role.owns_kv]
    return max(owners, default=None)


def truncation_problems(config: ModelConfig, mode: TruncationMode, keep_tokens: int, backtrack: int) -> list[str]:
    """Return why prompts of this model cannot be truncated so, in words."""
    if mode == "off":
        return []
    problems = []
    least = config.sliding_window + backtrack
    if keep_tokens < least:
        problems.append(
            f"truncated_prefill_keep_tokens={keep_tokens} is below {least}, the window ({config.sliding_window}) and "
            f"the rows that a step may disown ({backtrack}): a decode step would read rows that were left out"
        )
    first = first_truncated_layer(config)
    if first is None:
        problems.append(f"truncated_prefill={mode!r}: the model has no layer with long-range entries")
    else:
        late = [layer for layer in config.engram_layer_ids if layer > first]
        if late:
            problems.append(
                f"truncated_prefill={mode!r}: Engram layers {late} lie behind the last owner {first}, so their rows "
                f"cannot be left out"
            )
    return problems


def truncate(step: StepLayout, keep_starts: Sequence[int], mode: TruncationMode) -> Truncation | None:
    """Say which rows of a prefill step count behind the last owner; None when all of them do.

    A chunk that lies wholly before the kept rows keeps its last row as a placeholder that writes nothing.

    Args:
        step: the whole step.
        keep_starts: for each request its first kept position.
        mode: "mask" or "compact".
    """
    starts_R1 = step.row_starts_R1.cpu().numpy()
    cached_R = step.cached_R.cpu().numpy()
    keep_R = np.asarray(keep_starts, np.int64)
    device = step.position_T.device
    if not (keep_R > cached_R).any():
        # Later chunks of a prompt must not look before its first kept row either.
        if not keep_R.any():
            return None
        layout = replace(step, window_start_R=on_device(keep_R, device))
        return Truncation(None, layout, step.row_starts_R1[1:] - 1)
    end_R = cached_R + np.diff(starts_R1)
    first_R = np.minimum(np.maximum(keep_R, cached_R), end_R - 1)
    is_placeholder_R = keep_R >= end_R
    window_R = np.where(is_placeholder_R, first_R, keep_R)
    if mode == "mask":
        valid_T = step.valid_T & on_device(_rows_from(starts_R1, cached_R, keep_R), device)
        layout = replace(step, window_start_R=on_device(window_R, device), valid_T=valid_T)
        return Truncation(None, layout, step.row_starts_R1[1:] - 1)
    return _compact(step, starts_R1, cached_R, first_R, is_placeholder_R, window_R)


def _rows_from(
    starts_R1: NDArray[np.int64], cached_R: NDArray[np.int64], first_R: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return which rows stand at or behind their request's first position."""
    counts_R = np.diff(starts_R1)
    position_T = np.arange(starts_R1[-1]) - np.repeat(starts_R1[:-1] - cached_R, counts_R)
    return np.asarray(position_T >= np.repeat(first_R, counts_R))


def _compact(
    step: StepLayout,
    starts_R1: NDArray[np.int64],
    cached_R: NDArray[np.int64],
    first_R: NDArray[np.int64],
    is_placeholder_R: NDArray[np.bool_],
    window_R: NDArray[np.int64],
) -> Truncation:
    device = step.position_T.device

    def moved(values: NDArray[np.generic]) -> torch.Tensor:
        return on_device(values, device)

    rows_K = moved(np.flatnonzero(_rows_from(starts_R1, cached_R, first_R)))
    counts_R = starts_R1[1:] - (starts_R1[:-1] + first_R - cached_R)
    kept_starts_R1 = np.concatenate(([0], np.cumsum(counts_R)))
    real_K = moved(~np.repeat(is_placeholder_R, counts_R))
    layout = replace(
        step,
        row_starts_R1=moved(kept_starts_R1),
        cached_R=moved(first_R),
        request_T=step.request_T.index_select(0, rows_K),
        position_T=step.position_T.index_select(0, rows_K),
        window_start_R=moved(window_R),
        image_T=step.image_T.index_select(0, rows_K),
        valid_T=step.valid_T.index_select(0, rows_K) & real_K,
        max_rows=int(counts_R.max()),
    )
    return Truncation(rows_K, layout, layout.row_starts_R1[1:] - 1)
