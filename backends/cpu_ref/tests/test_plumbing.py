import pytest
import torch

from deepinfer.errors import OpRefusedError


@pytest.mark.parametrize("rows", range(1, 31))
def test_only_the_last_ring_of_a_chunk_is_stored_and_each_slot_is_named_once(world, ops, rows):
    here = world(ring=12)
    step = here.step([(1, 5, rows), (0, 0, 3)])
    slots = ops()["plumbing"].window_slots(step).tolist()
    expected = []
    for request, cached, count in ((1, 5, rows), (0, 0, 3)):
        for position in range(cached, cached + count):
            stored = position > cached + count - 1 - 12
            expected.append(int(here.slots[request]) * 12 + position % 12 if stored else -1)
    assert slots == expected
    named = [slot for slot in slots if slot >= 0]
    assert len(named) == len(set(named))


def test_padding_rows_have_no_slots(world, ops):
    step = world().step([(0, 0, 4)], padding=3)
    group = ops()["plumbing"]
    assert group.window_slots(step)[4:].tolist() == [-1, -1, -1]
    assert group.entry_slots(step, 1)[4:].tolist() == [-1, -1, -1]
    assert (group.entry_slots(step, 1)[:4] >= 0).all()


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("cached", [0, 1, 2, 3, 7, 8, 9])
def test_an_entry_is_completed_by_the_last_token_of_its_group_alone(world, ops, ratio, cached):
    here = world(ratio=ratio)
    slots = ops()["plumbing"].entry_slots(here.step([(2, cached, 13)]), ratio).tolist()
    per_block = here.block_size // ratio
    for position, slot in zip(range(cached, cached + 13), slots, strict=True):
        if (position + 1) % ratio:
            assert slot == -1
        else:
            entry = position // ratio
            assert slot == int(here.table[2, entry // per_block]) * per_block + entry % per_block


def test_a_step_without_rows_or_requests_has_no_slots(world, ops):
    group = ops()["plumbing"]
    for step in (world().step([]), world().step([(0, 3, 0)])):
        assert group.window_slots(step).shape == (0,)
        assert group.entry_slots(step, 2).shape == (0,)
    lonely = world().step([], padding=1)
    assert group.window_slots(lonely).tolist() == [-1]
    assert group.entry_slots(lonely, 1).tolist() == [-1]


def test_addresses_pass_32_bits(world, ops):
    here = world(requests=1)
    here.table.fill_(2**33)
    here.slots.fill_(2**33)
    group = ops()["plumbing"]
    step = here.step([(0, 9, 1)])
    assert group.entry_slots(step, 1).tolist() == [2**33 * 8 + 1]
    assert group.window_slots(step).tolist() == [2**33 * 12 + 9]


def test_a_ratio_that_does_not_divide_the_block_is_refused(world, ops):
    with pytest.raises(OpRefusedError, match="ratio 3"):
        ops()["plumbing"].entry_slots(world().step([(0, 0, 1)]), 3)


def test_slots_are_int64(world, ops):
    step = world().step([(0, 0, 5)])
    assert ops()["plumbing"].window_slots(step).dtype == torch.int64
