"""An exchange brings every slot to its new expert, weights and scales together, in one order that all ranks share."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.errors import ArgumentError
from deepinfer.parallel.exchange import ExpertPart, SlotMove, exchanged, plan_exchange
from deepinfer.parallel.placement import PlacementShape

PARTS = (ExpertPart("w1", 96), ExpertPart("w1_scale", 4))


def layouts(seed: int, ranks: int = 4) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    start = PlacementShape(3, 7, ranks, 5).start_up_layout()
    old, new = (np.stack([generator.permutation(row) for row in start]).astype(np.int32) for _ in range(2))
    new[:, :2] = old[:, :2]
    old[2] = new[2]
    return old, new


@pytest.mark.parametrize("seed", range(10))
def test_after_the_exchange_every_slot_holds_its_expert_s_weights_and_scales(seed: int) -> None:
    old, new = layouts(seed)
    plan = plan_exchange(old, new, 4, PARTS)
    for bits in (np.arange(7) * 1000, np.arange(7) * -3):  # weights, scales: a value for every expert
        assert exchanged(bits[old], plan).tolist() == bits[new].tolist()


@pytest.mark.parametrize("seed", range(10))
def test_the_moves_are_exactly_the_slots_that_change(seed: int) -> None:
    old, new = layouts(seed)
    plan = plan_exchange(old, new, 4, PARTS)
    wanted = [(layer, slot) for layer, slot in np.argwhere(old != new).tolist()]
    assert [(move.layer, move.destination) for move in plan.moves] == wanted
    assert not any(move.layer == 2 for move in plan.moves)


@pytest.mark.parametrize("seed", range(10))
def test_what_one_rank_sends_another_receives_in_the_same_order(seed: int) -> None:
    plan = plan_exchange(*layouts(seed), 4, PARTS)
    sides = [plan.for_rank(rank) for rank in range(4)]
    of = plan.slots_per_rank
    for one in range(4):
        for other in range(4):
            sent = [move for move in sides[one].sends if move.destination // of == other]
            assert sent == [move for move in sides[other].receives if move.source // of == one]
    assert sum(len(side.copies) + len(side.sends) for side in sides) == len(plan.moves)
    assert plan.nbytes == 100 * sum(len(side.receives) for side in sides)


def test_a_copy_on_the_own_rank_is_preferred_and_sends_are_spread() -> None:
    old = np.array([[0, 1, 0, 2, 3, 0, 4, 5]], dtype=np.int32)
    new = np.array([[1, 0, 0, 2, 3, 0, 0, 0]], dtype=np.int32)
    plan = plan_exchange(old, new, 4, PARTS)
    assert plan.moves == (SlotMove(0, 1, 0), SlotMove(0, 0, 1), SlotMove(0, 0, 6), SlotMove(0, 2, 7))
    assert plan.crossing == plan.moves[2:]


def test_equal_layouts_move_nothing() -> None:
    old, _ = layouts(0)
    plan = plan_exchange(old, old.copy(), 4, PARTS)
    assert (plan.moves, plan.nbytes) == ((), 0)


def test_what_cannot_be_exchanged_is_refused() -> None:
    old, new = layouts(0)
    with pytest.raises(ArgumentError) as caught:
        plan_exchange(old, new, 5, (ExpertPart("w1", 0),))
    assert len(caught.value.problems) == 2
    with pytest.raises(ArgumentError, match="two of one shape"):
        plan_exchange(old, new[:1], 4, PARTS)
    with pytest.raises(ArgumentError, match="no slot of layer 0 holds expert 99"):
        plan_exchange(old, np.where(new == 3, np.int32(99), new), 4, PARTS)
    with pytest.raises(ArgumentError, match="ranks 0 to 3"):
        plan_exchange(old, new, 4, PARTS).for_rank(4)
