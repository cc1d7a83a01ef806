"""Window store and moves: every byte where it belongs, and none elsewhere."""

from __future__ import annotations

import pytest
import torch

from deepinfer.accelerator.caches import WindowCache
from deepinfer.errors import OpRefusedError
from deepinfer.numerics import WindowRecord

RECORD = WindowRecord(32)
SLOTS, RING, LAYERS = 3, 5, 2


def cache(layer):
    """Return the pool and one layer's ring in it: layers share a slot, and the slot has room to spare."""
    pool = torch.arange(SLOTS * (LAYERS * RING + 1) * RECORD.nbytes).to(torch.uint8).view(SLOTS, -1)
    start = layer * RING * RECORD.nbytes
    ring = pool[:, start : start + RING * RECORD.nbytes].unflatten(1, (RING, RECORD.nbytes))
    return pool, WindowCache(ring, RECORD)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("slots", [[0, 7, 14, -1], [-1, -1, 4, 10], [-1, -1, -1, -1], [3, 2, 1, 0], []])
def test_only_the_named_slots_change(pair, draws, layer, slots):
    ours, reference = pair()
    records_Tb = torch.randint(0, 256, (len(slots), RECORD.nbytes), generator=draws).to(torch.uint8)
    slot_T = torch.tensor(slots, dtype=torch.int64)
    mine, theirs = cache(layer), cache(layer)
    ours["codec"].store_window(mine[1], records_Tb, slot_T)
    reference["codec"].store_window(theirs[1], records_Tb, slot_T)
    assert torch.equal(mine[0], theirs[0])


def test_a_pool_whose_slots_do_not_fit_the_record_is_refused(pair):
    ours, _ = pair()
    pool = torch.zeros(SLOTS, RING * RECORD.nbytes + 1, dtype=torch.uint8)
    ring = pool[:, : RING * RECORD.nbytes].unflatten(1, (RING, RECORD.nbytes))
    with pytest.raises(OpRefusedError, match="side by side"):
        ours["codec"].store_window(WindowCache(ring, RECORD), pool[:1, : RECORD.nbytes], torch.tensor([0]))


def test_moves_agree_with_the_reference(pair, draws):
    ours, reference = pair()
    pools = [torch.randint(0, 256, (6, 40), generator=torch.Generator().manual_seed(1)).to(torch.uint8) for _ in "ab"]
    saved = []
    for pool, moves in zip(pools, (ours["moves"], reference["moves"]), strict=True):
        moves.copy(pool, torch.tensor([0, 1]), torch.tensor([3, 2]))
        moves.zero(pool, torch.tensor([1]))
        saved.append(moves.save(pool, torch.tensor([5, 3])))
        moves.restore(pool, torch.tensor([0, 4]), saved[-1])
    assert torch.equal(*pools)
    assert torch.equal(*saved)
    assert torch.equal(pools[0][0], saved[0][0])


def test_data_of_another_shape_is_not_restored(pair):
    ours, _ = pair()
    with pytest.raises(OpRefusedError, match="these targets need"):
        ours["moves"].restore(torch.zeros(4, 8), torch.tensor([0]), torch.zeros(1, 7))
