"""Placement is data: sizes round up, copies start in index order, and the two maps are each other's inverse."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.errors import ArgumentError
from deepinfer.parallel.placement import NO_SLOT, PlacementShape, ReplicaMaps


@pytest.mark.parametrize(
    ("redundant", "ranks", "slots", "each"), [(32, 8, 416, 52), (63, 63, 504, 8), (64, 64, 448, 7)]
)
def test_slots_are_rounded_up_to_a_multiple_of_the_ranks(redundant: int, ranks: int, slots: int, each: int) -> None:
    shape = PlacementShape(1, 384, ranks, redundant)
    assert (shape.slots, shape.slots_per_rank) == (slots, each)


@pytest.mark.parametrize("experts", [5, 7, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("redundant", range(10))
def test_start_up_copies_follow_the_experts_in_index_order(experts: int, ranks: int, redundant: int) -> None:
    shape = PlacementShape(2, experts, ranks, redundant)
    layout = shape.start_up_layout()
    shape.check(layout)
    assert shape.slots >= experts + redundant
    assert shape.slots - experts - redundant < ranks
    wanted = ([*range(experts)] * 4)[: shape.slots]
    assert layout.tolist() == [wanted, wanted]


def test_the_maps_are_inverse() -> None:
    shape = PlacementShape(3, 7, 4, 5)
    generator = np.random.default_rng(0)
    layout = np.stack([generator.permutation(row) for row in shape.start_up_layout()]).astype(np.int32)
    maps = ReplicaMaps.of(layout, shape)
    assert maps.most_copies == 2
    for layer in range(3):
        for expert in range(7):
            slots = [slot for slot in maps.slots_LEC[layer, expert].tolist() if slot != NO_SLOT]
            assert slots == np.flatnonzero(layout[layer] == expert).tolist()
            assert maps.copies_LE[layer, expert] == len(slots)


def test_everything_wrong_with_a_layout_is_named_at_once() -> None:
    shape = PlacementShape(2, 4, 2, 2)
    layout = np.array([[0, 1, 2, 3, 0, 9], [0, 0, 0, 3, 3, 3]], dtype=np.int32)
    with pytest.raises(ArgumentError) as caught:
        shape.check(layout)
    text = str(caught.value)
    assert "layer 0 holds unknown experts [9]" in text
    assert "layer 1 has no slot for experts [1, 2]" in text
    assert len(caught.value.problems) == 2


def test_a_layout_of_another_size_and_type_is_refused() -> None:
    with pytest.raises(ArgumentError) as caught:
        PlacementShape(2, 4, 2, 2).check(np.zeros((1, 6), dtype=np.int64))
    assert len(caught.value.problems) == 2


def test_impossible_sizes_are_named_at_once() -> None:
    with pytest.raises(ArgumentError) as caught:
        PlacementShape(0, 0, 0, -1)
    assert len(caught.value.problems) == 4
