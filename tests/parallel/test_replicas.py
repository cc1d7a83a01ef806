"""The copy that serves a row follows from the row's own content, whatever the batch, and rows spread over copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer.parallel.placement import PlacementShape, ReplicaMaps
from deepinfer.parallel.replicas import choose_slots, row_keys

SHAPE = PlacementShape(1, 16, 8, 24)
MAPS = ReplicaMaps.of(SHAPE.start_up_layout(), SHAPE)
COPIES, SLOTS = MAPS.copies_LE[0], MAPS.slots_LEC[0].astype(np.int64)


def batch(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    experts = np.argsort(generator.random((rows, 16)), axis=1)[:, :6]
    return generator.integers(0, 129_280, rows), generator.integers(0, 1_000_000, rows), experts


def test_a_slot_holds_the_expert_that_was_chosen() -> None:
    tokens, positions, experts = batch(500)
    slots = choose_slots(experts, row_keys(tokens, positions), COPIES, SLOTS)
    assert MAPS.layout_LS[0][slots].tolist() == experts.tolist()


def test_a_row_s_slots_do_not_depend_on_its_batch_or_its_place_in_it() -> None:
    tokens, positions, experts = batch(200)
    whole = choose_slots(experts, row_keys(tokens, positions), COPIES, SLOTS)
    order = np.random.default_rng(1).permutation(200)[:90]
    part = choose_slots(experts[order], row_keys(tokens[order], positions[order]), COPIES, SLOTS)
    assert part.tolist() == whole[order].tolist()
    alone = choose_slots(experts[7:8], row_keys(tokens[7:8], positions[7:8]), COPIES, SLOTS)
    assert alone[0].tolist() == whole[7].tolist()


def test_a_copy_of_a_row_s_expert_depends_neither_on_its_other_experts_nor_on_their_order() -> None:
    tokens, positions, experts = batch(200)
    keys = row_keys(tokens, positions)
    slots = choose_slots(experts, keys, COPIES, SLOTS)
    assert choose_slots(experts[:, ::-1], keys, COPIES, SLOTS).tolist() == slots[:, ::-1].tolist()


def test_numpy_and_torch_choose_alike() -> None:
    tokens, positions, experts = batch(300)
    experts[::3, 2] = -1
    here = choose_slots(experts, row_keys(tokens, positions), COPIES, SLOTS)
    tensors = [torch.from_numpy(each) for each in (experts, tokens, positions, COPIES, SLOTS)]
    there = choose_slots(tensors[0], row_keys(tensors[1], tensors[2]), tensors[3], tensors[4])
    assert there.dtype == torch.int64
    assert there.tolist() == here.tolist()


def test_rows_without_an_expert_get_no_slot() -> None:
    tokens, positions, experts = batch(10)
    experts[4:] = -1
    slots = choose_slots(experts, row_keys(tokens, positions), COPIES, SLOTS)
    assert (slots[4:] == -1).all()
    assert (slots[:4] >= 0).all()


@pytest.mark.parametrize("copies", [2, 3, 7, 20])
@pytest.mark.parametrize("case", ["one prompt", "one position", "one token"])
def test_rows_spread_evenly_over_the_copies(copies: int, case: str) -> None:
    rows = 6000
    varied, fixed = np.arange(rows) * 17 % 129_280, np.full(rows, 4242)
    tokens, positions = {
        "one prompt": (varied, np.arange(rows)),
        "one position": (varied, fixed),
        "one token": (fixed, np.arange(rows)),
    }[case]
    experts = np.full((rows, 1), 3)
    slots = choose_slots(experts, row_keys(tokens, positions), np.full(16, copies), np.tile(np.arange(copies), (16, 1)))
    counts = np.bincount(slots.ravel(), minlength=copies)
    # Independent choices would stay within four standard deviations of the mean.
    assert np.abs(counts - rows / copies).max() < 4 * np.sqrt(rows / copies)
