"""Typed views on the byte pools: they alias the right bytes and nothing else."""

import pytest
import torch

from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.pools import CachePools
from deepinfer.errors import ArgumentError
from deepinfer.model import derive_roles
from deepinfer.model.presets import preset


def layout_of(name: str, **changes: object) -> CacheLayout:
    config = preset(name)
    options = {"block_size": 8, "backtrack": 4, "draft_stages": 2} | changes
    return CacheLayout.from_config(config, derive_roles(config), **options)


def pools_of(layout: CacheLayout, num_blocks: int = 3, num_slots: int = 2, device: str = "cpu") -> CachePools:
    return CachePools(
        layout,
        torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8, device=device),
        torch.zeros(num_slots, layout.slot_bytes, dtype=torch.uint8, device=device),
    )


@pytest.mark.parametrize("kv_cache_dtype", ["released", "float32"])
def test_views_of_all_layers_cover_distinct_bytes(kv_cache_dtype: str) -> None:
    layout = layout_of("tiny8", kv_cache_dtype=kv_cache_dtype)
    pools = pools_of(layout)
    for ring in layout.rings:
        pools.window(ring.layer).bytes_ZRb.add_(1)
    for rows in layout.pendings:
        rows_ZPW = pools.pending(rows.layer).rows_ZPW
        rows_ZPW.view(torch.uint8).add_(1)
    ring_bytes = layout.ring * layout.window_format.nbytes
    expected = len(layout.rings) * ring_bytes + sum(rows.capacity * rows.width * 4 for rows in layout.pendings)
    assert int(pools.slot_bytes_Zb.max()) == 1
    assert pools.slot_bytes_Zb.sum(1).tolist() == [expected] * pools.num_slots

    for owner in layout.owners:
        pools.entries(owner.layer).bytes_NEb.add_(1)
        pools.index_keys(owner.layer).bytes_Nb.add_(1)
    per_block = sum(o.entries * (layout.main_format.nbytes + layout.index_format.nbytes) for o in layout.owners)
    assert int(pools.block_bytes_Nb.max()) == 1
    assert pools.block_bytes_Nb.sum(1, dtype=torch.int64).tolist() == [per_block] * pools.num_blocks


def test_a_ring_position_has_the_address_of_the_layout() -> None:
    layout = layout_of("tiny8")
    pools = pools_of(layout)
    ring = layout.rings[5]
    pools.window(5).bytes_ZRb[1, layout.ring_place(31), 3] = 7
    offset = ring.offset_bytes + (31 % layout.ring) * layout.window_format.nbytes + 3
    assert pools.slot_bytes_Zb.nonzero().tolist() == [[1, offset]]


def test_an_entry_has_the_address_of_the_layout() -> None:
    layout = layout_of("tiny8")
    pools = pools_of(layout)
    owner = layout.owners[0]
    _, table_index, offset = layout.entry_address(11, owner.ratio)
    pools.entries(owner.layer).bytes_NEb[table_index, offset, 5] = 7
    expected = owner.main_offset_bytes + offset * layout.main_format.nbytes + 5
    assert pools.block_bytes_Nb.nonzero().tolist() == [[1, expected]]


def test_views_know_ratio_ring_and_capacity() -> None:
    layout = layout_of("tiny8")
    pools = pools_of(layout)
    assert pools.window(9).ring == 12  # the second draft stage
    assert [(pools.entries(owner).ratio, pools.entries(owner).entries_per_block) for owner in (2, 4)] == [
        (2, 4),
        (1, 8),
    ]
    assert [(pools.index_keys(owner).ratio, pools.index_keys(owner).entries_per_block) for owner in (2, 4)] == [
        (2, 4),
        (1, 8),
    ]
    assert pools.pending(2).capacity == 5


def test_addresses_pass_two_gibibytes() -> None:
    layout = layout_of("v41-flash", block_size=128, backtrack=6, draft_stages=3)
    pools = pools_of(layout, num_blocks=200_000, num_slots=2_000, device="meta")
    last = pools.entries(20).bytes_NEb[-1, -1]
    assert last.storage_offset() == 199_999 * 114_048 + 77_056 + 127 * 288
    assert pools.window(42).bytes_ZRb[-1, -1].storage_offset() == 1_999 * 3_128_928 + 42 * 134 * 528 + 133 * 528


@pytest.mark.parametrize("wrong", ["dtype", "width", "strides"])
def test_a_pool_of_the_wrong_form_is_refused(wrong: str) -> None:
    layout = layout_of("tiny8")
    blocks = torch.zeros(2, layout.block_bytes, dtype=torch.uint8)
    slots = {
        "dtype": torch.zeros(2, layout.slot_bytes, dtype=torch.int8),
        "width": torch.zeros(2, layout.slot_bytes + 32, dtype=torch.uint8),
        "strides": torch.zeros(layout.slot_bytes, 2, dtype=torch.uint8).T,
    }[wrong]
    with pytest.raises(ArgumentError, match="slot_bytes_Zb"):
        CachePools(layout, blocks, slots)


def test_both_wrong_pools_are_named() -> None:
    layout = layout_of("tiny8")
    wrong = torch.zeros(2, 3, dtype=torch.uint8)
    with pytest.raises(ArgumentError) as caught:
        CachePools(layout, wrong, wrong)
    assert len(caught.value.problems) == 2
