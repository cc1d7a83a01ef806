"""Oracle ops around paged memory. Every record that a row may see is really read, through ring, table and slot.

Attention and selection read each request's positions and entries once and give every row the sum over its own range:
within one step all rows of a request read the same bytes, and a term does not depend on who reads it.

Legend: T rows, R requests, L window positions of a request, E visible entries of the longest request, K selected
entries, B candidate blocks or blocks of a table, H heads, C head width, b record bytes, n records, W pending width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import EntryCache, IndexCache, PendingCache, WindowCache
from deepinfer.accelerator.ops.attention import AttentionOps, LongRange
from deepinfer.accelerator.ops.codec import CodecOps
from deepinfer.accelerator.ops.compression import CompressionOps
from deepinfer.numerics import RecordFormat
from deepinfer_conformance.drivers.host import OptionedGroup
from deepinfer_conformance.drivers.oracle.hashing import (
    CHANNELS,
    Role,
    attended,
    linear_of,
    pair_of,
    pending_linear,
    picks_term,
    term,
)
from deepinfer_conformance.drivers.oracle.records import (
    HEAD_BYTES,
    key_sections,
    packed,
    read,
    read_whole,
    tail_bytes,
    unpacked,
)


class OracleCodec(OptionedGroup, CodecOps):
    """Records hold three integers and a check."""

    def encode(self, x_TC: torch.Tensor, record_format: RecordFormat) -> torch.Tensor:
        """Return the records of the rows."""
        return packed(x_TC, record_format)

    def store_window(self, cache: WindowCache, records_Tb: torch.Tensor, slot_T: torch.Tensor) -> None:
        """Write records at ``z * ring + place``."""
        _scatter(cache.bytes_ZRb, records_Tb, slot_T)

    def store_entries(self, cache: EntryCache, x_TC: torch.Tensor, slot_T: torch.Tensor) -> None:
        """Write the rows' records at ``block * entries + offset``."""
        _scatter(cache.bytes_NEb, packed(x_TC, cache.format), slot_T)

    def store_index_keys(self, cache: IndexCache, x_TC: torch.Tensor, slot_T: torch.Tensor) -> None:
        """Write the rows' records, data and scales apart."""
        parts, sections = cache.format.split(packed(x_TC, cache.format)), key_sections(cache)
        _scatter(sections.data, parts.data, slot_T)
        if cache.format.scale_bytes:
            _scatter(sections.scales, parts.scales, slot_T)

    def gather_window(self, cache: WindowCache, slot_n: torch.Tensor) -> torch.Tensor:
        """Return rows with the three integers."""
        return _gather(cache.bytes_ZRb, slot_n, cache.format)

    def gather_entries(self, cache: EntryCache, slot_n: torch.Tensor) -> torch.Tensor:
        """Return rows with the three integers."""
        return _gather(cache.bytes_NEb, slot_n, cache.format)

    def gather_index_keys(self, cache: IndexCache, slot_n: torch.Tensor) -> torch.Tensor:
        """Return rows with the three integers."""
        return _gather(key_sections(cache).data, slot_n, cache.format)


class OracleCompression(OptionedGroup, CompressionOps):
    """A pair's entry is a hash of both rows and their positions."""

    def pool_pairs(
        self, gate_TC: torch.Tensor, latent_TC: torch.Tensor, pending: PendingCache, step: StepLayout
    ) -> torch.Tensor:
        """Hash rows p-1 and p; what waits is stored with its position in channel 2 of both halves."""
        width = latent_TC.shape[1]
        rows_TW = torch.cat((gate_TC, latent_TC), dim=1).to(torch.float32)
        rows_TW[:, 2] = step.position_T
        rows_TW[:, width + 2] = step.position_T + 1
        slot_T = step.state_slots_R[step.request_T]
        before_TW = pending.rows_ZPW[slot_T, (step.position_T - 1) % pending.capacity]
        inside_T = torch.arange(step.rows) > step.row_starts_R1[step.request_T]
        before_TW = torch.where(inside_T[:, None], rows_TW.roll(1, 0), before_TW)

        pair = pair_of(_waiting_linear(before_TW), _waiting_linear(rows_TW))
        pooled_TC = torch.zeros_like(latent_TC, memory_format=torch.contiguous_format)
        complete_T = step.valid_T & (step.position_T % 2 == 1)
        pooled_TC[:, 0] = torch.where(complete_T, pair.ids, 0)
        pooled_TC[:, 1] = torch.where(complete_T, pair.digests, 0)

        # Of a chunk longer than the state only the last rows are kept, or two of them would claim one place.
        valid_position_T = torch.where(step.valid_T, step.position_T, -1)
        newest_R = step.cached_R.new_full((step.requests,), -1)
        newest_R = newest_R.scatter_reduce(0, step.request_T, valid_position_T, "amax")
        kept_T = step.valid_T & (step.position_T > newest_R[step.request_T] - pending.capacity)
        pending.rows_ZPW[slot_T[kept_T], step.position_T[kept_T] % pending.capacity] = rows_TW[kept_T]
        return pooled_TC


class OracleAttention(OptionedGroup, AttentionOps):
    """The digest of a row folds every window record and every visible entry that it may read."""

    def sparse(
        self,
        query_THC: torch.Tensor,
        own_records_Tb: torch.Tensor,
        window: WindowCache,
        long_range: LongRange | None,
        sinks_H: torch.Tensor,
        window_size: int,
        step: StepLayout,
    ) -> torch.Tensor:
        """Return the query with a new digest in channel 1 of head 0."""
        del sinks_H
        output_THC = torch.zeros_like(query_THC, memory_format=torch.contiguous_format)
        if step.rows == 0:
            return output_THC
        words_T3 = query_THC[:, 0, :CHANNELS].to(torch.int64)
        ends = request_ends(step)
        window_sum_T = _window_sums(own_records_Tb, window, window_size, step, ends)
        entry_sum_T: torch.Tensor | int = 0
        picks_sum_T: torch.Tensor | int = 0
        if long_range is not None:
            entry_sum_T = _entry_sums(long_range.cache, step, ends)
            picks_sum_T = picks_term(long_range.entries_TK)
        digest_T = attended(linear_of(words_T3), step.position_T, window_sum_T, entry_sum_T, picks_sum_T)
        output_THC[:, 0, :CHANNELS] = words_T3.to(output_THC.dtype)
        output_THC[:, 0, 1] = digest_T.to(output_THC.dtype)
        return output_THC


@dataclass(frozen=True, slots=True)
class RequestEnds:
    """First and last position [R] that each request has in a step; meaningless for a request without rows."""

    first_R: torch.Tensor
    last_R: torch.Tensor


def request_ends(step: StepLayout) -> RequestEnds:
    """Return the first and last positions of a step that has rows."""
    starts_R, stops_R = step.row_starts_R1[:-1], step.row_starts_R1[1:]
    return RequestEnds(
        first_R=step.position_T[starts_R.clamp(max=step.rows - 1)],
        last_R=step.position_T[(stops_R - 1).clamp(min=0)],
    )


@dataclass(frozen=True, slots=True)
class EntryPlaces:
    """Where the entries of all requests lie, up to the most that any row sees.

    Attributes:
        entries_E: entry numbers.
        blocks_RE: block of each entry; the last block of the table where it is too short.
        offsets_E: place inside the block.
        visible_RE: the last row of the request sees the entry.
    """

    entries_E: torch.Tensor
    blocks_RE: torch.Tensor
    offsets_E: torch.Tensor
    visible_RE: torch.Tensor


def entry_places(step: StepLayout, ends: RequestEnds, ratio: int, entries_per_block: int) -> EntryPlaces:
    """Return the places of entries through the block table."""
    entries_E = torch.arange(step.max_position // ratio)
    # A table that is too short is the engine's mistake and must give a wrong token, not a crash here.
    column_E = (entries_E // entries_per_block).clamp(max=step.block_table_RB.shape[1] - 1)
    return EntryPlaces(
        entries_E=entries_E,
        blocks_RE=step.block_table_RB[:, column_E],
        offsets_E=entries_E % entries_per_block,
        visible_RE=entries_E < ((ends.last_R + 1) // ratio)[:, None],
    )


def _window_sums(
    own_records_Tb: torch.Tensor, window: WindowCache, window_size: int, step: StepLayout, ends: RequestEnds
) -> torch.Tensor:
    before = window_size - 1
    position_RL = (ends.first_R - before)[:, None] + torch.arange(before + step.max_rows)
    lowest_R = step.window_start_R.clamp(min=0)
    seen_RL = (position_RL >= lowest_R[:, None]) & (position_RL <= ends.last_R[:, None])
    slots_R1 = step.state_slots_R[:, None]
    places_RL = position_RL % window.ring
    tail = tail_bytes(window.format)
    heads = window.bytes_ZRb[..., :HEAD_BYTES][slots_R1, places_RL]
    tails = window.bytes_ZRb[..., -tail:][slots_R1, places_RL]
    if step.kind == "prefill":
        # The ring still holds what it held before the chunk. (In a decode step it holds the step's records too, and
        # reading them there shows whether they were stored.)
        own_RL = position_RL >= ends.first_R[:, None]
        row_RL = (step.row_starts_R1[:-1, None] + position_RL - ends.first_R[:, None]).clamp(0, step.rows - 1)
        heads = torch.where(own_RL[..., None], own_records_Tb[:, :HEAD_BYTES][row_RL], heads)
        tails = torch.where(own_RL[..., None], own_records_Tb[:, -tail:][row_RL], tails)
    records = read(heads, tails)
    terms_RL = term(Role.WINDOW, position_RL, records.linear, records.damage)
    sums_RL = _running_sums(terms_RL, seen_RL)
    start_T = step.position_T - ends.first_R[step.request_T]
    return sums_RL[step.request_T, start_T + window_size] - sums_RL[step.request_T, start_T]


def _entry_sums(cache: EntryCache, step: StepLayout, ends: RequestEnds) -> torch.Tensor:
    places = entry_places(step, ends, cache.ratio, cache.entries_per_block)
    records = read_whole(cache.bytes_NEb[places.blocks_RE, places.offsets_E], cache.format)
    terms_RE = term(Role.ENTRY, places.entries_E, records.linear, records.damage)
    sums_RE = _running_sums(terms_RE, places.visible_RE)
    return sums_RE[step.request_T, (step.position_T + 1) // cache.ratio]


def _running_sums(terms_RL: torch.Tensor, kept_RL: torch.Tensor) -> torch.Tensor:
    """Return [R, L + 1]: column i is the sum of the kept terms before i."""
    sums_RL = torch.where(kept_RL, terms_RL, 0).cumsum(1)
    return torch.nn.functional.pad(sums_RL, (1, 0))


def _waiting_linear(rows_TW: torch.Tensor) -> torch.Tensor:
    width = rows_TW.shape[1] // 2
    gate_T = linear_of(rows_TW[:, :CHANNELS].to(torch.int64))
    return pending_linear(gate_T, linear_of(rows_TW[:, width : width + CHANNELS].to(torch.int64)))


def _scatter(target: torch.Tensor, records_nb: torch.Tensor, slot_n: torch.Tensor) -> None:
    kept_n = slot_n >= 0
    slots, per_item = slot_n[kept_n], target.shape[1]
    target[slots // per_item, slots % per_item] = records_nb[kept_n]


def _gather(source: torch.Tensor, slot_n: torch.Tensor, record_format: RecordFormat) -> torch.Tensor:
    place_n, per_item = slot_n.clamp(min=0), source.shape[1]
    rows_nC = unpacked(source[place_n // per_item, place_n % per_item], record_format)
    return torch.where((slot_n >= 0)[:, None], rows_nC, 0.0)
