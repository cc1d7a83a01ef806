import math
from dataclasses import replace

import pytest
import torch

from deepinfer.accelerator.caches import EntryCache, IndexCache, WindowCache
from deepinfer.errors import OpRefusedError
from deepinfer.numerics import Float32Record, IndexRecord, LongRangeRecord, WindowRecord


@pytest.fixture(params=[True, False], ids=["released", "float32"])
def here(request, world):
    return world(released=request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("record", [WindowRecord(64), LongRangeRecord(64), IndexRecord(64), Float32Record(64)])
def test_bytes_are_those_of_the_host_definition(ops, record, dtype):
    x = torch.randn(7, 64).to(dtype)
    codes = ops()["codec"].encode(x, record)
    assert codes.dtype == torch.uint8
    assert torch.equal(codes, record.encode(x.float()))
    assert ops()["codec"].encode(x[:0], record).shape == (0, record.nbytes)


def test_encode_reads_any_strides(ops):
    codec, record = ops()["codec"], WindowRecord(32)
    for x in (torch.randn(32, 5).t(), torch.randn(5, 90)[:, 1:65:2], torch.randn(1, 32).expand(5, 32)):
        assert torch.equal(codec.encode(x, record), codec.encode(x.contiguous(), record))


def test_window_records_are_read_back_by_slot_and_nothing_else_is_written(ops, here):
    codec, cache = ops()["codec"], here.window
    before = cache.bytes_ZRb.clone()
    x = torch.randn(4, 32)
    slots = torch.tensor([3, -1, 2 * here.ring, 4 * here.ring + 11])
    codec.store_window(cache, codec.encode(x, cache.format), slots)
    got = codec.gather_window(cache, torch.tensor([4 * here.ring + 11, 3, -1, 2 * here.ring]))
    expected = cache.format.round_trip(x)
    assert torch.equal(got, torch.stack((expected[3], expected[0], torch.zeros(32), expected[2])))
    changed = (cache.bytes_ZRb != before).any(-1).nonzero().tolist()
    assert changed == [[0, 3], [2, 0], [4, 11]]


def test_entries_are_read_back_by_slot_and_nothing_else_is_written(ops, here):
    codec, cache = ops()["codec"], here.entries
    before = cache.bytes_NEb.clone()
    x = torch.randn(3, 32)
    codec.store_entries(cache, x, torch.tensor([5 * 8 + 7, -1, 2 * 8]))
    got = codec.gather_entries(cache, torch.tensor([-1, 2 * 8, 5 * 8 + 7]))
    expected = cache.format.round_trip(x)
    assert torch.equal(got, torch.stack((torch.zeros(32), expected[2], expected[0])))
    assert (cache.bytes_NEb != before).any(-1).nonzero().tolist() == [[2, 0], [5, 7]]


def test_index_keys_lie_in_two_sections_of_their_block(ops, here):
    codec, cache = ops()["codec"], here.index
    before = cache.bytes_Nb.clone()
    x = torch.randn(2, 32)
    codec.store_index_keys(cache, x, torch.tensor([4 * 8 + 3, -1]))
    assert torch.equal(codec.gather_index_keys(cache, torch.tensor([35, -1])), cache.format.round_trip(x) * _first())
    parts = cache.format.encode_parts(x[:1])
    data, scales = cache.format.data_bytes, cache.format.scale_bytes
    expected = before.clone()
    expected[4, 3 * data : 4 * data] = parts.data
    if scales:
        expected[4, 8 * data + 3 * scales : 8 * data + 4 * scales] = parts.scales
    assert torch.equal(cache.bytes_Nb, expected)


def _first():
    return torch.tensor([[1.0], [0.0]])


def test_no_rows_change_and_give_nothing(ops, here):
    codec, none = ops()["codec"], torch.zeros(0, dtype=torch.int64)
    state, pool = here.window.bytes_ZRb.clone(), here.index.bytes_Nb.clone()
    codec.store_window(here.window, torch.zeros(0, here.window.format.nbytes, dtype=torch.uint8), none)
    codec.store_entries(here.entries, torch.zeros(0, 32), none)
    codec.store_index_keys(here.index, torch.zeros(0, 32), none)
    assert torch.equal(state, here.window.bytes_ZRb)
    assert torch.equal(pool, here.index.bytes_Nb)
    for gathered in (
        codec.gather_window(here.window, none),
        codec.gather_entries(here.entries, none),
        codec.gather_index_keys(here.index, none),
    ):
        assert gathered.shape == (0, 32)
        assert gathered.dtype == torch.float32


def test_only_missing_slots_give_zeros_out_of_poisoned_pools(ops, here):
    missing = torch.full((3,), -1)
    codec = ops()["codec"]
    assert torch.equal(codec.gather_window(here.window, missing), torch.zeros(3, 32))
    assert torch.equal(codec.gather_entries(here.entries, missing), torch.zeros(3, 32))
    assert torch.equal(codec.gather_index_keys(here.index, missing), torch.zeros(3, 32))


def test_nan_stays_in_its_own_record(ops, here):
    codec = ops()["codec"]
    x = torch.randn(3, 32)
    x[1, 4] = math.nan
    slots = torch.tensor([8, 9, 10])
    codec.store_entries(here.entries, x, slots)
    codec.store_index_keys(here.index, x, slots)
    codec.store_window(here.window, codec.encode(x, here.window.format), slots)
    for got in (
        codec.gather_entries(here.entries, slots),
        codec.gather_index_keys(here.index, slots),
        codec.gather_window(here.window, slots),
    ):
        assert got[1].isnan().any()
        assert got[[0, 2]].isfinite().all()


def far(rows, nbytes, stride):
    """A pool whose rows lie ``stride`` bytes apart in memory that is mostly never touched."""
    return torch.empty(stride * (rows - 1) + nbytes, dtype=torch.uint8).as_strided((rows, nbytes), (stride, 1))


def test_offsets_pass_32_bits(ops):
    codec, stride, x = ops()["codec"], 2**30 + 64, torch.randn(1, 32)
    pool = far(4, 2 * 33, stride)
    window = WindowCache(pool.unflatten(1, (2, 33)), WindowRecord(32))
    codec.store_window(window, codec.encode(x, window.format), torch.tensor([7]))
    assert torch.equal(codec.gather_window(window, torch.tensor([7])), window.format.round_trip(x))
    entries = EntryCache(pool[:, : 2 * 18].unflatten(1, (2, 18)), LongRangeRecord(32), 1)
    codec.store_entries(entries, x, torch.tensor([7]))
    assert torch.equal(codec.gather_entries(entries, torch.tensor([7])), entries.format.round_trip(x))
    index = IndexCache(pool[:, : 2 * 17], IndexRecord(32), 2, 1)
    codec.store_index_keys(index, x, torch.tensor([7]))
    assert torch.equal(codec.gather_index_keys(index, torch.tensor([7])), index.format.round_trip(x))
    moves = ops()["moves"]
    saved = moves.save(pool, torch.tensor([3]))
    moves.restore(pool, torch.tensor([2]), saved)
    moves.copy(pool, torch.tensor([2]), torch.tensor([1]))
    assert torch.equal(moves.save(pool, torch.tensor([1])), saved)


def test_what_a_format_cannot_hold_is_refused(ops, here):
    codec = ops()["codec"]
    with pytest.raises(OpRefusedError, match="last dimension must be 32"):
        codec.encode(torch.randn(2, 31), here.window.format)
    with pytest.raises(OpRefusedError, match="int32"):
        codec.store_entries(here.entries, torch.ones(1, 32, dtype=torch.int32), torch.tensor([8]))
    with pytest.raises(OpRefusedError, match=r"give \[T, 32\]"):
        codec.store_index_keys(here.index, torch.randn(1, 1, 32), torch.tensor([8]))
    records = torch.zeros(1, here.window.format.nbytes + 1, dtype=torch.uint8)
    with pytest.raises(OpRefusedError, match="records"):
        codec.store_window(here.window, records, torch.tensor([8]))


def test_index_blocks_may_be_wider_than_their_keys(ops, here):
    codec, x = ops()["codec"], torch.randn(1, 32)
    wide = replace(here.index, bytes_Nb=torch.full((4, here.index.bytes_Nb.shape[1] + 24), 0xFF, dtype=torch.uint8))
    codec.store_index_keys(wide, x, torch.tensor([3 * 8 + 7]))
    assert torch.equal(codec.gather_index_keys(wide, torch.tensor([3 * 8 + 7])), wide.format.round_trip(x))
    assert (wide.bytes_Nb[:, -24:] == 0xFF).all()
