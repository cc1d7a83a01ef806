"""What is emitted behind the drafts that stand: a draw from the target's row, or from what a rejected draft leaves.

Probabilities are single float64 divisions and products, each rounded once: the same verdicts on every device.

Legend: R requests, n drafts a request, m = n + 1 most tokens of a run, V vocabulary, c chunks, K kept tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton.language as tl

from deepinfer.accelerator.ops.drafting import PLACEHOLDER, DraftDistributions, DraftRuns, Verdicts
from deepinfer.accelerator.ops.sampling import WEIGHT_BITS, RowStatus, SamplingRows
from deepinfer_triton import token_draw
from deepinfer_triton.configuration import Configuration, launch, pointers, warps_for
from deepinfer_triton.draft_judgement import (
    KEPT_BLOCK,
    VerificationStreams,
    fresh,
    judge,
    kept_constants,
    row_total,
    store_run,
)
from deepinfer_triton.jit import kernel
from deepinfer_triton.token_weights import (
    ChunkMaxima,
    ChunkWeights,
    chunk_constants,
    chunk_of,
    row_best_token,
    row_largest,
)

_OK = tl.constexpr(int(RowStatus.OK))
_PLACEHOLDER = tl.constexpr(PLACEHOLDER)
_LARGEST_WEIGHT = tl.constexpr(2.0**WEIGHT_BITS)
_WHOLE = torch.int64


@kernel()
def own_weights_kernel(
    weights_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    rejected_ptr: tl.tensor,
    row_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.int64,
    chunks: tl.int64,
    CHUNK: tl.constexpr,
    CHUNK_BLOCK: tl.constexpr,
) -> None:
    """One program a request and a chunk: the row's own weights, or after a rejection its shares before any is taken."""
    request, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(row_ptr + request)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < width
    weight = tl.load(weights_ptr + row * width + token, mask=inside, other=0)
    if tl.load(rejected_ptr + request) != 0:
        share = weight.to(tl.float64) / row_total(sums_ptr, row, chunks, CHUNK_BLOCK).to(tl.float64)
        weight = tl.floor(share * _LARGEST_WEIGHT).to(tl.int64)
    tl.store(out_ptr + request * width + token, weight, mask=inside)


@kernel(unaligned=("ids_ptr",))
def taken_shares_kernel(
    weights_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    accepted_ptr: tl.tensor,
    rejected_ptr: tl.tensor,
    row_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    taken_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.int64,
    chunks: tl.int64,
    drafts: tl.int64,
    kept: tl.int64,
    CHUNK_BLOCK: tl.constexpr,
    KEPT_BLOCK: tl.constexpr,
) -> None:
    """One program a request and a block of kept tokens: what the target has more of than the rejected draft."""
    request = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * KEPT_BLOCK + tl.arange(0, KEPT_BLOCK)
    if tl.load(rejected_ptr + request) != 0:
        row = tl.load(row_ptr + request)
        distribution = request * drafts + tl.load(accepted_ptr + request)
        token = tl.load(ids_ptr + distribution * kept + number, mask=number < kept, other=_PLACEHOLDER)
        has_token = token >= 0
        weight = tl.load(weights_ptr + row * width + token, mask=has_token, other=0)
        share = weight.to(tl.float64) / row_total(sums_ptr, row, chunks, CHUNK_BLOCK).to(tl.float64)
        taken = tl.load(taken_ptr + request * kept + number, mask=has_token, other=0.0)
        left = tl.floor(tl.maximum(share - taken, 0.0) * _LARGEST_WEIGHT).to(tl.int64)
        tl.store(out_ptr + request * width + token, left, mask=has_token)


@kernel(unaligned=("drafts_ptr",))
def verdict_kernel(
    own_ptr: tl.tensor,
    own_sums_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    token_ptr: tl.tensor,
    accepted_ptr: tl.tensor,
    row_ptr: tl.tensor,
    row_status_ptr: tl.tensor,
    row_forced_ptr: tl.tensor,
    drafts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    chunks: tl.int64,
    drafts: tl.int64,
    CHUNK_BLOCK: tl.constexpr,
) -> None:
    """One program a request: its run. Where flooring left no mass at all, the best token is drawn."""
    request = tl.program_id(0).to(tl.int64)
    own = tl.load(own_ptr + request)
    chunk = tl.arange(0, CHUNK_BLOCK)
    mass = tl.sum(tl.load(own_sums_ptr + request * chunks + chunk, mask=chunk < chunks, other=0), 0)
    row = tl.load(row_ptr + request)
    largest = row_largest(largest_ptr, row, chunks, CHUNK_BLOCK)
    best = row_best_token(largest_ptr, token_ptr, row, chunks, largest, CHUNK_BLOCK).to(tl.int64)
    is_best = (mass == 0) & (tl.load(row_forced_ptr + request) < 0) & (tl.load(row_status_ptr + request) == _OK)
    store_run(
        out_ptr, drafts_ptr, request, drafts, tl.load(accepted_ptr + request), tl.where(is_best, best, own)
    )  # fmt: skip


@cache
def own_configuration(width: int) -> Configuration:
    """Return the configuration that takes weights from rows of one width."""
    signature = pointers(weights_ptr=_WHOLE, sums_ptr=_WHOLE, rejected_ptr=_WHOLE, row_ptr=_WHOLE, out_ptr=_WHOLE)
    signature |= {"width": "i64", "chunks": "i64"}
    return Configuration(own_weights_kernel, signature, chunk_constants(width), warps_for(chunk_of(width)))


@cache
def taken_configuration(width: int) -> Configuration:
    """Return the configuration that takes shares from rows of one width."""
    signature = pointers(weights_ptr=_WHOLE, sums_ptr=_WHOLE, accepted_ptr=_WHOLE, rejected_ptr=_WHOLE)
    signature |= {**pointers(row_ptr=_WHOLE, ids_ptr=_WHOLE), "taken_ptr": "*fp64", "out_ptr": "*i64"}
    signature |= {"width": "i64", "chunks": "i64", "drafts": "i64", "kept": "i64"}
    return Configuration(taken_shares_kernel, signature, kept_constants(width), warps_for(KEPT_BLOCK))


@cache
def verdict_configuration(width: int) -> Configuration:
    """Return the configuration that writes runs after rows of one width."""
    signature = pointers(
        own_ptr=_WHOLE, own_sums_ptr=_WHOLE, largest_ptr=torch.float32, token_ptr=torch.int32, accepted_ptr=_WHOLE,
        row_ptr=_WHOLE, row_status_ptr=torch.int32, row_forced_ptr=_WHOLE, drafts_ptr=_WHOLE, out_ptr=_WHOLE,
    )  # fmt: skip
    constants = {"CHUNK_BLOCK": chunk_constants(width)["CHUNK_BLOCK"]}
    return Configuration(verdict_kernel, {**signature, "chunks": "i64", "drafts": "i64"}, constants, num_warps=1)


def configurations(width: int) -> Iterator[Configuration]:
    """Yield what draws behind drafts use over one vocabulary."""
    yield own_configuration(width)
    yield taken_configuration(width)
    yield verdict_configuration(width)


def verify(
    weights: ChunkWeights,
    maxima: ChunkMaxima,
    rows: SamplingRows,
    runs: DraftRuns,
    distributions: DraftDistributions,
    streams: VerificationStreams,
) -> Verdicts:
    """See :meth:`deepinfer.accelerator.ops.DraftingOps.verify`; ``weights`` and ``maxima`` are those of its logits."""
    requests, drafts = runs.token_ids_Rn.shape
    width, kept = weights.weights_BV.shape[1], distributions.ids_RnK.shape[2]
    chunks = weights.sums_Bc.shape[1]
    found = judge(weights, rows, runs, distributions, streams)
    own_RV = fresh(runs, requests, width)
    launch(
        own_configuration(width), (requests, chunks), weights.weights_BV, weights.sums_Bc, found.rejected_R,
        found.row_R, own_RV, width, chunks,
    )  # fmt: skip
    launch(
        taken_configuration(width), (requests, -(-kept // KEPT_BLOCK)), weights.weights_BV, weights.sums_Bc,
        found.accepted_R, found.rejected_R, found.row_R, distributions.ids_RnK.contiguous(), found.taken_RK, own_RV,
        width, chunks, drafts, kept,
    )  # fmt: skip
    own_sums_Rc = token_draw.chunk_sums(own_RV)
    own_R = token_draw.draw(own_RV, own_sums_Rc, found.status_R, found.uniform_R, found.forced_R)
    token_ids_Rm = fresh(runs, requests, drafts + 1)
    launch(
        verdict_configuration(width), (requests,), own_R, own_sums_Rc, *maxima, found.accepted_R, found.row_R,
        found.status_R, found.forced_R, runs.token_ids_Rn.contiguous(), token_ids_Rm, chunks, drafts,
    )  # fmt: skip
    return Verdicts(token_ids_Rm, found.accepted_R, found.status_R)
