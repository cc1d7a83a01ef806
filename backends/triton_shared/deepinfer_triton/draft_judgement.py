"""Which drafts stand: by coins against the target's distribution, or because the target draws the same.

Legend: R requests, n drafts a request, m = n + 1 most tokens of a run, B rows, V vocabulary, c chunks, K kept tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.accelerator.ops.drafting import PLACEHOLDER, RESIDUAL_SHARE, DraftDistributions, DraftRuns, Verdicts
from deepinfer.accelerator.ops.sampling import RowStatus, SampledTokens, SamplingRows
from deepinfer_triton.configuration import Configuration, launch, pointers, warps_for
from deepinfer_triton.jit import device_function, kernel
from deepinfer_triton.token_draw import uniform_of
from deepinfer_triton.token_weights import ChunkWeights, chunk_constants

KEPT_BLOCK = 256
"""Kept tokens of a draft's distribution that are read at once."""

_OK = tl.constexpr(int(RowStatus.OK))
_PLACEHOLDER = tl.constexpr(PLACEHOLDER)
_RESIDUAL_SHARE = tl.constexpr(RESIDUAL_SHARE)
_WHOLE = torch.int64


@device_function
def row_total(sums_ptr: tl.tensor, row: tl.tensor, chunks: tl.tensor, CHUNK_BLOCK: tl.constexpr) -> tl.tensor:
    """Return the sum of a row's weights; at least 1, which changes nothing where there is any mass."""
    chunk = tl.arange(0, CHUNK_BLOCK)
    total = tl.sum(tl.load(sums_ptr + row * chunks + chunk, mask=chunk < chunks, other=0), 0)
    return tl.maximum(total, 1)


@device_function
def store_run(
    out_ptr: tl.tensor,
    drafts_ptr: tl.tensor,
    request: tl.tensor,
    drafts: tl.tensor,
    accepted: tl.tensor,
    own: tl.tensor,
) -> None:
    """Write a run: the accepted drafts, the target's own token, placeholders."""
    for place in range(drafts + 1):
        draft = tl.load(drafts_ptr + request * drafts + place, mask=place < accepted, other=_PLACEHOLDER)
        emitted = tl.where(place == accepted, own, draft)
        tl.store(out_ptr + request * (drafts + 1) + place, emitted)


@kernel(
    unaligned=(
        "seeds_ptr", "streams_ptr", "resample_ptr", "accept_ptr", "forced_ptr", "first_ptr", "counts_ptr", "drafts_ptr",
        "ids_ptr", "kept_ptr", "draft_sums_ptr",
    )
)  # fmt: skip
def judge_kernel(
    weights_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    status_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    streams_ptr: tl.tensor,
    resample_ptr: tl.tensor,
    accept_ptr: tl.tensor,
    forced_ptr: tl.tensor,
    first_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    drafts_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    draft_sums_ptr: tl.tensor,
    accepted_ptr: tl.tensor,
    rejected_ptr: tl.tensor,
    row_ptr: tl.tensor,
    row_status_ptr: tl.tensor,
    row_forced_ptr: tl.tensor,
    uniform_ptr: tl.tensor,
    taken_ptr: tl.tensor,
    width: tl.int64,
    chunks: tl.int64,
    drafts: tl.int64,
    kept: tl.int64,
    CHUNK_BLOCK: tl.constexpr,
    KEPT_BLOCK: tl.constexpr,
) -> None:
    """One program a request: how many drafts stand, and all that the draw behind them needs but its weights."""
    request = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, KEPT_BLOCK)
    first, count = tl.load(first_ptr + request), tl.load(counts_ptr + request)
    # Flags are integers that stay 1 until something speaks against it.
    is_usable, stands = tl.full((), 1, tl.int64), tl.full((), 1, tl.int64)
    usable, accepted = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for place in range(drafts):
        draft = tl.load(drafts_ptr + request * drafts + place)
        is_usable = is_usable * ((place < count) & (draft >= 0)).to(tl.int64)
        row = first + tl.minimum(place, count)
        drafted = tl.full((), 0, tl.int64)
        distribution = request * drafts + place
        for start in range(0, kept, KEPT_BLOCK):
            inside = start + number < kept
            ids = tl.load(ids_ptr + distribution * kept + start + number, mask=inside, other=_PLACEHOLDER)
            weights = tl.load(kept_ptr + distribution * kept + start + number, mask=inside, other=0)
            drafted += tl.sum(tl.where(ids == draft, weights, 0), 0)
        draft_sum = tl.load(draft_sums_ptr + distribution)
        draft_chance = drafted.to(tl.float64) / tl.maximum(draft_sum, 1).to(tl.float64)
        weight = tl.load(weights_ptr + row * width + tl.maximum(draft, 0))
        target_chance = weight.to(tl.float64) / row_total(sums_ptr, row, chunks, CHUNK_BLOCK).to(tl.float64)
        coin = uniform_of(tl.load(seeds_ptr + row), tl.load(accept_ptr + row))
        is_accepted = (draft_sum > 0) & (coin * draft_chance < target_chance)
        forced = tl.load(forced_ptr + row)
        is_accepted = tl.where(forced >= 0, forced == draft, is_accepted) & (tl.load(status_ptr + row) == _OK)
        stands = stands * is_usable * is_accepted.to(tl.int64)
        usable += is_usable
        accepted += stands
    row = first + accepted
    is_rejected = accepted < usable
    tl.store(accepted_ptr + request, accepted)
    tl.store(rejected_ptr + request, is_rejected.to(tl.int64))
    tl.store(row_ptr + request, row)
    tl.store(row_status_ptr + request, tl.load(status_ptr + row))
    tl.store(row_forced_ptr + request, tl.load(forced_ptr + row))
    stream = tl.where(is_rejected, tl.load(resample_ptr + row), tl.load(streams_ptr + row))
    tl.store(uniform_ptr + request, uniform_of(tl.load(seeds_ptr + row), stream))
    if is_rejected:
        distribution = request * drafts + accepted
        draft_sum = tl.maximum(tl.load(draft_sums_ptr + distribution), 1).to(tl.float64)
        for start in range(0, kept, KEPT_BLOCK):
            inside = start + number < kept
            weights = tl.load(kept_ptr + distribution * kept + start + number, mask=inside, other=0)
            share = weights.to(tl.float64) / draft_sum
            tl.store(
                taken_ptr + request * kept + start + number,
                share * tl.full((), _RESIDUAL_SHARE, tl.float64),
                mask=inside,
            )


@kernel(unaligned=("tokens_ptr", "status_ptr", "first_ptr", "counts_ptr", "drafts_ptr"))
def match_kernel(
    tokens_ptr: tl.tensor,
    status_ptr: tl.tensor,
    first_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    drafts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    accepted_ptr: tl.tensor,
    row_status_ptr: tl.tensor,
    drafts: tl.int64,
) -> None:
    """One program a request: drafts stand as long as they are what the target draws itself."""
    request = tl.program_id(0).to(tl.int64)
    first, count = tl.load(first_ptr + request), tl.load(counts_ptr + request)
    stands, accepted = tl.full((), 1, tl.int64), tl.full((), 0, tl.int64)
    for place in range(drafts):
        draft = tl.load(drafts_ptr + request * drafts + place)
        row = first + tl.minimum(place, count)
        is_drawn = (tl.load(tokens_ptr + row) == draft) & (tl.load(status_ptr + row) == _OK)
        stands = stands * ((place < count) & (draft >= 0) & is_drawn).to(tl.int64)
        accepted += stands
    status = tl.load(status_ptr + first + accepted)
    own = tl.where(status == _OK, tl.load(tokens_ptr + first + accepted), _PLACEHOLDER)
    tl.store(accepted_ptr + request, accepted)
    tl.store(row_status_ptr + request, status)
    store_run(out_ptr, drafts_ptr, request, drafts, accepted, own)


@cache
def judge_configuration(width: int) -> Configuration:
    """Return the configuration that judges drafts over rows of one width."""
    signature = pointers(weights_ptr=_WHOLE, sums_ptr=_WHOLE, status_ptr=torch.int32)
    signature |= pointers(
        seeds_ptr=_WHOLE, streams_ptr=_WHOLE, resample_ptr=_WHOLE, accept_ptr=_WHOLE, forced_ptr=_WHOLE,
        first_ptr=_WHOLE, counts_ptr=_WHOLE, drafts_ptr=_WHOLE, ids_ptr=_WHOLE, kept_ptr=_WHOLE, draft_sums_ptr=_WHOLE,
        accepted_ptr=_WHOLE, rejected_ptr=_WHOLE, row_ptr=_WHOLE, row_status_ptr=torch.int32, row_forced_ptr=_WHOLE,
    )  # fmt: skip
    signature |= {"uniform_ptr": "*fp64", "taken_ptr": "*fp64"}
    signature |= {"width": "i64", "chunks": "i64", "drafts": "i64", "kept": "i64"}
    return Configuration(judge_kernel, signature, kept_constants(width), warps_for(KEPT_BLOCK))


@cache
def match_configuration() -> Configuration:
    """Return the one configuration of matching."""
    signature = pointers(
        tokens_ptr=_WHOLE, status_ptr=torch.int32, first_ptr=_WHOLE, counts_ptr=_WHOLE, drafts_ptr=_WHOLE,
        out_ptr=_WHOLE, accepted_ptr=_WHOLE, row_status_ptr=torch.int32,
    )  # fmt: skip
    return Configuration(match_kernel, {**signature, "drafts": "i64"}, {}, num_warps=1)


def configurations(width: int) -> Iterator[Configuration]:
    """Yield what judging drafts over one vocabulary uses."""
    yield judge_configuration(width)
    yield match_configuration()


class VerificationStreams(NamedTuple):
    """Streams int64 [B] of the draws after a rejection, and of the acceptance coins."""

    resample_B: Tensor
    accept_B: Tensor


class Judgement(NamedTuple):
    """What stands of each request's drafts, and what the draw behind them needs but its weights.

    Attributes:
        accepted_R: int64 [R], drafts that stand.
        rejected_R: int64 [R], 1 where a draft was rejected behind them.
        row_R: int64 [R], the row of that draw.
        status_R: int32 [R], its status.
        forced_R: int64 [R], its forced token, or -1.
        uniform_R: float64 [R], its random number.
        taken_RK: float64 [R, K], what a rejected draft's kept tokens take from the target's shares. Stored, so that no
            compiler fuses this product with the difference: each is rounded once.
    """

    accepted_R: Tensor
    rejected_R: Tensor
    row_R: Tensor
    status_R: Tensor
    forced_R: Tensor
    uniform_R: Tensor
    taken_RK: Tensor


def judge(
    weights: ChunkWeights,
    rows: SamplingRows,
    runs: DraftRuns,
    distributions: DraftDistributions,
    streams: VerificationStreams,
) -> Judgement:
    """Accept drafts by coins: see :meth:`deepinfer.accelerator.ops.DraftingOps.verify`."""
    requests, drafts = runs.token_ids_Rn.shape
    kept = distributions.ids_RnK.shape[2]
    width, chunks = weights.weights_BV.shape[1], weights.sums_Bc.shape[1]
    found = Judgement(
        accepted_R=fresh(runs, requests),
        rejected_R=fresh(runs, requests),
        row_R=fresh(runs, requests),
        status_R=fresh(runs, requests, dtype=torch.int32),
        forced_R=fresh(runs, requests),
        uniform_R=fresh(runs, requests, dtype=torch.float64),
        taken_RK=fresh(runs, requests, kept, dtype=torch.float64),
    )
    launch(
        judge_configuration(width), (requests,), *weights, rows.seeds_B.contiguous(), rows.streams_B.contiguous(),
        streams.resample_B.contiguous(), streams.accept_B.contiguous(), rows.forced_ids_B.contiguous(),
        runs.first_row_R.contiguous(), runs.counts_R.contiguous(), runs.token_ids_Rn.contiguous(),
        distributions.ids_RnK.contiguous(), distributions.weights_RnK.contiguous(),
        distributions.sums_Rn.contiguous(), *found, width, chunks, drafts, kept,
    )  # fmt: skip
    return found


def match(tokens: SampledTokens, runs: DraftRuns) -> Verdicts:
    """See :meth:`deepinfer.accelerator.ops.DraftingOps.match`."""
    requests, drafts = runs.token_ids_Rn.shape
    token_ids_Rm, accepted_R = fresh(runs, requests, drafts + 1), fresh(runs, requests)
    status_R = fresh(runs, requests, dtype=torch.int32)
    launch(
        match_configuration(), (requests,), tokens.token_ids_B.contiguous(), tokens.status_B.contiguous(),
        runs.first_row_R.contiguous(), runs.counts_R.contiguous(), runs.token_ids_Rn.contiguous(), token_ids_Rm,
        accepted_R, status_R, drafts,
    )  # fmt: skip
    return Verdicts(token_ids_Rm, accepted_R, status_R)


def kept_constants(width: int) -> dict[str, int | bool]:
    """Return the constants of kernels that read sums of chunks and kept tokens."""
    return {"CHUNK_BLOCK": chunk_constants(width)["CHUNK_BLOCK"], "KEPT_BLOCK": KEPT_BLOCK}


def fresh(runs: DraftRuns, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return memory for a result, where the runs are."""
    return torch.empty(shape, dtype=dtype, device=runs.counts_R.device)
