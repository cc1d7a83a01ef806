"""Builds what the sampling ops need for one step from the requests whose rows are sampled.

Rows without adjustments cost one join of packed constants and a few numpy operations for the whole batch; only rows
whose flags say so are looked at one by one.

Legend: B sampled rows, N listed entries, M restricted rows, W words of a bitmask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.accelerator.ops.sampling import (
    AllowedEntries,
    BiasEntries,
    LogitAdjustments,
    PenaltyEntries,
    RowFacts,
    SamplingRows,
    TokenEntries,
)
from deepinfer.accelerator.upload import on_device
from deepinfer.sampling.request import CONSTANT_NAMES, RequestSampling, RowFlag
from deepinfer.sampling.streams import DrawCase, Keying, streams

_COLUMNS = (*CONSTANT_NAMES, "stream", "forced")
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_WEIGHT, _SEED, _FLAGS, _STREAM, _FORCED = range(len(_COLUMNS))

# Plain integers: operations on enum members cost more than all else in a step's fast path.
_ADJUSTING = int(RowFlag.BIAS | RowFlag.PENALTIES | RowFlag.BANS | RowFlag.ALLOWED)
_GREEDY, _DRAWN = int(RowFlag.GREEDY), int(RowFlag.DRAWN)
_BY_TOP_K, _BY_TOP_P = int(RowFlag.TOP_K), int(RowFlag.TOP_P)
_TOP_P_ALONE, _MIN_P, _IS_FORCED = int(RowFlag.TOP_P_ALONE), int(RowFlag.MIN_P), int(RowFlag.FORCED)
_PROCESSED, _RAW = int(RowFlag.LOG_PROBABILITIES), int(RowFlag.RAW_LOG_PROBABILITIES)


class RowRequest(NamedTuple):
    """One row to sample.

    Attributes:
        sampling: the request's constants.
        token_index: index of the token being made, in the request's whole history: prompt length + outputs so far
            (for an unfinished chunk, whose draw is thrown away, the positions computed so far).
        output_token_ids: the outputs so far; their count decides bans and forced tokens.
        allowed_W: int32 [W], bit t set where token t may be emitted; None where every token may.
        draft_token_ids: drafts that stand between the outputs and this row's token; they count as outputs.
    """

    sampling: RequestSampling
    token_index: int
    output_token_ids: Sequence[int]
    allowed_W: NDArray[np.int32] | None = None
    draft_token_ids: Sequence[int] = ()

    @property
    def emitted_tokens(self) -> int:
        """How many outputs come before this row's token."""
        return len(self.output_token_ids) + len(self.draft_token_ids)


@dataclass(frozen=True, slots=True)
class ListedRows:
    """Rows whose log-probabilities are wanted.

    Attributes:
        numbers: the rows, ascending.
        counts: how many best tokens each of them lists.
        rows_N: the rows again, int64 [N] on the device.
    """

    numbers: tuple[int, ...]
    counts: tuple[int, ...]
    rows_N: torch.Tensor

    @property
    def top_count(self) -> int:
        """The longest list among the rows."""
        return max(self.counts)


@dataclass(frozen=True, slots=True)
class SamplingStep:
    """Everything that one step's sampling needs beside the logits; None where no row asks for it.

    Attributes:
        rows: settings and random streams.
        adjustments: changes of the logits.
        processed: rows that list processed log-probabilities.
        raw: rows that list raw ones.
    """

    rows: SamplingRows
    adjustments: LogitAdjustments | None
    processed: ListedRows | None
    raw: ListedRows | None


def build_sampling_step(
    requests: Sequence[RowRequest],
    device: torch.device,
    *,
    keying: Keying = Keying.INDEX,
) -> SamplingStep:
    """Describe the sampling of one step; a row's description does not depend on the other rows.

    Args:
        requests: the rows in the order of the logits.
        device: where the tensors go.
        keying: how random streams are numbered.
    """
    columns = np.empty((len(_COLUMNS), len(requests)), np.int64)
    packed = b"".join([request.sampling.constants for request in requests])
    columns[: len(CONSTANT_NAMES)] = np.frombuffer(packed, np.int64).reshape(-1, len(CONSTANT_NAMES)).T
    indices = np.array([request.token_index for request in requests], np.int64)
    columns[_STREAM] = streams(indices, DrawCase.FRESH, keying)
    columns[_FORCED] = -1
    flags = int(np.bitwise_or.reduce(columns[_FLAGS]))
    if flags & _IS_FORCED:
        for row in _flagged(columns, _IS_FORCED):
            columns[_FORCED, row] = requests[row].sampling.forced_id(requests[row].emitted_tokens)
    adjustments = None
    bitmask_BW = _bitmask(requests, device)
    if flags & _ADJUSTING or bitmask_BW is not None:
        adjustments = _adjustments(requests, columns, flags, device, bitmask_BW)
    return SamplingStep(
        rows=_rows(columns, flags, device),
        adjustments=adjustments,
        processed=_listed(requests, columns, _PROCESSED, device) if flags & _PROCESSED else None,
        raw=_listed(requests, columns, _RAW, device) if flags & _RAW else None,
    )


def _rows(columns: NDArray[np.int64], flags: int, device: torch.device) -> SamplingRows:
    # One copy to the device; float64 columns travel as their bits.
    moved = on_device(columns, device).unbind(0)
    return SamplingRows(
        temperature_B=moved[_TEMPERATURE].view(torch.float64),
        top_k_B=moved[_TOP_K],
        top_p_B=moved[_TOP_P].view(torch.float64),
        min_weight_B=moved[_MIN_WEIGHT],
        seeds_B=moved[_SEED],
        streams_B=moved[_STREAM],
        forced_ids_B=moved[_FORCED],
        facts=RowFacts(
            has_greedy=bool(flags & _GREEDY),
            has_drawn=bool(flags & _DRAWN),
            has_top_k=bool(flags & _BY_TOP_K),
            has_top_p=bool(flags & _BY_TOP_P),
            has_min_p=bool(flags & _MIN_P),
            has_forced=bool(flags & _IS_FORCED),
            bounded_by_top_k=not flags & _TOP_P_ALONE,
            largest_top_k=int(columns[_TOP_K].max(initial=0)) if flags & _BY_TOP_K else 0,
        ),
    )


def _flagged(columns: NDArray[np.int64], flag: int) -> list[int]:
    rows: list[int] = np.flatnonzero(columns[_FLAGS] & flag).tolist()
    return rows


def _adjustments(
    requests: Sequence[RowRequest],
    columns: NDArray[np.int64],
    flags: int,
    device: torch.device,
    bitmask_BW: torch.Tensor | None,
) -> LogitAdjustments:
    bias = penalties = bans = allowed = None
    if flags & RowFlag.BIAS:
        rows = _flagged(columns, RowFlag.BIAS)
        places = _places(rows, [requests[row].sampling.bias_ids for row in rows], device)
        values = on_device(np.concatenate([requests[row].sampling.bias_values for row in rows]), device)
        bias = BiasEntries(places.rows_N, places.ids_N, values)
    if flags & RowFlag.PENALTIES:
        rows = _flagged(columns, RowFlag.PENALTIES)
        seen = [
            requests[row].sampling.seen.columns(requests[row].output_token_ids, requests[row].draft_token_ids)
            for row in rows
        ]
        places = _places(rows, [each.ids for each in seen], device)
        factors = on_device(np.concatenate([each.factors for each in seen]), device)
        subtract = on_device(np.concatenate([each.subtract for each in seen]), device)
        penalties = PenaltyEntries(places.rows_N, places.ids_N, factors, subtract)
    if flags & RowFlag.BANS:
        rows = _flagged(columns, RowFlag.BANS)
        banned = [requests[row].sampling.bans(requests[row].emitted_tokens) for row in rows]
        bans = _places(rows, banned, device)
    if flags & RowFlag.ALLOWED:
        rows = _flagged(columns, RowFlag.ALLOWED)
        places = _places(rows, [requests[row].sampling.allowed for row in rows], device)
        allowed = AllowedEntries(on_device(np.array(rows, np.int64), device), places)
    return LogitAdjustments(bias=bias, penalties=penalties, bans=bans, allowed=allowed, bitmask_BW=bitmask_BW)


def _bitmask(requests: Sequence[RowRequest], device: torch.device) -> torch.Tensor | None:
    masks = [request.allowed_W for request in requests]
    found = [mask_W for mask_W in masks if mask_W is not None]
    if not found:
        return None
    everything_W = np.full_like(found[0], -1)
    rows = np.stack([everything_W if mask_W is None else mask_W for mask_W in masks])
    return on_device(rows, device)


def _places(rows: Sequence[int], ids: Sequence[NDArray[np.int64]], device: torch.device) -> TokenEntries:
    lengths = [len(each) for each in ids]
    return TokenEntries(on_device(np.repeat(rows, lengths), device), on_device(np.concatenate(ids), device))


def _listed(requests: Sequence[RowRequest], columns: NDArray[np.int64], flag: int, device: torch.device) -> ListedRows:
    rows = _flagged(columns, flag)
    counts = _counts(requests[row].sampling for row in rows)
    return ListedRows(tuple(rows), counts, on_device(np.array(rows, np.int64), device))


def _counts(requests: Iterable[RequestSampling]) -> tuple[int, ...]:
    return tuple(request.params.logprobs or 0 for request in requests)
