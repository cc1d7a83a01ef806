import pytest
import torch

from deepinfer.errors import OpRefusedError

NONE = torch.zeros(0, dtype=torch.int64)


@pytest.fixture
def pool():
    return torch.randint(0, 256, (9, 20), dtype=torch.uint8)[:, 3:17]


def test_copy_moves_whole_items_and_touches_no_other(ops, pool):
    expected = pool.clone()
    expected[[1, 7]] = pool[[4, 2]]
    ops()["moves"].copy(pool, torch.tensor([4, 2]), torch.tensor([1, 7]))
    assert torch.equal(pool, expected)


def test_one_source_may_have_several_targets(ops, pool):
    expected = pool.clone()
    expected[[1, 7]] = pool[4]
    ops()["moves"].copy(pool, torch.tensor([4, 4]), torch.tensor([1, 7]))
    assert torch.equal(pool, expected)


def test_zero_fills_items_and_touches_no_other(ops, pool):
    expected = pool.clone()
    expected[[0, 8]] = 0
    ops()["moves"].zero(pool, torch.tensor([0, 8]))
    assert torch.equal(pool, expected)


def test_what_was_saved_is_restored_byte_for_byte_in_any_place(ops, pool):
    moves, before = ops()["moves"], pool.clone()
    saved = moves.save(pool, torch.tensor([5, 3]))
    moves.zero(pool, torch.tensor([3, 5]))
    moves.restore(pool, torch.tensor([2, 6]), saved)
    assert saved.device.type == "cpu"
    assert torch.equal(saved, before[[5, 3]])
    assert torch.equal(pool[[2, 6]], before[[5, 3]])


def test_a_saved_item_does_not_follow_its_pool(ops, pool):
    moves, before = ops()["moves"], pool.clone()
    saved = moves.save(pool, torch.tensor([5]))
    moves.zero(pool, torch.tensor([5]))
    assert torch.equal(saved, before[[5]])


def test_moving_nothing_changes_nothing(ops, pool):
    moves, before = ops()["moves"], pool.clone()
    moves.copy(pool, NONE, NONE)
    moves.zero(pool, NONE)
    moves.restore(pool, NONE, moves.save(pool, NONE))
    assert torch.equal(pool, before)


def test_data_of_another_shape_is_refused(ops, pool):
    with pytest.raises(OpRefusedError, match="these targets need"):
        ops()["moves"].restore(pool, torch.tensor([1]), torch.zeros(1, 13, dtype=torch.uint8))
    with pytest.raises(OpRefusedError, match="one target a source"):
        ops()["moves"].copy(pool, torch.tensor([1, 2]), torch.tensor([3]))
