"""A small paged world: what each request's positions hold, and any number of physical layouts of the same contents.

Contents belong to (request, position) or (request, entry); where they lie in blocks, rings and slots, what lies beside
them, and in which steps they are computed is the layout's affair. Results must depend on the contents alone.

Legend: T rows, R requests, B blocks of a table, P positions, E entries, H heads, C width, J index heads,
I index width, K selected entries, Z state slots, N blocks, b record bytes, W = 2C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepinfer.accelerator import EntryCache, IndexCache, OpOptions, PendingCache, StepKind, StepLayout, WindowCache
from deepinfer.accelerator.ops.attention import LongRange
from deepinfer.accelerator.ops.selection import SelectionRule
from deepinfer.numerics import Float32Record, IndexRecord, LongRangeRecord, RecordFormat, WindowRecord
from deepinfer_conformance.data.call import OpCall
from deepinfer_conformance.data.draws import Draws

NAN_BYTE = 0xFF
"""Decodes to NaN as an fp8 code, as either kind of scale, and as a float32."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a world; ``pending`` is the capacity of the pending ring."""

    requests: int = 3
    positions: int = 40
    block_size: int = 8
    window: int = 8
    ring: int = 12
    ratio: int = 2
    width: int = 32
    heads: int = 3
    index_width: int = 32
    index_heads: int = 2
    top_k: int = 6
    pending: int = 5

    @property
    def entries_per_block(self) -> int:
        """Entries in one block."""
        return self.block_size // self.ratio


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one request in a step; ``window_start`` is the first position that its window may read."""

    request: int
    cached: int
    rows: int
    window_start: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where contents lie and what lies around them.

    Attributes:
        seed: chooses blocks and slots.
        poison: None fills everything unowned with NaN bytes; a number seeds random bytes.
        padding: invalid rows at the end of the step.
    """

    seed: int = 0
    poison: int | None = None
    padding: int = 0


class World:
    """Contents of a few requests."""

    def __init__(
        self,
        draws: Draws,
        options: OpOptions,
        sizes: Sizes | None = None,
        *,
        whole_numbers: bool = False,
        shared: int = 0,
    ) -> None:
        """Draw the contents.

        Args:
            draws: source of values.
            options: activation dtype and cache format.
            sizes: None for the usual ones.
            whole_numbers: index queries, keys and head weights are small integers: scores are exact and tie.
            shared: the first so many blocks of request 1 are those of request 0.
        """
        self.sizes = sizes = sizes or Sizes()
        self.options = options
        self._draws = draws
        self._shared = shared
        released = options.kv_cache_dtype == "released"
        self.window_format: RecordFormat = WindowRecord(sizes.width) if released else Float32Record(sizes.width)
        self.entry_format: RecordFormat = LongRangeRecord(sizes.width) if released else Float32Record(sizes.width)
        self.index_format: RecordFormat = (
            IndexRecord(sizes.index_width) if released else Float32Record(sizes.index_width)
        )
        count, positions, entries = sizes.requests, sizes.positions, sizes.positions // sizes.ratio
        dtype = options.activation_dtype
        self.window_RPC = draws.normal("window", count, positions, sizes.width)
        self.entries_REC = draws.normal("entries", count, entries, sizes.width)
        self.queries_RPHC = draws.normal("queries", count, positions, sizes.heads, sizes.width, dtype=dtype)
        self.gates_RPC = draws.normal("gates", count, positions, sizes.width, scale=2.0)
        self.latents_RPC = draws.normal("latents", count, positions, sizes.width)
        self.sinks_H = draws.normal("sinks", sizes.heads)
        key_shape = (count, entries, sizes.index_width)
        query_shape = (count, positions, sizes.index_heads, sizes.index_width)
        weight_shape = (count, positions, sizes.index_heads)
        if whole_numbers:
            self.keys_REI = draws.integers("keys", -1, 2, *key_shape).to(torch.float32)
            self.index_queries_RPJI = draws.integers("index queries", -1, 3, *query_shape).to(dtype)
            self.head_weights_RPJ = draws.integers("head weights", 0, 3, *weight_shape).to(dtype)
        else:
            self.keys_REI = draws.normal("keys", *key_shape)
            self.index_queries_RPJI = draws.normal("index queries", *query_shape, dtype=dtype)
            self.head_weights_RPJ = draws.normal("head weights", *weight_shape, dtype=dtype)
        if shared:
            together = shared * sizes.block_size
            self.entries_REC[1, : together // sizes.ratio] = self.entries_REC[0, : together // sizes.ratio]
            self.keys_REI[1, : together // sizes.ratio] = self.keys_REI[0, : together // sizes.ratio]

    def picks(self, request: int, position: int) -> torch.Tensor:
        """Return int64 [K]: some visible entries of a row in any order, -1 among them and for what is missing."""
        visible = (position + 1) // self.sizes.ratio
        top_k = self.sizes.top_k
        order = self._draws.permutation(f"picks/{request}/{position}", max(visible, top_k))[:top_k]
        return torch.where(order < visible, order, -1)

    def lay(self, chunks: Sequence[Chunk], kind: StepKind = "prefill", placement: Placement | None = None) -> Laid:
        """Return one physical layout of a step."""
        return Laid(self, list(chunks), kind, placement or Placement())


class Laid:
    """One step over one physical layout.

    Attributes:
        step: the ragged layout.
        window: ring of a layer; holds positions before the step, and in a decode step the step's own.
        entries, index: long-range records and index keys, the step's own included.
        pending: rows that wait for their pair.
        rows: (request, position) of every valid row, in order.
    """

    def __init__(self, world: World, chunks: list[Chunk], kind: StepKind, placement: Placement) -> None:
        self.world = world
        self._chunks = chunks
        self._padding = placement.padding
        self._draws = Draws(placement.seed, "placement")
        self._poison = placement.poison
        sizes = world.sizes
        self.rows = [(chunk.request, chunk.cached + row) for chunk in chunks for row in range(chunk.rows)]
        blocks_each = -(-sizes.positions // sizes.block_size)
        # Block 0 belongs to nobody; spare blocks and slots lie between the owned ones.
        blocks, slots = sizes.requests * blocks_each + 3, sizes.requests + 2
        order = self._draws.permutation("blocks", blocks - 1)[: sizes.requests * blocks_each] + 1
        self._table_RB = order.view(sizes.requests, blocks_each).clone()
        if world._shared:
            self._table_RB[1, : world._shared] = self._table_RB[0, : world._shared]
        self._slots_R = self._draws.permutation("slots", slots)[: sizes.requests]
        self.step = self._layout(kind)
        self.window = WindowCache(
            self._poisoned("window", slots, sizes.ring, world.window_format.nbytes), world.window_format
        )
        per_block = sizes.entries_per_block
        self.entries = EntryCache(
            self._poisoned("entries", blocks, per_block, world.entry_format.nbytes), world.entry_format, sizes.ratio
        )
        index_bytes = per_block * world.index_format.nbytes
        self.index = IndexCache(
            self._poisoned("index", blocks, index_bytes), world.index_format, per_block, sizes.ratio
        )
        waiting = self._poisoned("pending", slots, sizes.pending, 2 * sizes.width * 4)
        self.pending = PendingCache(waiting.contiguous().view(torch.float32))
        for chunk in chunks:
            self._fill(chunk, kind)

    # --- calls -----------------------------------------------------------------------------------------------------

    def attention(self, *, long_range: bool = True) -> OpCall:
        """Return sparse attention of this step."""
        world = self.world
        entries_TK = self._rows_or([world.picks(*row) for row in self.rows], torch.full((world.sizes.top_k,), -1))
        own_TC = self._gathered(world.window_RPC)
        return OpCall(
            "attention.sparse",
            {
                "query_THC": self._gathered(world.queries_RPHC),
                "own_records_Tb": world.window_format.encode(own_TC),
                "window": self.window,
                "long_range": LongRange(self.entries, entries_TK) if long_range else None,
                "sinks_H": world.sinks_H,
                "window_size": world.sizes.window,
                "step": self.step,
            },
        )

    def selection(self, rule: SelectionRule, candidates_TB: torch.Tensor | None = None) -> OpCall:
        """Return the choice of entries of this step."""
        return OpCall(
            "selection.top_entries",
            {
                "query_TJI": self._gathered(self.world.index_queries_RPJI),
                "head_weight_TJ": self._gathered(self.world.head_weights_RPJ),
                "keys": self.index,
                "step": self.step,
                "rule": rule,
                "candidates_TB": candidates_TB,
            },
        )

    def pooling(self) -> OpCall:
        """Return the pooling of this step's pairs."""
        wide = torch.float64 if self.world.options.activation_dtype == torch.float64 else torch.float32
        return OpCall(
            "compression.pool_pairs",
            {
                "gate_TC": self._gathered(self.world.gates_RPC).to(wide),
                "latent_TC": self._gathered(self.world.latents_RPC).to(wide),
                "pending": self.pending,
                "step": self.step,
            },
        )

    def window_slots(self) -> OpCall:
        """Return the window slots of this step."""
        return OpCall("plumbing.window_slots", {"step": self.step})

    def entry_slots(self, ratio: int) -> OpCall:
        """Return the entry slots of this step."""
        return OpCall("plumbing.entry_slots", {"step": self.step, "ratio": ratio})

    # --- contents --------------------------------------------------------------------------------------------------

    def waiting_rows(self, pending_ZPW: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """Return the pending rows [P, W] of a request after a step, by position, oldest first."""
        last = chunk.cached + chunk.rows
        positions = torch.arange(max(0, last - self.world.sizes.pending), last)
        return pending_ZPW[int(self._slots_R[chunk.request]), positions % self.world.sizes.pending]

    def _layout(self, kind: StepKind) -> StepLayout:
        chunks, padding = self._chunks, self._padding
        requests = [chunk.request for chunk in chunks]
        starts = [0]
        for chunk in chunks:
            starts.append(starts[-1] + chunk.rows)
        starts[-1] += padding
        valid = [True] * len(self.rows) + [False] * padding
        return StepLayout(
            kind=kind,
            block_size=self.world.sizes.block_size,
            ring=self.world.sizes.ring,
            row_starts_R1=_int64(starts),
            cached_R=_int64([chunk.cached for chunk in chunks]),
            state_slots_R=self._slots_R[requests],
            block_table_RB=self._used_table(),
            request_T=_int64(
                [n for n, c in enumerate(chunks) for _ in range(c.rows)] + [max(len(chunks) - 1, 0)] * padding
            ),
            position_T=_int64([position for _, position in self.rows] + [0] * padding),
            window_start_R=_int64([chunk.window_start for chunk in chunks]),
            image_T=torch.zeros(len(valid), dtype=torch.bool),
            valid_T=torch.tensor(valid, dtype=torch.bool),
            max_position=max((position for _, position in self.rows), default=-1) + 1,
            max_rows=max((chunk.rows for chunk in chunks), default=0),
        )

    def _used_table(self) -> torch.Tensor:
        """Tables end where the request's blocks end, as the engine's do: 0 from there on."""
        used = [-(-(chunk.cached + chunk.rows) // self.world.sizes.block_size) for chunk in self._chunks]
        width = max(used, default=0)
        table_RB = self._table_RB[[chunk.request for chunk in self._chunks], :width].clone()
        return table_RB.masked_fill(torch.arange(width) >= _int64(used).view(-1, 1), 0)

    def _fill(self, chunk: Chunk, kind: StepKind) -> None:
        world, sizes = self.world, self.world.sizes
        last = chunk.cached + chunk.rows
        slot, table_B = int(self._slots_R[chunk.request]), self._table_RB[chunk.request]
        in_ring = last if kind == "decode" else chunk.cached
        held = torch.arange(max(chunk.window_start, in_ring - sizes.ring, 0), max(in_ring, chunk.window_start))
        self.window.bytes_ZRb[slot, held % sizes.ring] = world.window_format.encode(
            world.window_RPC[chunk.request, held]
        )
        kept = torch.arange(max(0, chunk.cached - sizes.pending), chunk.cached)
        rows_W = torch.cat([world.gates_RPC[chunk.request, kept], world.latents_RPC[chunk.request, kept]], 1)
        self.pending.rows_ZPW[slot, kept % sizes.pending] = rows_W
        entry = torch.arange(last // sizes.ratio)
        block, offset = table_B[entry // sizes.entries_per_block], entry % sizes.entries_per_block
        self.entries.bytes_NEb[block, offset] = world.entry_format.encode(world.entries_REC[chunk.request, entry])
        parts = world.index_format.encode_parts(world.keys_REI[chunk.request, entry])
        sections = world.index_format.block_sections(self.index.bytes_Nb, sizes.entries_per_block)
        sections.data[block, offset] = parts.data
        if world.index_format.scale_bytes:
            sections.scales[block, offset] = parts.scales

    def _poisoned(self, name: str, *shape: int) -> torch.Tensor:
        if self._poison is None:
            return torch.full(shape, NAN_BYTE, dtype=torch.uint8)
        return Draws(self._poison, "poison").bytes(name, *shape)

    def _gathered(self, values_RP: torch.Tensor) -> torch.Tensor:
        return self._rows_or(
            [values_RP[row] for row in self.rows], torch.full(values_RP.shape[2:], float("nan"), dtype=values_RP.dtype)
        )

    def _rows_or(self, rows: list[torch.Tensor], filler: torch.Tensor) -> torch.Tensor:
        """Stack rows; padding rows hold ``filler``."""
        padded = [*rows, *([filler] * self._padding)]
        return torch.stack(padded) if padded else filler.new_empty((0, *filler.shape))


def _int64(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)
