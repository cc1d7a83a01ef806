import itertools
import math

import pytest
import torch

from deepinfer.accelerator.caches import PendingCache
from deepinfer.errors import OpRefusedError

WIDTH = 32


def pooled(gate, latent):
    """Independent: pairs of a whole sequence in float64, zeros at even positions."""
    result = torch.zeros(gate.shape, dtype=torch.float64)
    for position in range(1, gate.shape[0], 2):
        for channel in range(gate.shape[1]):
            gates = [float(gate[position - 1, channel]), float(gate[position, channel])]
            powers = [math.exp(value - max(gates)) for value in gates]
            values = [float(latent[position - 1, channel]), float(latent[position, channel])]
            result[position, channel] = sum(p * v for p, v in zip(powers, values, strict=True)) / sum(powers)
    return result


def run(here, group, gate, latent, cuts, request=1, **step):
    """Feed one sequence in chunks that end at the cuts."""
    outputs = []
    for start, stop in itertools.pairwise([0, *cuts]):
        layout = here.step([(request, start, stop - start)], **step)
        outputs.append(group.pool_pairs(gate[start:stop], latent[start:stop], here.pending, layout))
    return torch.cat(outputs)


@pytest.mark.parametrize("length", range(1, 10))
def test_every_split_into_three_chunks_pools_the_same_pairs(world, ops, length):
    gate, latent = torch.randn(length, WIDTH), torch.randn(length, WIDTH)
    group = ops()["compression"]
    whole = run(world(), group, gate, latent, [length])
    torch.testing.assert_close(whole.double(), pooled(gate, latent), rtol=1e-5, atol=1e-6)
    for first, second in itertools.combinations_with_replacement(range(length + 1), 2):
        assert torch.equal(run(world(), group, gate, latent, [first, second, length]), whole)


def test_step_by_step_decode_equals_one_chunk_bit_for_bit(world, ops):
    gate, latent = torch.randn(24, WIDTH), torch.randn(24, WIDTH)
    for options in ({}, {"batch_invariant": True}):
        group = ops(**options)["compression"]
        whole = run(world(), group, gate, latent, [24])
        steps = run(world(), group, gate, latent, list(range(1, 25)), kind="decode")
        assert torch.equal(steps, whole)


def test_float64_rows_keep_their_bits_across_chunks_only_when_asked_for_invariance(world, ops):
    gate, latent = torch.randn(2, 6, WIDTH, dtype=torch.float64)  # more bits than the float32 state holds
    exact = ops(activation_dtype=torch.float64)["compression"]
    torch.testing.assert_close(run(world(), exact, gate, latent, [6]), pooled(gate, latent), rtol=1e-14, atol=1e-14)
    invariant = ops(activation_dtype=torch.float64, batch_invariant=True)["compression"]
    whole = run(world(), invariant, gate, latent, [6])
    assert torch.equal(run(world(), invariant, gate, latent, [3, 6]), whole)


@pytest.mark.parametrize("accepted", range(1, 7))
@pytest.mark.parametrize("start", [0, 1, 5, 6])
def test_rejected_drafts_are_overwritten(world, ops, accepted, start):
    gate, latent = torch.randn(20, WIDTH), torch.randn(20, WIDTH)
    here, group = world(), ops()["compression"]
    run(here, group, gate, latent, [start])
    wrong = torch.randn(6, WIDTH)
    wrong[:accepted] = gate[start : start + accepted]
    drafts = latent[start : start + 6].clone()
    drafts[accepted:] = 99.0
    group.pool_pairs(wrong, drafts, here.pending, here.step([(1, start, 6)], kind="decode"))
    resumed = start + accepted
    layout = here.step([(1, resumed, 20 - resumed)])
    result = group.pool_pairs(gate[resumed:], latent[resumed:], here.pending, layout)
    torch.testing.assert_close(result.double(), pooled(gate, latent)[resumed:], rtol=1e-5, atol=1e-6)


def test_requests_and_padding_do_not_touch_each_other(world, ops):
    here, group = world(), ops()["compression"]
    gate, latent = torch.randn(9, WIDTH), torch.randn(9, WIDTH)
    gate[3:5], latent[3:5] = math.nan, math.nan
    gate[7:], latent[7:] = math.nan, math.nan
    before = here.pending.rows_ZPW.clone()
    # Request 0 at 0..2, request 2 (NaN) at 4..5, request 1 at 0..1, and two rows of padding full of NaN.
    result = group.pool_pairs(gate, latent, here.pending, here.step([(0, 0, 3), (2, 4, 2), (1, 0, 2)], padding=2))
    torch.testing.assert_close(result[:3].double(), pooled(gate[:3], latent[:3]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result[5:7].double(), pooled(gate[5:7], latent[5:7]), rtol=1e-5, atol=1e-6)
    assert torch.equal(result[7:], torch.zeros(2, WIDTH))
    written = ~torch.equal(before, here.pending.rows_ZPW)
    assert written
    slots = here.slots.tolist()
    places = {(slots[0], p % 7) for p in range(3)} | {(slots[2], p % 7) for p in (4, 5)}
    places |= {(slots[1], p % 7) for p in range(2)}
    for slot in range(before.shape[0]):
        for place in range(7):
            same = torch.equal(before[slot, place].nan_to_num(1.5), here.pending.rows_ZPW[slot, place].nan_to_num(1.5))
            assert same == ((slot, place) not in places) or (slot == slots[2])


def test_even_positions_are_zero_even_when_the_state_is_poisoned(world, ops):
    here = world()
    step = here.step([(0, 6, 1)])
    result = ops()["compression"].pool_pairs(torch.randn(1, WIDTH), torch.randn(1, WIDTH), here.pending, step)
    assert torch.equal(result, torch.zeros(1, WIDTH))


def test_a_chunk_longer_than_the_state_keeps_its_last_rows(world, ops):
    here = world()
    gate, latent = torch.randn(23, WIDTH), torch.randn(23, WIDTH)
    run(here, ops()["compression"], gate, latent, [23])
    for position in range(16, 23):
        expected = torch.cat((gate[position], latent[position]))
        assert torch.equal(here.pending.rows_ZPW[here.slots[1], position % 7], expected)


def test_no_rows_give_no_rows(world, ops):
    here, group = world(), ops()["compression"]
    for step in (here.step([]), here.step([(1, 3, 0)])):
        empty = torch.zeros(0, WIDTH)
        assert group.pool_pairs(empty, empty, here.pending, step).shape == (0, WIDTH)
    lonely = group.pool_pairs(torch.ones(1, WIDTH), torch.ones(1, WIDTH), here.pending, here.step([], padding=1))
    assert torch.equal(lonely, torch.zeros(1, WIDTH))


def test_inputs_of_any_strides_pool_the_same(world, ops):
    group = ops()["compression"]
    gate, latent = torch.randn(WIDTH, 6).t(), torch.randn(6, 2 * WIDTH)[:, ::2]
    expected = run(world(), group, gate.contiguous(), latent.contiguous(), [6])
    assert torch.equal(run(world(), group, gate, latent, [6]), expected)


def test_extreme_gates_choose_one_row_without_overflow(world, ops):
    gate = torch.tensor([[3e38, -3e38]]).repeat(2, 16)
    gate[1] = -gate[0]
    latent = torch.randn(2, WIDTH)
    result = run(world(), ops()["compression"], gate, latent, [2])
    assert torch.equal(result[1, ::2], latent[0, ::2])
    assert torch.equal(result[1, 1::2], latent[1, 1::2])


def test_what_does_not_fit_the_state_is_refused(world, ops):
    here, group = world(), ops()["compression"]
    step = here.step([(0, 0, 2)])
    with pytest.raises(OpRefusedError, match="bfloat16"):
        group.pool_pairs(torch.zeros(2, WIDTH).bfloat16(), torch.zeros(2, WIDTH), here.pending, step)
    narrow = PendingCache(here.pending.rows_ZPW[:, :, :-2])
    with pytest.raises(OpRefusedError, match="gate and latent"):
        group.pool_pairs(torch.zeros(2, WIDTH), torch.zeros(2, WIDTH), narrow, step)
