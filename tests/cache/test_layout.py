"""The bytes of a block and of a state slot, against the released model's published arithmetic."""

from math import lcm

import pytest

from deepinfer.cache.layout import CacheLayout
from deepinfer.errors import ConfigurationError
from deepinfer.model import ModelConfig, derive_roles
from deepinfer.model.presets import preset
from deepinfer.numerics import Float32Record, IndexRecord, LongRangeRecord, WindowRecord


def layout_of(config: ModelConfig, **changes: object) -> CacheLayout:
    options = {"block_size": 128, "backtrack": 1} | changes
    return CacheLayout.from_config(config, derive_roles(config), **options)


@pytest.fixture(scope="module")
def flash() -> ModelConfig:
    return preset("v41-flash")


@pytest.fixture(scope="module")
def flash_layout(flash: ModelConfig) -> CacheLayout:
    return layout_of(flash, backtrack=6, draft_stages=3)


def test_released_block_has_the_published_size(flash_layout: CacheLayout) -> None:
    assert flash_layout.block_used_bytes == 113_920
    assert flash_layout.block_bytes == 114_048
    assert flash_layout.bytes_per_token == 891


def test_released_block_has_the_published_section_offsets(flash_layout: CacheLayout) -> None:
    places = [(owner.layer, owner.index_offset_bytes, owner.main_offset_bytes) for owner in flash_layout.owners]
    assert places == [(2, 0, 4_352), (8, 22_784, 27_136), (14, 45_568, 49_920), (20, 68_352, 77_056)]
    assert [owner.entries for owner in flash_layout.owners] == [64, 64, 64, 128]


def test_released_state_slot_has_the_published_size(flash_layout: CacheLayout) -> None:
    assert flash_layout.ring == 134
    assert flash_layout.slot_used_bytes == 3_128_352
    assert flash_layout.slot_bytes == 3_128_928
    assert flash_layout.encoder_bytes == 1_415_040


def test_released_state_slot_is_encoder_rings_other_rings_draft_rings_pending_rows(flash_layout: CacheLayout) -> None:
    assert [ring.layer for ring in flash_layout.rings] == list(range(43))
    assert [ring.offset_bytes for ring in flash_layout.rings] == [layer * 134 * 528 for layer in range(43)]
    assert flash_layout.rings[20].offset_bytes == flash_layout.encoder_bytes
    end_of_rings = 43 * 134 * 528
    assert [(rows.layer, rows.offset_bytes, rows.capacity, rows.width) for rows in flash_layout.pendings] == [
        (2, end_of_rings, 7, 1024),
        (8, end_of_rings + 7 * 4096, 7, 1024),
        (14, end_of_rings + 14 * 4096, 7, 1024),
    ]


def test_without_drafts_the_ring_has_one_spare_position_and_no_draft_ring(flash: ModelConfig) -> None:
    layout = layout_of(flash)
    assert layout.ring == 129
    assert [ring.layer for ring in layout.rings] == list(range(40))
    assert [rows.capacity for rows in layout.pendings] == [2, 2, 2]
    assert layout.block_bytes == 114_048


def test_prompt_of_16389_tokens_takes_129_blocks(flash_layout: CacheLayout) -> None:
    assert flash_layout.blocks_of(16_389) == 129
    assert flash_layout.paged_bytes(16_389) == 14_712_192
    assert (flash_layout.blocks_of(0), flash_layout.blocks_of(128), flash_layout.blocks_of(129)) == (0, 1, 2)


def test_addresses_of_a_position(flash_layout: CacheLayout) -> None:
    assert flash_layout.ring_place(16_389) == 41
    assert flash_layout.entry_address(16_389, 2) == (8_194, 128, 2)
    assert flash_layout.entry_address(16_389, 1) == (16_389, 128, 5)
    assert flash_layout.window_slot(2, 128) == 396
    assert flash_layout.window_slot(2, 134) == 268


@pytest.mark.parametrize("name", ["v41-flash", "tiny8", "tiny6-wide", "mini276"])
@pytest.mark.parametrize("kv_cache_dtype", ["released", "float32"])
@pytest.mark.parametrize("block_size", [2, 16, 128])
def test_sections_never_overlap_and_end_inside(name: str, kv_cache_dtype: str, block_size: int) -> None:
    config = preset(name)
    layout = layout_of(
        config,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        backtrack=6,
        draft_stages=config.num_nextn_predict_layers,
    )
    spans = []
    for owner in layout.owners:
        spans.append((owner.index_offset_bytes, owner.entries * layout.index_format.nbytes))
        spans.append((owner.main_offset_bytes, owner.entries * layout.main_format.nbytes))
    check_spans(spans, layout.block_used_bytes, alignment=32)
    assert layout.block_used_bytes <= layout.block_bytes
    assert layout.block_bytes % lcm(128, layout.main_format.nbytes) == 0

    spans = [(ring.offset_bytes, layout.ring * layout.window_format.nbytes) for ring in layout.rings]
    spans += [(rows.offset_bytes, rows.capacity * rows.width * 4) for rows in layout.pendings]
    check_spans(spans, layout.slot_used_bytes, alignment=1)
    assert all(rows.offset_bytes % 4 == 0 for rows in layout.pendings)
    assert layout.slot_used_bytes <= layout.slot_bytes
    assert layout.slot_bytes % lcm(32, layout.window_format.nbytes) == 0


def check_spans(spans: list[tuple[int, int]], total_bytes: int, *, alignment: int) -> None:
    end = 0
    for offset, size in spans:
        assert offset >= end
        assert offset % alignment == 0
        end = offset + size
    assert end <= total_bytes


def test_formats_follow_the_cache_dtype(flash: ModelConfig) -> None:
    released = layout_of(flash)
    assert (released.window_format, released.main_format, released.index_format) == (
        WindowRecord(512),
        LongRangeRecord(512),
        IndexRecord(128),
    )
    plain = layout_of(flash, kv_cache_dtype="float32")
    assert (plain.window_format, plain.main_format, plain.index_format) == (
        Float32Record(512),
        Float32Record(512),
        Float32Record(128),
    )


def test_every_misfit_is_named_at_once(flash: ModelConfig) -> None:
    with pytest.raises(ConfigurationError) as caught:
        layout_of(flash, block_size=65, backtrack=0, draft_stages=4)
    assert len(caught.value.problems) == 3
    for word in ("block_size: 65", "backtrack: 0", "draft_stages: 4"):
        assert word in str(caught.value)
