"""A small world of poisoned pools, so that every test can say what a row owns and trust that nothing else is clean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from deepinfer.accelerator.batch import StepKind, StepLayout
from deepinfer.accelerator.caches import EntryCache, IndexCache, PendingCache, WindowCache
from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.ops import OpGroup
from deepinfer.numerics import Float32Record, IndexRecord, LongRangeRecord, WindowRecord
from deepinfer_cpu_ref import Driver

POISON = 0xFF
"""Decodes to NaN as an fp8 code, as either kind of scale, and as a float32."""


@dataclass(frozen=True)
class Chunk:
    """Rows of one request in a step."""

    request: int
    cached: int
    rows: int


class World:
    """Caches of one layer for a few requests; block tables and state slots are shuffled, all bytes poisoned."""

    def __init__(
        self,
        *,
        requests: int = 3,
        positions: int = 48,
        ratio: int = 1,
        block_size: int = 8,
        window_size: int = 8,
        ring: int = 12,
        width: int = 32,
        index_width: int = 32,
        pending: int = 7,
        released: bool = True,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.block_size, self.ring, self.ratio, self.window_size = block_size, ring, ratio, window_size
        self.width, self.index_width = width, index_width
        table_blocks = -(-positions // block_size)
        blocks = requests * table_blocks + 1
        slots = requests + 2
        self.table = (torch.randperm(blocks - 1, generator=generator) + 1)[: requests * table_blocks]
        self.table = self.table.view(requests, table_blocks)
        self.slots = torch.randperm(slots, generator=generator)[:requests]
        per_block = block_size // ratio
        window_format = WindowRecord(width) if released else Float32Record(width)
        entry_format = LongRangeRecord(width) if released else Float32Record(width)
        index_format = IndexRecord(index_width) if released else Float32Record(index_width)
        # Wider than needed, so that every view has a pitch and an odd offset.
        window_bytes, pending_floats = ring * window_format.nbytes, pending * 2 * width
        state = torch.full((slots, window_bytes + 48), POISON, dtype=torch.uint8)
        waiting = torch.full((slots, pending_floats + 8), float("nan"))
        entry_bytes, index_bytes = per_block * entry_format.nbytes, per_block * index_format.nbytes
        pool = torch.full((blocks, entry_bytes + index_bytes + 16), POISON, dtype=torch.uint8)
        self.window = WindowCache(
            state[:, 16 : 16 + window_bytes].unflatten(1, (ring, window_format.nbytes)), window_format
        )
        self.pending = PendingCache(waiting[:, 4 : 4 + pending_floats].unflatten(1, (pending, 2 * width)))
        self.entries = EntryCache(
            pool[:, 8 : 8 + entry_bytes].unflatten(1, (per_block, entry_format.nbytes)), entry_format, ratio
        )
        self.index = IndexCache(pool[:, 8 + entry_bytes : -8], index_format, per_block, ratio)

    def step(
        self,
        chunks: Sequence[Chunk | tuple[int, int, int]],
        kind: StepKind = "prefill",
        padding: int = 0,
        window_starts: Mapping[int, int] | None = None,
    ) -> StepLayout:
        """Describe a step of (request, cached, rows) chunks; padding rows follow and belong to the last request."""
        chunks = [chunk if isinstance(chunk, Chunk) else Chunk(*chunk) for chunk in chunks]
        requests = [chunk.request for chunk in chunks]
        rows = [chunk.rows for chunk in chunks]
        starts = [sum(rows[:index]) for index in range(len(rows))] + [sum(rows) + padding]
        request_T = [index for index, chunk in enumerate(chunks) for _ in range(chunk.rows)]
        position_T = [chunk.cached + row for chunk in chunks for row in range(chunk.rows)]
        valid_T = [True] * len(position_T) + [False] * padding
        request_T += [max(len(chunks) - 1, 0)] * padding
        position_T += [0] * padding
        return StepLayout(
            kind=kind,
            block_size=self.block_size,
            ring=self.ring,
            row_starts_R1=torch.tensor(starts, dtype=torch.int64),
            cached_R=torch.tensor([chunk.cached for chunk in chunks], dtype=torch.int64),
            state_slots_R=self.slots[requests],
            block_table_RB=self.table[requests],
            request_T=torch.tensor(request_T, dtype=torch.int64),
            position_T=torch.tensor(position_T, dtype=torch.int64),
            window_start_R=torch.tensor([(window_starts or {}).get(request, 0) for request in requests]),
            image_T=torch.zeros(len(valid_T), dtype=torch.bool),
            valid_T=torch.tensor(valid_T, dtype=torch.bool),
            max_position=max(position_T, default=-1) + 1,
            max_rows=max(rows, default=0),
        )


@pytest.fixture
def world() -> type[World]:
    """The class of worlds."""
    return World


@pytest.fixture
def ops() -> Callable[..., Mapping[str, OpGroup]]:
    """Build the driver's groups from the fields of OpOptions."""

    def build(**options: Any) -> Mapping[str, OpGroup]:
        return Driver().op_groups(OpOptions(**options))

    return build


@pytest.fixture
def threads() -> Callable[[int], AbstractContextManager[None]]:
    """A context with another number of torch threads."""

    @contextmanager
    def use(count: int) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    return use


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20260711)
