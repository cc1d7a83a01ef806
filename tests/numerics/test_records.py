"""Byte layouts of cache records."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from deepinfer.errors import ArgumentError, ConfigurationError
from deepinfer.numerics import (
    Float32Record,
    IndexRecord,
    LongRangeRecord,
    RecordFormat,
    RecordParts,
    WindowRecord,
    dequantise_mxfp4_blocks,
)

TABLE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
TABLE_BYTES = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
RECORDS = (WindowRecord(64), LongRangeRecord(64), IndexRecord(64), Float32Record(64))


@pytest.fixture(params=RECORDS, ids=lambda record: record.name)
def record(request: pytest.FixtureRequest) -> RecordFormat:
    assert isinstance(request.param, RecordFormat)
    return request.param


def values(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("released", "data_bytes", "scale_bytes", "nbytes"),
    [
        (WindowRecord(512), 512, 16, 528),
        (LongRangeRecord(512), 256, 32, 288),
        (IndexRecord(128), 64, 4, 68),
        (Float32Record(512), 2048, 0, 2048),
        (WindowRecord(64), 64, 2, 66),
        (LongRangeRecord(64), 32, 4, 36),
        (IndexRecord(64), 32, 2, 34),
    ],
)
def test_sizes(released: RecordFormat, data_bytes: int, scale_bytes: int, nbytes: int) -> None:
    assert (released.data_bytes, released.scale_bytes, released.nbytes) == (data_bytes, scale_bytes, nbytes)
    encoded = released.encode(torch.ones(2, released.width))
    assert encoded.shape == (2, nbytes)
    assert encoded.dtype == torch.uint8


def test_window_golden_bytes() -> None:
    first = [448.0, 1.0, -2.0, 0.0, -0.0, 2.0**-9, 17.0, 19.0] + [0.0] * 24
    second = [4 * value for value in reversed(first)]
    first_bytes = [0x7E, 0x38, 0xC0, 0x00, 0x80, 0x01, 0x58, 0x5A] + [0] * 24
    golden = [*first_bytes, *reversed(first_bytes), 127, 129]
    encoded = WindowRecord(64).encode(torch.tensor(first + second))
    assert encoded.tolist() == golden
    # 17 and 19 are ties between 16, 18 and 20: both go to the even code.
    assert WindowRecord(64).decode(encoded)[:8].tolist() == [448.0, 1.0, -2.0, 0.0, -0.0, 2.0**-9, 16.0, 20.0]


def test_long_range_golden_bytes_with_a_scale_per_16() -> None:
    x = torch.tensor([factor * value for factor in (1.0, 2.0, 0.5, 1.875) for value in TABLE])
    encoded = LongRangeRecord(64).encode(x)
    assert encoded.tolist() == [*TABLE_BYTES * 4, 0x38, 0x40, 0x30, 0x3F]
    assert torch.equal(LongRangeRecord(64).decode(encoded), x)


def test_index_golden_bytes_with_a_scale_per_32() -> None:
    x = torch.tensor([factor * value for factor in (1.0, 1.0, 0.25, 0.25) for value in TABLE])
    encoded = IndexRecord(64).encode(x)
    assert encoded.tolist() == [*TABLE_BYTES * 4, 127, 125]
    assert torch.equal(IndexRecord(64).decode(encoded), x)


def test_float32_records_keep_every_bit() -> None:
    x = torch.tensor([1.5, -0.0, math.inf, 2.0**-149])
    encoded = Float32Record(4).encode(x)
    assert encoded[:4].tolist() == list(torch.tensor([1.5]).numpy().tobytes())
    assert torch.equal(Float32Record(4).decode(encoded).view(torch.int32), x.view(torch.int32))


def test_a_float32_record_never_aliases_its_source() -> None:
    x = values(3, 4)
    encoded = Float32Record(4).encode(x)
    parts = Float32Record(4).encode_parts(x)
    decoded = Float32Record(4).decode(encoded)
    x.zero_()
    assert bool((decoded != 0).all())
    assert torch.equal(parts.data, encoded)
    encoded.zero_()
    assert bool((decoded != 0).all())


def test_round_trip_equals_decode_of_encode_and_a_second_encode_of_bytes(record: RecordFormat) -> None:
    x = values(5, 64)
    encoded = record.encode(x)
    assert torch.equal(record.round_trip(x), record.decode(encoded))
    assert record.round_trip(x).dtype == torch.float32
    assert (record.round_trip(x) - x).abs().max() <= x.abs().max() / 6 * 17 / 16


@pytest.mark.parametrize("shape", [(0, 64), (64,), (2, 0, 64), (2, 3, 64)])
def test_any_leading_dimensions_and_zero_rows(record: RecordFormat, shape: tuple[int, ...]) -> None:
    # 1.5 = 6 * 0.25 is exact under every scale rule.
    x = torch.full(shape, 1.5)
    encoded = record.encode(x)
    assert encoded.shape == (*shape[:-1], record.nbytes)
    assert torch.equal(record.decode(encoded), x)


def test_strided_and_misaligned_bytes_decode_like_dense_ones(record: RecordFormat) -> None:
    x = values(6, 64)
    assert torch.equal(record.encode(values(64, 6, seed=8).T), record.encode(values(64, 6, seed=8).T.contiguous()))
    encoded = record.encode(x)
    pool = torch.zeros(6, 3 * record.nbytes + 1, dtype=torch.uint8)
    pool[:, record.nbytes + 1 : 2 * record.nbytes + 1] = encoded
    inside = pool[:, record.nbytes + 1 : 2 * record.nbytes + 1]
    assert torch.equal(record.decode(inside[::2]), record.decode(encoded)[::2])
    single = torch.cat((torch.zeros(1, dtype=torch.uint8), encoded[0]))[1:]
    assert torch.equal(record.decode(single), record.decode(encoded)[0])
    stepped = torch.stack((encoded, encoded), -1)[..., 1]
    assert torch.equal(record.decode(stepped), record.decode(encoded))


def test_other_float_dtypes_store_their_float32_values(record: RecordFormat) -> None:
    x = values(3, 64).double() * (1 + 2.0**-40)
    assert torch.equal(record.encode(x), record.encode(x.float()))
    assert torch.equal(record.encode(x.bfloat16()), record.encode(x.bfloat16().float()))


def test_split_and_join_are_inverse_and_split_is_a_view(record: RecordFormat) -> None:
    encoded = record.encode(values(4, 64))
    parts = record.split(encoded)
    assert parts.data.shape == (4, record.data_bytes)
    assert parts.scales.shape == (4, record.scale_bytes)
    assert torch.equal(record.join(parts), encoded)
    assert torch.equal(record.decode_parts(parts), record.decode(encoded))
    parts.data[0, 0] ^= 1
    assert encoded[0, 0].item() == parts.data[0, 0].item()


def test_block_sections_put_all_data_before_all_scales() -> None:
    index = IndexRecord(128)
    block = torch.zeros(2, 64 * index.nbytes, dtype=torch.uint8)
    sections = index.block_sections(block, 64)
    x = values(2, 64, 128)
    parts = index.encode_parts(x)
    sections.data.copy_(parts.data)
    sections.scales.copy_(parts.scales)
    assert block.shape[-1] == 4352
    assert torch.equal(block[:, 64 * 5 : 64 * 6], parts.data[:, 5])
    assert torch.equal(block[:, 4096 + 4 * 5 : 4096 + 4 * 6], parts.scales[:, 5])
    assert torch.equal(index.decode_parts(index.block_sections(block, 64)), index.round_trip(x))
    assert torch.equal(dequantise_mxfp4_blocks(sections.data, sections.scales), index.round_trip(x))


def test_block_sections_serve_every_format_with_padding_around_the_block(record: RecordFormat) -> None:
    pool = torch.zeros(3, 8 * record.nbytes + 32, dtype=torch.uint8)
    sections = record.block_sections(pool[:, 16:-16], 8)
    x = values(3, 8, 64)
    parts = record.encode_parts(x)
    sections.data.copy_(parts.data)
    sections.scales.copy_(parts.scales)
    assert torch.equal(record.decode_parts(sections), record.round_trip(x))
    assert not bool(pool[:, :16].any() | pool[:, -16:].any())


def test_nan_stays_in_its_own_block_of_the_record() -> None:
    for quantised in RECORDS:
        x = values(2, 64)
        clean = quantised.round_trip(x)
        x[0, 20] = math.nan
        decoded = quantised.round_trip(x)
        start = 20 // quantised.group * quantised.group
        is_nan = torch.zeros(2, 64, dtype=torch.bool)
        is_nan[0, start : start + quantised.group] = True
        assert torch.equal(decoded.isnan(), is_nan)
        assert torch.equal(decoded[~is_nan], clean[~is_nan])


def test_formats_are_values_that_cannot_change() -> None:
    assert WindowRecord(64) == WindowRecord(64)
    assert len({WindowRecord(64), WindowRecord(64), IndexRecord(64), WindowRecord(32)}) == 3
    assert [record.name for record in RECORDS] == ["window", "long_range", "index", "float32"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        WindowRecord(64).width = 32  # type: ignore[misc]


@pytest.mark.parametrize("width", [0, -32, 40])
def test_widths_that_do_not_divide_are_refused(width: int) -> None:
    for record_type in (WindowRecord, LongRangeRecord, IndexRecord):
        with pytest.raises(ConfigurationError, match=rf"width {width} is not a positive multiple"):
            record_type(width)
    with pytest.raises(ConfigurationError, match="float32 record"):
        Float32Record(0)


def test_tensors_of_another_size_or_dtype_are_refused(record: RecordFormat) -> None:
    with pytest.raises(ArgumentError, match=r"values for width 64 must end in 64, shape is \(2, 32\)"):
        record.encode(torch.ones(2, 32))
    with pytest.raises(ArgumentError, match="records for width 64"):
        record.decode(torch.zeros(2, record.nbytes + 1, dtype=torch.uint8))
    with pytest.raises(ArgumentError, match=r"torch\.int8"):
        record.decode(torch.zeros(2, record.nbytes, dtype=torch.int8))
    with pytest.raises(ArgumentError, match="a block of 3 records"):
        record.block_sections(torch.zeros(2 * record.nbytes, dtype=torch.uint8), 3)
    with pytest.raises(ArgumentError, match="scales for width 64"):
        record.decode_parts(
            RecordParts(
                torch.zeros(record.data_bytes, dtype=torch.uint8),
                torch.zeros(record.scale_bytes + 1, dtype=torch.uint8),
            )
        )
