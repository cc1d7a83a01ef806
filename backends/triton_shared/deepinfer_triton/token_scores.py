"""Log-probabilities of one chosen token and of a row's best tokens.

The normaliser is a sum of integers, chunk by chunk. The best tokens come from the chunks' best ones: whenever a token
is listed, its chunk is searched for the next one after it.

Legend: B rows, V vocabulary, N listed tokens, c chunks.
"""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.accelerator.ops.sampling import (
    NO_MASS,
    NORMALISER_BITS,
    RowStatus,
    SamplingRows,
    TokenLogProbabilities,
)
from deepinfer_triton.configuration import Configuration, launch, pointers, warps_for
from deepinfer_triton.jit import device_function, kernel
from deepinfer_triton.number_formats import order_keys
from deepinfer_triton.token_weights import (
    ChunkMaxima,
    chunk_constants,
    chunk_of,
    exponential,
    row_largest,
    row_status,
)

_INFINITY = tl.constexpr(float("inf"))
_UNITS = tl.constexpr(2.0**NORMALISER_BITS)
_UNIT = tl.constexpr(2.0**-NORMALISER_BITS)
_NO_MASS = tl.constexpr(NO_MASS)
_OK = tl.constexpr(int(RowStatus.OK))
_NO_TOKEN = tl.constexpr(2**31 - 1)
_LOWEST_KEY = tl.constexpr(2**31)


@device_function
def token_keys(
    logits_row: tl.tensor, weights_row: tl.tensor, token: tl.tensor, inside: tl.tensor, BY_WEIGHT: tl.constexpr
) -> tl.tensor:
    """Return int64 in the order in which tokens are listed; 0 for what is not listed."""
    if BY_WEIGHT:
        key = tl.load(weights_row + token, mask=inside, other=0)
    else:
        x = tl.load(logits_row + token, mask=inside, other=0.0 - _INFINITY)
        key = tl.where(x > 0.0 - _INFINITY, order_keys(x).to(tl.int64) + _LOWEST_KEY, 0)
    return key


@device_function
def row_temperature(temperature_ptr: tl.tensor, row: tl.tensor, BY_WEIGHT: tl.constexpr) -> tl.tensor:
    """Return the row's divisor: 1 without settings, and where all mass lies on one token."""
    temperature = tl.full((), 1.0, tl.float64)
    if BY_WEIGHT:
        own = tl.load(temperature_ptr + row)
        temperature = tl.where(own == 0.0, temperature, own)
    return temperature


@device_function
def has_filter(
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_weight_ptr: tl.tensor,
    row: tl.tensor,
    width: tl.tensor,
) -> tl.tensor:
    """Return whether a row's tokens of weight 0 are out."""
    top_k = tl.load(top_k_ptr + row)
    by_count = (top_k > 0) & (top_k < width)
    by_share = (tl.load(top_p_ptr + row) < 1.0) | (tl.load(min_weight_ptr + row) > 0)
    return by_count | by_share | (tl.load(temperature_ptr + row) == 0.0)


@kernel(unaligned=("logits_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_weight_ptr"))
def score_chunks_kernel(
    logits_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_weight_ptr: tl.tensor,
    units_ptr: tl.tensor,
    key_ptr: tl.tensor,
    token_ptr: tl.tensor,
    width: tl.int64,
    stride: tl.int64,
    CHUNK: tl.constexpr,
    CHUNK_BLOCK: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
) -> None:
    """One program a row and a chunk: its part of the normaliser, and its best token."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1)
    largest = row_largest(largest_ptr, row, chunks, CHUNK_BLOCK)
    is_usable = row_status(largest) == _OK
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < width
    x = tl.load(logits_ptr + row * stride + token, mask=inside, other=0.0 - _INFINITY)
    key = token_keys(logits_ptr + row * stride, weights_ptr + row * width, token, inside, BY_WEIGHT)
    units = (exponential(x, largest, row_temperature(temperature_ptr, row, BY_WEIGHT)) * _UNITS).to(tl.int64)
    kept = is_usable & (x > 0.0 - _INFINITY)
    if BY_WEIGHT:
        is_filtered = has_filter(temperature_ptr, top_k_ptr, top_p_ptr, min_weight_ptr, row, width)
        kept = kept & ((key > 0) | (is_filtered == 0))
    key = tl.where(is_usable, key, 0)
    best = tl.max(key, 0)
    place = row * chunks + chunk
    tl.store(units_ptr + place, tl.sum(tl.where(kept, units, 0), 0))
    tl.store(key_ptr + place, best)
    tl.store(token_ptr + place, tl.min(tl.where(key == best, token, _NO_TOKEN), 0))


@device_function
def log_probability(
    x: tl.tensor, largest: tl.tensor, temperature: tl.tensor, log_total: tl.tensor, is_present: tl.tensor
) -> tl.tensor:
    """Return float32, NO_MASS for what is absent or lower."""
    value = ((x.to(tl.float64) - largest.to(tl.float64)) / temperature - log_total).to(tl.float32)
    return tl.where(is_present & (value > _NO_MASS), value, _NO_MASS)


@kernel(unaligned=("logits_ptr", "chosen_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_weight_ptr"))
def token_scores_kernel(
    logits_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_weight_ptr: tl.tensor,
    units_ptr: tl.tensor,
    key_ptr: tl.tensor,
    token_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    chosen_value_ptr: tl.tensor,
    top_id_ptr: tl.tensor,
    top_value_ptr: tl.tensor,
    width: tl.int64,
    stride: tl.int64,
    chunks: tl.int64,
    top_count: tl.int64,
    CHUNK: tl.constexpr,
    CHUNK_BLOCK: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
) -> None:
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    largest = row_largest(largest_ptr, row, chunks, CHUNK_BLOCK)
    is_usable = row_status(largest) == _OK
    temperature = row_temperature(temperature_ptr, row, BY_WEIGHT)
    logits_row, weights_row = logits_ptr + row * stride, weights_ptr + row * width
    number = tl.arange(0, CHUNK_BLOCK)
    real = number < chunks
    total = tl.sum(tl.load(units_ptr + row * chunks + number, mask=real, other=0), 0)
    log_total = tl.log(tl.where(is_usable, total, 1).to(tl.float64) * _UNIT)

    chosen = tl.load(chosen_ptr + row)
    is_token = is_usable & (chosen >= 0)
    x = tl.load(logits_row + chosen, mask=is_token, other=0.0 - _INFINITY)
    is_kept = is_token & (x > 0.0 - _INFINITY)
    if BY_WEIGHT:
        is_filtered = has_filter(temperature_ptr, top_k_ptr, top_p_ptr, min_weight_ptr, row, width)
        weight = tl.load(weights_row + chosen, mask=is_token, other=0)
        is_kept = is_kept & ((weight > 0) | (is_filtered == 0))
    tl.store(chosen_value_ptr + row, log_probability(x, largest, temperature, log_total, is_kept))

    keys = tl.load(key_ptr + row * chunks + number, mask=real, other=0)
    tokens = tl.load(token_ptr + row * chunks + number, mask=real, other=_NO_TOKEN)
    for place in range(0, top_count):
        key = tl.max(keys, 0)
        best_chunk = tl.min(tl.where(keys == key, number, CHUNK_BLOCK), 0)
        is_listed = key > 0
        best = tl.where(is_listed, tl.sum(tl.where(number == best_chunk, tokens, 0), 0), -1)
        x = tl.load(logits_row + best, mask=is_listed, other=0.0 - _INFINITY)
        tl.store(top_id_ptr + row * top_count + place, best.to(tl.int64))
        value = log_probability(x, largest, temperature, log_total, is_listed)
        tl.store(top_value_ptr + row * top_count + place, value)
        token = best_chunk * CHUNK + tl.arange(0, CHUNK)
        inside = (token < width) & is_listed
        others = token_keys(logits_row, weights_row, token, inside, BY_WEIGHT)
        comes_after = (others < key) | ((others == key) & (token > best))
        others = tl.where(comes_after, others, 0)
        following = tl.max(others, 0)
        keys = tl.where(number == best_chunk, following, keys)
        first = tl.min(tl.where(comes_after & (others == following), token, _NO_TOKEN), 0)
        tokens = tl.where(number == best_chunk, first, tokens)


_SETTINGS = {
    "temperature_ptr": "*fp64",
    "top_k_ptr": "*i64",
    "top_p_ptr": "*fp64",
    "min_weight_ptr": "*i64",
    "units_ptr": "*i64",
    "key_ptr": "*i64",
    "token_ptr": "*i32",
}


@cache
def chunks_configuration(width: int, *, by_weight: bool) -> Configuration:
    """Return the configuration of normalisers for rows of one width."""
    signature = pointers(logits_ptr=torch.float32, weights_ptr=torch.int64, largest_ptr=torch.float32) | _SETTINGS
    signature |= {"width": "i64", "stride": "i64"}
    constants = {**chunk_constants(width), "BY_WEIGHT": by_weight}
    return Configuration(score_chunks_kernel, signature, constants, warps_for(chunk_of(width)))


@cache
def scores_configuration(width: int, *, by_weight: bool) -> Configuration:
    """Return the configuration of lists for rows of one width."""
    signature = pointers(logits_ptr=torch.float32, weights_ptr=torch.int64, largest_ptr=torch.float32) | _SETTINGS
    signature |= pointers(
        chosen_ptr=torch.int64, chosen_value_ptr=torch.float32, top_id_ptr=torch.int64, top_value_ptr=torch.float32
    )
    signature |= dict.fromkeys(("width", "stride", "chunks", "top_count"), "i64")
    constants = {**chunk_constants(width), "BY_WEIGHT": by_weight}
    return Configuration(token_scores_kernel, signature, constants, warps_for(chunk_of(width)))


def token_scores(
    logits_BV: Tensor,
    maxima: ChunkMaxima,
    token_ids_B: Tensor,
    top_count: int,
    processed: tuple[Tensor, SamplingRows] | None,
) -> TokenLogProbabilities:
    """Return log-probabilities: raw ones, or with weights int64 [B, V] and settings those of what they keep."""
    rows, width = logits_BV.shape
    device, chunks = logits_BV.device, maxima.largest_Bc.shape[1]
    units_Bc, key_Bc = (torch.empty((rows, chunks), dtype=torch.int64, device=device) for _ in range(2))
    token_Bc = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    chosen_B = torch.empty(rows, dtype=torch.float32, device=device)
    top_ids_BN = torch.empty((rows, top_count), dtype=torch.int64, device=device)
    top_values_BN = torch.empty((rows, top_count), dtype=torch.float32, device=device)
    whole = torch.empty(0, dtype=torch.int64, device=device)
    doubles = torch.empty(0, dtype=torch.float64, device=device)
    weights_BV, settings = whole, (doubles, whole, doubles, whole)
    if processed is not None:
        weights_BV, own = processed
        settings = tuple(  # type: ignore[assignment]
            value.contiguous() for value in (own.temperature_B, own.top_k_B, own.top_p_B, own.min_weight_B)
        )
    found = (logits_BV, weights_BV, maxima.largest_Bc, *settings, units_Bc, key_Bc, token_Bc)
    by_weight, stride = processed is not None, logits_BV.stride(0)
    launch(chunks_configuration(width, by_weight=by_weight), (rows, chunks), *found, width, stride)
    launch(
        scores_configuration(width, by_weight=by_weight), (rows,), *found, token_ids_B.contiguous(), chosen_B,
        top_ids_BN, top_values_BN, width, stride, chunks, top_count,
    )  # fmt: skip
    return TokenLogProbabilities(chosen_B, top_ids_BN, top_values_BN)
