"""Bytes of a cache block and of a state slot, derived from the configuration alone.

A block holds the long-range entries of ``block_size`` positions for every owner layer: owner by owner, first the index
section, then the main section. A state slot holds what one request needs whatever its length: the window ring of every
layer, then the positions that wait for their pair. Spec: model.md section 11, engine.md section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

from deepinfer.accelerator.capabilities import KvCacheDtype
from deepinfer.errors import ConfigurationError
from deepinfer.model.config import ModelConfig
from deepinfer.model.roles import LayerRole
from deepinfer.numerics import Float32Record, IndexRecord, LongRangeRecord, RecordFormat, WindowRecord

_SECTION_ALIGNMENT_BYTES = 32
_BLOCK_ALIGNMENT_BYTES = 128
_SLOT_ALIGNMENT_BYTES = 32
_FLOAT32_BYTES = 4


class EntryAddress(NamedTuple):
    """Where the long-range entry of a position lives: its number, the block's place in the table, the place inside."""

    entry: int
    table_index: int
    offset: int


@dataclass(frozen=True, slots=True)
class OwnerSection:
    """The two sections of one owner layer inside a block.

    Attributes:
        layer: the owner.
        ratio: tokens per entry.
        entries: entries in one block.
        index_offset_bytes: start of the index keys, which are all data bytes, then all scale bytes.
        main_offset_bytes: start of the main records.
    """

    layer: int
    ratio: int
    entries: int
    index_offset_bytes: int
    main_offset_bytes: int


@dataclass(frozen=True, slots=True)
class RingSection:
    """The window ring of one layer inside a state slot."""

    layer: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class PendingSection:
    """The uncompressed rows of one owner layer inside a state slot.

    Attributes:
        layer: the owner.
        offset_bytes: start, a multiple of four.
        capacity: positions that can be pending.
        width: float32 values per position, gate then latent.
    """

    layer: int
    offset_bytes: int
    capacity: int
    width: int


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The byte layout of both pools.

    Attributes:
        block_size: positions per block.
        backtrack: positions that a step may write and later disown.
        ring: positions per window ring, ``sliding_window + backtrack``.
        window_format: format of window records.
        main_format: format of long-range main records.
        index_format: format of index keys, and of the index queries that meet them.
        owners: sections of a block, in layer order.
        block_used_bytes: bytes of a block before rounding.
        block_bytes: bytes of a block.
        rings: rings of a state slot: text layers in order, then draft stages.
        pendings: pending rows of a state slot, in layer order.
        encoder_bytes: bytes at the head of a slot that hold the rings of the layers before the decoder boundary.
        slot_used_bytes: bytes of a state slot before rounding.
        slot_bytes: bytes of a state slot.
    """

    block_size: int
    backtrack: int
    ring: int
    window_format: RecordFormat
    main_format: RecordFormat
    index_format: RecordFormat
    owners: tuple[OwnerSection, ...]
    block_used_bytes: int
    block_bytes: int
    rings: tuple[RingSection, ...]
    pendings: tuple[PendingSection, ...]
    encoder_bytes: int
    slot_used_bytes: int
    slot_bytes: int

    @classmethod
    def from_config(
        cls,
        config: ModelConfig,
        roles: Sequence[LayerRole],
        *,
        block_size: int,
        backtrack: int,
        kv_cache_dtype: KvCacheDtype = "released",
        draft_stages: int = 0,
    ) -> CacheLayout:
        """Derive the layout.

        Args:
            config: the model.
            roles: what ``derive_roles`` gave for it.
            block_size: positions per block; a multiple of every compress ratio.
            backtrack: 1 without drafts, number of drafts + 1 with them.
            kv_cache_dtype: "released" records or unquantised "float32" ones.
            draft_stages: draft stages whose rings are kept; 0 when the engine runs without drafts.

        Raises:
            ConfigurationError: listing every value that does not fit the model.
        """
        _check(config, block_size=block_size, backtrack=backtrack, draft_stages=draft_stages)
        formats = _formats(config, kv_cache_dtype)
        ring = config.sliding_window + backtrack

        owners, block_used_bytes = _owner_sections(roles, block_size, formats)
        block_unit_bytes = lcm(_BLOCK_ALIGNMENT_BYTES, formats.main.nbytes)

        ring_bytes = ring * formats.window.nbytes
        ringed = [role for role in roles if role.draft_stage is None or role.draft_stage < draft_stages]
        rings = tuple(RingSection(role.layer, place * ring_bytes) for place, role in enumerate(ringed))
        boundary = config.first_decoder_layer
        encoders = config.num_hidden_layers if boundary is None else boundary
        pendings, slot_used_bytes = _pending_sections(config, roles, backtrack, start_bytes=len(rings) * ring_bytes)

        return cls(
            block_size=block_size,
            backtrack=backtrack,
            ring=ring,
            window_format=formats.window,
            main_format=formats.main,
            index_format=formats.index,
            owners=owners,
            block_used_bytes=block_used_bytes,
            # A model without long-range layers still counts blocks, and a block of no bytes cannot be budgeted.
            block_bytes=max(_round_up(block_used_bytes, block_unit_bytes), block_unit_bytes),
            rings=rings,
            pendings=pendings,
            encoder_bytes=encoders * ring_bytes,
            slot_used_bytes=slot_used_bytes,
            slot_bytes=_round_up(slot_used_bytes, lcm(_SLOT_ALIGNMENT_BYTES, formats.window.nbytes)),
        )

    @property
    def bytes_per_token(self) -> float:
        """Paged bytes that one position costs, rounding included."""
        return self.block_bytes / self.block_size

    def blocks_of(self, num_tokens: int) -> int:
        """Return the number of blocks that ``num_tokens`` positions occupy."""
        return -(-num_tokens // self.block_size)

    def paged_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the blocks that ``num_tokens`` positions occupy."""
        return self.blocks_of(num_tokens) * self.block_bytes

    def ring_place(self, position: int) -> int:
        """Return the place of a position inside a window ring."""
        return position % self.ring

    def window_slot(self, state_slot: int, position: int) -> int:
        """Return the flat window slot of a position, the same number for every layer."""
        return state_slot * self.ring + self.ring_place(position)

    def entry_address(self, position: int, ratio: int) -> EntryAddress:
        """Return where the entry that covers ``position`` lives in the block table of its request."""
        entry = position // ratio
        table_index, offset = divmod(entry, self.block_size // ratio)
        return EntryAddress(entry, table_index, offset)


@dataclass(frozen=True, slots=True)
class _Formats:
    window: RecordFormat
    main: RecordFormat
    index: RecordFormat


def _formats(config: ModelConfig, kv_cache_dtype: KvCacheDtype) -> _Formats:
    if kv_cache_dtype == "float32":
        unquantised = Float32Record(config.head_dim)
        return _Formats(unquantised, unquantised, Float32Record(config.index_head_dim))
    return _Formats(WindowRecord(config.head_dim), LongRangeRecord(config.head_dim), IndexRecord(config.index_head_dim))


def _owner_sections(
    roles: Sequence[LayerRole], block_size: int, formats: _Formats
) -> tuple[tuple[OwnerSection, ...], int]:
    sections: list[OwnerSection] = []
    end_bytes = 0
    for role in roles:
        if not role.owns_kv:
            continue
        entries = block_size // role.ratio
        index_offset = end_bytes
        main_offset = index_offset + _round_up(entries * formats.index.nbytes, _SECTION_ALIGNMENT_BYTES)
        end_bytes = main_offset + _round_up(entries * formats.main.nbytes, _SECTION_ALIGNMENT_BYTES)
        sections.append(OwnerSection(role.layer, role.ratio, entries, index_offset, main_offset))
    return tuple(sections), end_bytes


def _pending_sections(
    config: ModelConfig, roles: Sequence[LayerRole], backtrack: int, *, start_bytes: int
) -> tuple[tuple[PendingSection, ...], int]:
    sections: list[PendingSection] = []
    end_bytes = start_bytes
    width = 2 * config.head_dim
    for role in roles:
        if not role.owns_kv or role.ratio == 1:  # with one token per entry nothing waits
            continue
        capacity = role.ratio + max(0, backtrack - 1)
        offset = _round_up(end_bytes, _FLOAT32_BYTES)
        end_bytes = offset + capacity * width * _FLOAT32_BYTES
        sections.append(PendingSection(role.layer, offset, capacity, width))
    return tuple(sections), end_bytes


def _check(config: ModelConfig, *, block_size: int, backtrack: int, draft_stages: int) -> None:
    problems: list[str] = []
    # Even whatever the ratios are: the positions of a pair never lie in two blocks.
    if block_size < 2 or block_size % 2:
        problems.append(f"block_size: {block_size} is not an even number of positions, at least 2")
    if backtrack < 1:
        problems.append(f"backtrack: {backtrack} is below 1, the position that every step writes")
    if not 0 <= draft_stages <= config.num_nextn_predict_layers:
        problems.append(f"draft_stages: {draft_stages} asked, the model has {config.num_nextn_predict_layers}")
    if problems:
        raise ConfigurationError("cache layout", problems)


def _round_up(size_bytes: int, unit_bytes: int) -> int:
    return -(-size_bytes // unit_bytes) * unit_bytes
