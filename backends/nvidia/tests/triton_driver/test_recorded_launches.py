"""A decode step over the buffers of a bucket: the same launches whatever the step, and the rows' own results."""

from __future__ import annotations

import pytest
import torch

from deepinfer.accelerator import OpOptions
from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import EntryCache, IndexCache, WindowCache
from deepinfer.accelerator.ops.attention import LongRange
from deepinfer.accelerator.ops.selection import SelectionRule
from deepinfer.numerics import IndexRecord, LongRangeRecord, WindowRecord
from deepinfer_conformance.triton_cpu import launch_differences
from deepinfer_nvidia import assembly
from deepinfer_nvidia.decode_graphs import Extents, StepBuffers

HOST = torch.device("cpu")
WIDTH, HEADS, RING, WINDOW, BLOCK, ENTRIES = 64, 4, 12, 8, 16, 8
EXTENTS = Extents(rows=1, table_blocks=2, block_size=BLOCK, ring=RING, max_position=32)
RULE = SelectionRule(top_k=4, publish=False, candidate_block_size=4, candidate_blocks=2)


@pytest.fixture
def ops(session):
    return assembly.groups(OpOptions(batch_invariant=True))


def pools():
    draws = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=draws)

    window, entry, index = WindowRecord(WIDTH), LongRangeRecord(WIDTH), IndexRecord(WIDTH)
    keys = torch.stack(
        [torch.cat([part.flatten() for part in index.split(index.encode(normal(ENTRIES, WIDTH)))]) for _ in range(5)]
    )
    return (
        WindowCache(window.encode(normal(4, RING, WIDTH)), window),
        EntryCache(entry.encode(normal(5, ENTRIES, WIDTH)), entry, ratio=2),
        IndexCache(keys, index, ENTRIES, ratio=2),
    )


def step(*positions):
    count = len(positions)
    return StepLayout(
        kind="decode",
        block_size=BLOCK,
        ring=RING,
        row_starts_R1=torch.arange(count + 1),
        cached_R=torch.tensor(positions),
        state_slots_R=torch.arange(1, count + 1),
        block_table_RB=torch.arange(1, 2 * count + 1).view(count, 2) % 5,
        request_T=torch.arange(count),
        position_T=torch.tensor(positions),
        window_start_R=torch.zeros(count, dtype=torch.int64),
        image_T=torch.zeros(count, dtype=torch.bool),
        valid_T=torch.ones(count, dtype=torch.bool),
        max_position=max(positions) + 1,
        max_rows=1,
    )


def rows_of(ids_T, *shape):
    """Queries that follow from token ids, so that a row has the same ones wherever it stands."""
    flat = torch.sin(ids_T.float()[:, None] * torch.arange(1, 1 + torch.Size(shape).numel()))
    return flat.view(-1, *shape)


def run(ops, caches, layout, ids_T):
    window, entries, index = caches
    selection = ops["selection"].top_entries(rows_of(ids_T, HEADS, WIDTH), rows_of(ids_T, HEADS), index, layout, RULE)
    own_Tb = window.format.encode(rows_of(ids_T, WIDTH))
    return ops["attention"].sparse(
        rows_of(ids_T, HEADS, WIDTH),
        own_Tb,
        window,
        LongRange(entries, selection.entries_TK),
        torch.zeros(HEADS),
        WINDOW,
        layout,
    )


def test_steps_of_a_bucket_launch_the_same_and_give_the_rows_own_results(ops, session):
    caches, buffers = pools(), StepBuffers(3, EXTENTS, HOST)
    seen = []
    for positions in ((19, 5, 27), (3,), (30, 11)):
        now = step(*positions)
        ids_T = torch.arange(1, 1 + now.rows)
        place_T = buffers.load(now, ids_T)
        before = len(session.launches)
        padded = run(ops, caches, buffers.layout, buffers.ids_T)
        seen.append(session.launches[before:])
        assert torch.equal(padded[place_T], run(ops, caches, now, ids_T)), positions
        assert padded.isfinite().all()
    assert launch_differences(seen[0], seen[1], ignore_pointers=True) == ()
    assert launch_differences(seen[0], seen[2], ignore_pointers=True) == ()
    fixed = {each.data_ptr() for each in (buffers.layout.position_T, buffers.layout.block_table_RB)}
    fixed |= {cache_bytes.data_ptr() for cache_bytes in (caches[0].bytes_ZRb, caches[2].bytes_Nb)}
    for launches in seen:
        assert fixed <= {pointer for launch in launches for pointer in launch.pointers}


def test_steps_that_are_not_padded_launch_differently(ops, session):
    """So the test above can fail: without buffers, grids follow the step."""
    caches, seen = pools(), []
    for positions in ((19, 5), (3,)):
        before = len(session.launches)
        run(ops, caches, step(*positions), torch.arange(1, 1 + len(positions)))
        seen.append(session.launches[before:])
    assert launch_differences(seen[0], seen[1], ignore_pointers=True)
