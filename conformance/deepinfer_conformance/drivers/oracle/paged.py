"""Oracle ops around paged memory. Every record that a row may see is really read, through ring, table and slot.

Attention and selection read each request's positions and entries once and give every row the sum over its own range:
within one step all rows of a request read the same bytes, and a term does not depend on who reads it.

Legend: T rows, R requests, L window positions of a request, E visible entries of the longest request, K selected
entries, B candidate blocks or blocks of a table, H heads, C head width, b record bytes, n records, W pending width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
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
    Flags,
    Hashes,
    Integers,
    Role,
    attended,
    linear_of,
    pair_of,
    pending_linear,
    picks_term,
    term,
)
from deepinfer_conformance.drivers.oracle.records import Bytes, KeySections, packed, read, unpacked
from deepinfer_conformance.drivers.oracle.rows import words_of


class OracleCodec(OptionedGroup, CodecOps):
    """Records hold three integers and a check."""

    def encode(self, x_TC: torch.Tensor, record_format: RecordFormat) -> torch.Tensor:
        """Return the records of the rows."""
        return torch.from_numpy(packed(words_of(x_TC), record_format))

    def store_window(self, cache: WindowCache, records_Tb: torch.Tensor, slot_T: torch.Tensor) -> None:
        """Write records at ``z * ring + place``."""
        _scatter(cache.bytes_ZRb.numpy(), records_Tb.numpy(), slot_T)

    def store_entries(self, cache: EntryCache, x_TC: torch.Tensor, slot_T: torch.Tensor) -> None:
        """Write the rows' records at ``block * entries + offset``."""
        _scatter(cache.bytes_NEb.numpy(), packed(words_of(x_TC), cache.format), slot_T)

    def store_index_keys(self, cache: IndexCache, x_TC: torch.Tensor, slot_T: torch.Tensor) -> None:
        """Write the rows' records, data and scales apart."""
        records_Tb, split = packed(words_of(x_TC), cache.format), cache.format.data_bytes
        sections = KeySections.of(cache.bytes_Nb.numpy(), cache.entries_per_block, cache.format)
        _scatter(sections.data, records_Tb[:, :split], slot_T)
        _scatter(sections.scales, records_Tb[:, split:], slot_T)

    def gather_window(self, cache: WindowCache, slot_n: torch.Tensor) -> torch.Tensor:
        """Return rows with the three integers."""
        return _gather(cache.bytes_ZRb.numpy(), slot_n, cache.format)

    def gather_entries(self, cache: EntryCache, slot_n: torch.Tensor) -> torch.Tensor:
        """Return rows with the three integers."""
        return _gather(cache.bytes_NEb.numpy(), slot_n, cache.format)

    def gather_index_keys(self, cache: IndexCache, slot_n: torch.Tensor) -> torch.Tensor:
        """Return rows with the three integers."""
        sections = KeySections.of(cache.bytes_Nb.numpy(), cache.entries_per_block, cache.format)
        return _gather(sections.data, slot_n, cache.format)


class OracleCompression(OptionedGroup, CompressionOps):
    """A pair's entry is a hash of both rows and their positions.

    What waits is kept as integers in the bits of the float32 state: the three channels of the gate half and of the
    latent half, the position in channel 2, one more in the second half.
    """

    def pool_pairs(
        self, gate_TC: torch.Tensor, latent_TC: torch.Tensor, pending: PendingCache, step: StepLayout
    ) -> torch.Tensor:
        """Hash rows p-1 and p, and store the last rows of each request."""
        width = latent_TC.shape[1]
        request_T, position_T, valid_T = step.request_T.numpy(), step.position_T.numpy(), step.valid_T.numpy()
        rows_TW = np.zeros((step.rows, 2 * width), dtype=np.int32)
        rows_TW[:, :2] = gate_TC.numpy()[:, :2]
        rows_TW[:, 2] = position_T
        rows_TW[:, width : width + 2] = latent_TC.numpy()[:, :2]
        rows_TW[:, width + 2] = position_T + 1

        state_ZPW = pending.rows_ZPW.numpy().view(np.int32)
        slot_T = step.state_slots_R.numpy()[request_T]
        inside_T = np.arange(step.rows) > step.row_starts_R1.numpy()[request_T]
        waiting_TW = state_ZPW[slot_T, (position_T - 1) % pending.capacity]
        before_TW = np.where(inside_T[:, None], np.roll(rows_TW, 1, axis=0), waiting_TW)
        pair = pair_of(_waiting_linear(before_TW), _waiting_linear(rows_TW))
        complete_T = valid_T & (position_T % 2 == 1)
        pooled_TC = np.zeros(latent_TC.shape, dtype=latent_TC.numpy().dtype)
        pooled_TC[:, 0] = pair.ids * complete_T
        pooled_TC[:, 1] = pair.digests * complete_T

        # Of a chunk longer than the state only the last rows are kept, or two of them would claim one place.
        newest_R = np.full(step.requests, -1, dtype=np.int64)
        np.maximum.at(newest_R, request_T, np.where(valid_T, position_T, -1))
        kept_T = valid_T & (position_T > newest_R[request_T] - pending.capacity)
        state_ZPW[slot_T[kept_T], position_T[kept_T] % pending.capacity] = rows_TW[kept_T]
        return torch.from_numpy(pooled_TC)


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
        """Return the query's channels with a new digest in head 0."""
        del sinks_H
        words_T3 = words_of(query_THC)[:, 0]
        output_THC = np.zeros(query_THC.shape, dtype=query_THC.numpy().dtype)
        if step.rows:
            ends = request_ends(step)
            window_sum_T = _window_sums(own_records_Tb.numpy(), window, window_size, step, ends)
            entry_sum_T = None if long_range is None else _entry_sums(long_range.cache, step, ends)
            picks_sum_T = None if long_range is None else picks_term(long_range.entries_TK.numpy())
            output_THC[:, 0, :CHANNELS] = words_T3
            output_THC[:, 0, 1] = attended(
                linear_of(words_T3), step.position_T.numpy(), window_sum_T, entry_sum_T, picks_sum_T
            )
        return torch.from_numpy(output_THC)


@dataclass(frozen=True, slots=True)
class RequestEnds:
    """First and last position [R] that each request has in a step; meaningless for a request without rows."""

    first_R: Integers
    last_R: Integers


def request_ends(step: StepLayout) -> RequestEnds:
    """Return the first and last positions of a step that has rows."""
    row_starts_R1, position_T = step.row_starts_R1.numpy(), step.position_T.numpy()
    return RequestEnds(
        first_R=position_T[np.minimum(row_starts_R1[:-1], step.rows - 1)],
        last_R=position_T[np.maximum(row_starts_R1[1:] - 1, 0)],
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

    entries_E: Integers
    blocks_RE: Integers
    offsets_E: Integers
    visible_RE: Flags


def entry_places(step: StepLayout, ends: RequestEnds, ratio: int, entries_per_block: int) -> EntryPlaces:
    """Return the places of entries through the block table."""
    table_RB = step.block_table_RB.numpy()
    entries_E = np.arange(step.max_position // ratio)
    # A table that is too short is the engine's mistake and must give a wrong token, not a crash here.
    column_E = np.minimum(entries_E // entries_per_block, table_RB.shape[1] - 1)
    return EntryPlaces(
        entries_E=entries_E,
        blocks_RE=table_RB[:, column_E],
        offsets_E=entries_E % entries_per_block,
        visible_RE=entries_E < ((ends.last_R + 1) // ratio)[:, None],
    )


def _window_sums(
    own_records_Tb: Bytes, window: WindowCache, window_size: int, step: StepLayout, ends: RequestEnds
) -> Hashes:
    before = window_size - 1
    position_RL = (ends.first_R - before)[:, None] + np.arange(before + step.max_rows)
    lowest_R = np.maximum(step.window_start_R.numpy(), 0)
    seen_RL = (position_RL >= lowest_R[:, None]) & (position_RL <= ends.last_R[:, None])
    found_RLb = window.bytes_ZRb.numpy()[step.state_slots_R.numpy()[:, None], position_RL % window.ring]
    if step.kind == "prefill":
        # The ring still holds what it held before the chunk. (In a decode step it holds the step's records too, and
        # reading them there shows whether they were stored.)
        own_RL = (position_RL >= ends.first_R[:, None]) & seen_RL
        row_RL = step.row_starts_R1.numpy()[:-1, None] + position_RL - ends.first_R[:, None]
        found_RLb[own_RL] = own_records_Tb[row_RL[own_RL]]
    records = read(found_RLb, window.format)
    sums_RL = _running_sums(term(Role.WINDOW, position_RL, records.linear, records.damage), seen_RL)
    request_T = step.request_T.numpy()
    start_T = step.position_T.numpy() - ends.first_R[request_T]
    total_T: Hashes = sums_RL[request_T, start_T + window_size] - sums_RL[request_T, start_T]
    return total_T


def _entry_sums(cache: EntryCache, step: StepLayout, ends: RequestEnds) -> Hashes:
    places = entry_places(step, ends, cache.ratio, cache.entries_per_block)
    records = read(cache.bytes_NEb.numpy()[places.blocks_RE, places.offsets_E], cache.format)
    terms_RE = term(Role.ENTRY, places.entries_E, records.linear, records.damage)
    sums_RE = _running_sums(terms_RE, places.visible_RE)
    total_T: Hashes = sums_RE[step.request_T.numpy(), (step.position_T.numpy() + 1) // cache.ratio]
    return total_T


def _running_sums(terms_RL: Hashes, kept_RL: Flags) -> Hashes:
    """Return [R, L + 1]: column i is the sum of the kept terms before i."""
    sums_RL = np.zeros((terms_RL.shape[0], terms_RL.shape[1] + 1), dtype=np.uint64)
    np.cumsum(terms_RL * kept_RL, axis=1, out=sums_RL[:, 1:])
    return sums_RL


def _waiting_linear(rows_TW: npt.NDArray[np.int32]) -> Hashes:
    width = rows_TW.shape[1] // 2
    gate_T = linear_of(rows_TW[:, :CHANNELS].astype(np.int64))
    return pending_linear(gate_T, linear_of(rows_TW[:, width : width + CHANNELS].astype(np.int64)))


def _scatter(target: Bytes, records_nb: Bytes, slot_n: torch.Tensor) -> None:
    slots, per_item = slot_n.numpy(), target.shape[1]
    kept_n = slots >= 0
    if not kept_n.all():
        slots, records_nb = slots[kept_n], records_nb[kept_n]
    target[slots // per_item, slots % per_item] = records_nb


def _gather(source: Bytes, slot_n: torch.Tensor, record_format: RecordFormat) -> torch.Tensor:
    slots, per_item = slot_n.numpy(), source.shape[1]
    places = np.maximum(slots, 0)
    rows_nC = unpacked(source[places // per_item, places % per_item], record_format)
    rows_nC[slots < 0] = 0
    return torch.from_numpy(rows_nC)
