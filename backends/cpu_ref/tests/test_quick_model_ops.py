"""The quick model ops against the readable ones on the same inputs: equal up to rounding, equal where it is exact."""

import math

import numpy as np
import pytest
import torch

from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.ops.attention import LongRange
from deepinfer.accelerator.ops.experts import RouterWeights, Routing
from deepinfer.accelerator.ops.mixing import MixWeights
from deepinfer.accelerator.ops.norm import RotaryTable
from deepinfer.accelerator.ops.selection import SelectionRule
from deepinfer.accelerator.weights import StoredExpert, StoredWeight
from deepinfer.errors import OpRefusedError
from deepinfer.numerics import Float32Record, IndexRecord, LongRangeRecord, WindowRecord
from deepinfer_cpu_ref import Driver
from deepinfer_cpu_ref.attention import CpuRefAttention
from deepinfer_cpu_ref.quick_codec import QuickDecoder, halves, interleaved
from deepinfer_cpu_ref.quick_memory import empty_weight
from deepinfer_cpu_ref.quick_mixing import doubly_stochastic
from deepinfer_cpu_ref.quick_row import RowAttention

QUICK = Driver().op_groups(OpOptions())
READABLE = Driver(readable=True).op_groups(OpOptions())
ROWS = [1, 2, 7, 70]


def close(quick, readable):
    torch.testing.assert_close(quick, readable, rtol=1e-5, atol=5e-6, equal_nan=True)


@pytest.fixture
def no_readable_attention(monkeypatch):
    """Let a test fail that reaches the readable op where the quick one is meant."""

    def reached(*arguments):
        raise AssertionError

    monkeypatch.setattr(CpuRefAttention, "sparse", reached)


@pytest.mark.parametrize(
    "options", [{"batch_invariant": True}, {"numerics": "served"}, {"activation_dtype": torch.bfloat16}]
)
def test_every_other_mode_is_readable(options):
    groups = Driver().op_groups(OpOptions(**options))
    readable = Driver(readable=True).op_groups(OpOptions(**options))
    # The quick sampler gives the same bits as the readable one, so it serves every mode.
    model_ops = groups.keys() - {"sampling"}
    assert {name: type(groups[name]) for name in model_ops} == {name: type(readable[name]) for name in model_ops}
    assert {name for name in groups if type(QUICK[name]) is not type(READABLE[name])} == {
        "linear",
        "norm",
        "codec",
        "selection",
        "attention",
        "mixing",
        "experts",
        "sampling",
    }


def test_window_records_decode_exactly_whatever_their_bytes():
    record_format = WindowRecord(256)
    codes = torch.arange(256, dtype=torch.uint8)
    for scales in (range(0, 247), range(240, 256)):
        for scale in scales:
            record = torch.cat((codes, torch.full((8,), scale, dtype=torch.uint8)))[None]
            for skipped in (None, 0x7F):
                known = record.clone()
                if skipped is not None:
                    known[:, :256][(known[:, :256] & 0x7F) == skipped] = 0
                torch.testing.assert_close(
                    QuickDecoder().window(known, record_format),
                    record_format.decode(known),
                    rtol=0,
                    atol=0,
                    equal_nan=True,
                )


def test_long_range_records_decode_exactly_whatever_their_bytes():
    record_format = LongRangeRecord(512)
    codes = torch.arange(256, dtype=torch.uint8).repeat(8, 1)
    records = torch.cat((codes, torch.arange(256, dtype=torch.uint8).view(8, 32)), dim=1)
    decoded = interleaved(QuickDecoder().entries(records, record_format))
    torch.testing.assert_close(decoded, record_format.decode(records), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("record_format", [WindowRecord(256), LongRangeRecord(256), Float32Record(256)])
def test_keys_of_a_single_row_decode_exactly_whatever_their_bytes(record_format):
    generator = torch.Generator().manual_seed(5)
    records = torch.randint(256, (600, record_format.nbytes), generator=generator, dtype=torch.uint8)
    if isinstance(record_format, WindowRecord):
        records[:, 256:] = torch.arange(600)[:, None] % 256
        # Most records hold a NaN, and one is enough for the definition's own way.
        records[:, :256][(records[:, :256] & 0x7F) == 0x7F] = 0x7E
        records[:256, :256] = torch.arange(256, dtype=torch.uint8)
    for part in records.split(1):
        keys = np.empty((1, 256), dtype=np.float32)
        RowAttention().decode(part.numpy(), record_format, keys)
        expected = record_format.decode(part)
        torch.testing.assert_close(torch.from_numpy(keys), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("record_format", [WindowRecord(256), LongRangeRecord(256), Float32Record(256)])
def test_a_row_that_selected_nothing_decodes_nothing(record_format):
    keys = np.empty((0, 256), dtype=np.float32)
    RowAttention().decode(np.empty((0, record_format.nbytes), dtype=np.uint8), record_format, keys)
    assert keys.size == 0


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-6, 1.0, 448.0, 1e4, 3e38, math.inf, math.nan])
def test_window_records_are_encoded_to_the_same_bytes(size):
    record_format = WindowRecord(64)
    x = torch.randn(6, 64) * torch.tensor([1.0, 1e-3, 1e3, -1.0, 0.0, 1.0]).unsqueeze(1) * min(size, 8e37)
    x[2, 33] = size
    x[3, ::2] = 448.0
    x[4, 40] = -0.0
    for rows in (x, x[:1], x[::2], x[:0]):
        assert torch.equal(QUICK["codec"].encode(rows, record_format), record_format.encode(rows))
    assert torch.equal(QUICK["codec"].encode(x.double(), record_format), record_format.encode(x.double()))


@pytest.mark.parametrize("slots", [[9], [-1], [3, -1, 14], [-1, -1, -1], [0, 1, 2, 3, 4, 5]])
def test_records_are_stored_where_the_readable_op_stores_them(world, slots):
    quick, readable = world(), world()
    slot = torch.tensor(slots)
    x = torch.randn(len(slots), quick.width)
    records = quick.window.format.encode(x)
    keys = torch.randn(len(slots), quick.index.format.width)
    for groups, here in ((QUICK, quick), (READABLE, readable)):
        groups["codec"].store_window(here.window, records, slot)
        groups["codec"].store_entries(here.entries, x, slot)
        groups["codec"].store_index_keys(here.index, keys, slot)
    assert torch.equal(quick.window.bytes_ZRb, readable.window.bytes_ZRb)
    assert torch.equal(quick.entries.bytes_NEb, readable.entries.bytes_NEb)
    assert torch.equal(quick.index.bytes_Nb, readable.index.bytes_Nb)


def test_halves_and_interleaved_undo_each_other():
    x = torch.arange(24.0).view(2, 12)
    assert halves(x)[0].tolist() == [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11]
    assert torch.equal(interleaved(halves(x)), x)


@pytest.mark.parametrize("rows", ROWS)
def test_mixing(rows):
    streams = torch.randn(rows, 4, 32)
    weights = MixWeights(torch.randn(24, 128), torch.randn(24), torch.randn(3))
    quick = QUICK["mixing"].mixes(streams, weights, 20, 1e-6, 1e-20)
    readable = READABLE["mixing"].mixes(streams, weights, 20, 1e-6, 1e-20)
    for name in ("pre_TS", "post_TS", "comb_TSS"):
        close(getattr(quick, name), getattr(readable, name))
    output = torch.randn(rows, 32)
    close(QUICK["mixing"].collapse(streams, quick.pre_TS), READABLE["mixing"].collapse(streams, quick.pre_TS))
    close(QUICK["mixing"].post(output, streams, quick), READABLE["mixing"].post(output, streams, quick))


@pytest.mark.parametrize("size", [0.0, 1.0, 30.0, 1e4, math.inf, math.nan])
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_the_mix_of_a_single_row_is_that_of_a_row_among_others(size, iterations):
    streams = torch.randn(1, 4, 32)
    weights = MixWeights(torch.randn(24, 128), torch.randn(24) * size, torch.randn(3))
    alone = QUICK["mixing"].mixes(streams, weights, iterations, 1e-6, 1e-20)
    among = QUICK["mixing"].mixes(streams.expand(3, -1, -1), weights, iterations, 1e-6, 1e-20)
    readable = READABLE["mixing"].mixes(streams, weights, iterations, 1e-6, 1e-20)
    for name in ("pre_TS", "post_TS", "comb_TSS"):
        close(getattr(alone, name), getattr(among, name)[1:2])
        close(getattr(alone, name), getattr(readable, name))


def test_the_mix_of_a_single_row_of_any_number_of_streams():
    streams = torch.randn(1, 3, 32)
    weights = MixWeights(torch.randn(15, 96), torch.randn(15), torch.randn(3))
    quick = QUICK["mixing"].mixes(streams, weights, 20, 1e-6, 1e-20)
    close(quick.comb_TSS, READABLE["mixing"].mixes(streams, weights, 20, 1e-6, 1e-20).comb_TSS)


def test_an_iteration_that_changes_nothing_ends_the_normalisation_with_the_same_bits():
    logits = torch.randn(4, 4, 5).numpy()
    eps = logits.dtype.type(1e-6)
    assert (doubly_stochastic(logits, 400, eps) == doubly_stochastic(logits, 4000, eps)).all()
    assert (doubly_stochastic(logits, 1, eps) != doubly_stochastic(logits, 2, eps)).any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_leaves_its_neighbours_mixes_alone(bad):
    streams = torch.randn(3, 4, 32)
    weights = MixWeights(torch.randn(24, 128), torch.randn(24), torch.randn(3))
    clean = QUICK["mixing"].mixes(streams, weights, 20, 1e-6, 1e-20)
    streams[1, 2, 5] = bad
    mixed = QUICK["mixing"].mixes(streams, weights, 20, 1e-6, 1e-20)
    assert mixed.comb_TSS[1].isnan().all()
    close(mixed.comb_TSS[[0, 2]], clean.comb_TSS[[0, 2]])


@pytest.mark.parametrize("rows", [*ROWS, 300])
def test_norm_and_rotary(rows):
    x, weight = torch.randn(rows, 512), torch.randn(512)
    close(QUICK["norm"].rms(x, weight, 1e-6), READABLE["norm"].rms(x, weight, 1e-6))
    table = RotaryTable(torch.randn(64, 16), torch.randn(64, 16))
    position = torch.randint(64, (rows,))
    for values in (x, x.view(rows, 4, 128)):
        before = values.clone()
        for inverse in (False, True):
            quick = QUICK["norm"].rotary(values, table, position, inverse=inverse)
            close(quick, READABLE["norm"].rotary(values, table, position, inverse=inverse))
        assert torch.equal(values, before)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf, 1e30])
def test_a_single_row_is_normalised_as_the_readable_op_does_it(bad):
    x, weight = torch.full((1, 64), bad), torch.randn(64)
    for eps in (1e-6, 0.0):
        close(QUICK["norm"].rms(x, weight, eps), READABLE["norm"].rms(x, weight, eps))


def test_a_single_row_is_turned_by_its_own_table_and_position():
    tables = [RotaryTable(torch.randn(64, 16), torch.randn(64, 16)) for _ in range(12)]
    x = torch.randn(1, 64)
    for place in (3, 3, 5):
        for table in (*tables, *tables):
            quick = QUICK["norm"].rotary(x, table, torch.tensor([place]))
            close(quick, READABLE["norm"].rotary(x, table, torch.tensor([place])))


def stored(rows, columns):
    return StoredWeight("w", "float32", torch.randn(rows, columns) * columns**-0.5, None, rows, columns)


@pytest.mark.parametrize("rows", ROWS)
def test_products(rows):
    weight, x = stored(24, 64), torch.randn(rows, 64)
    close(
        QUICK["linear"].dense(x, QUICK["linear"].prepare(weight)),
        READABLE["linear"].dense(x, READABLE["linear"].prepare(weight)),
    )
    prepared = QUICK["linear"].prepare_grouped(weight, 3)
    x = torch.randn(rows, 3, 64)
    close(QUICK["linear"].grouped(x, prepared), READABLE["linear"].grouped(x, prepared))


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 8, 9])
@pytest.mark.parametrize("width", [2048, 2049])
def test_products_with_a_wide_matrix(rows, width):
    weight, x = stored(width, 300), torch.randn(rows, 300)
    prepared = QUICK["linear"].prepare(weight)
    assert prepared.nbytes == 4 * width * 300
    product = QUICK["linear"].dense(x, prepared)
    assert product.shape == (rows, width)
    assert product.is_contiguous()
    readable = READABLE["linear"].dense(x, READABLE["linear"].prepare(weight))
    close(product, readable)
    close(READABLE["linear"].dense(x, prepared), readable)


def test_memory_for_weights_is_as_large_as_asked_for_with_huge_pages_and_without(monkeypatch):
    for shape in ((2, 3), (3, 1024, 1024)):
        assert empty_weight(*shape).fill_(1.0).sum() == math.prod(shape)
    monkeypatch.delattr("mmap.MADV_HUGEPAGE", raising=False)
    assert empty_weight(3, 1024, 1024).shape == (3, 1024, 1024)


@pytest.mark.parametrize("rows", ROWS)
def test_experts_of_one_preparation_by_either_way(rows):
    experts = [StoredExpert(stored(16, 32), stored(32, 16), stored(16, 32)) for _ in range(9)]
    prepared = QUICK["experts"].prepare(experts[:8], 0.7)
    shared = QUICK["experts"].prepare_shared(experts[8], 0.7)
    assert prepared.nbytes == 8 * 3 * 16 * 32 * 4
    x, none = torch.randn(rows, 32), torch.zeros(rows, dtype=torch.bool)
    router = RouterWeights(torch.randn(8, 32), torch.randn(8), torch.randn(8))
    valid, image = torch.arange(rows) % 3 != 1, torch.arange(rows) % 2 == 1
    for flags in ((none, ~none), (image, valid), (none, none)):
        quick = QUICK["experts"].route(x, router, *flags, 3, 1.5)
        readable = READABLE["experts"].route(x, router, *flags, 3, 1.5)
        assert torch.equal(quick.experts_Tk, readable.experts_Tk)
        close(quick.weights_Tk, readable.weights_Tk)
        close(QUICK["experts"].local(x, quick, prepared, shared), READABLE["experts"].local(x, quick, prepared, shared))


@pytest.mark.parametrize("shared_width", [16, 24])
@pytest.mark.parametrize("chosen", [[5, 0, 3], [2, 2, 7], [1, -1, 4]])
def test_the_experts_of_a_single_row(chosen, shared_width):
    experts = [StoredExpert(stored(16, 32), stored(32, 16), stored(16, 32)) for _ in range(8)]
    shared = StoredExpert(stored(shared_width, 32), stored(32, shared_width), stored(shared_width, 32))
    routing = Routing(torch.tensor([chosen]), torch.tensor([[0.5, 0.25, 1.5]]))
    x = torch.randn(1, 32) * 3
    quick, readable = (
        groups["experts"].local(
            x, routing, groups["experts"].prepare(experts, 0.7), groups["experts"].prepare_shared(shared, 0.7)
        )
        for groups in (QUICK, READABLE)
    )
    close(quick, readable)


def test_an_expert_that_does_not_exist_is_refused_for_a_single_row_too():
    prepared = QUICK["experts"].prepare([StoredExpert(stored(16, 32), stored(32, 16), stored(16, 32))], 0.7)
    routing = Routing(torch.tensor([[1]]), torch.tensor([[1.0]]))
    with pytest.raises(OpRefusedError, match="expert 1 was chosen"):
        QUICK["experts"].local(torch.randn(1, 32), routing, prepared, prepared)


def test_a_slot_without_an_expert_is_zero_beside_an_infinite_row():
    prepared = QUICK["experts"].prepare([StoredExpert(stored(16, 32), stored(32, 16), stored(16, 32))], 1e30)
    x = torch.full((2, 32), 1e38)
    routing = Routing(torch.tensor([[0, -1], [-1, -1]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    outputs = QUICK["experts"].routed(x, routing, prepared)
    assert not outputs[0, 0].isfinite().all()
    assert (outputs[0, 1] == 0).all()
    assert (outputs[1] == 0).all()


def attention_inputs(here, chunks, kind, entries):
    rows = sum(count for _, _, count in chunks)
    own = here.window.format.encode(torch.randn(rows, here.width))
    start = 0
    for request, cached, count in chunks:
        slot, ring = here.slots[request], here.window.ring
        for position in range(max(0, cached - ring), cached):
            here.window.bytes_ZRb[slot, position % ring] = here.window.format.encode(torch.randn(here.width))
        if kind == "decode":
            for row in range(count):
                here.window.bytes_ZRb[slot, (cached + row) % ring] = own[start + row]
        for entry in range(20):
            per_block = here.entries.entries_per_block
            block = here.table[request, entry // per_block]
            here.entries.bytes_NEb[block, entry % per_block] = here.entries.format.encode(torch.randn(here.width))
        start += count
    long_range = None
    if entries:
        chosen = torch.stack([torch.randperm(20)[:6] for _ in range(rows)])
        chosen[::2, 3:] = -1
        chosen[1::3, 0] = -1
        long_range = LongRange(here.entries, chosen)
    return (
        torch.randn(rows, 3, here.width),
        own,
        here.window,
        long_range,
        torch.randn(3),
        here.window_size,
        here.step(chunks, kind),
    )


@pytest.mark.parametrize("entries", [True, False])
@pytest.mark.parametrize("released", [True, False])
@pytest.mark.parametrize(
    ("kind", "chunks"),
    [
        ("decode", [(0, 0, 1)]),
        ("decode", [(1, 40, 1)]),
        ("decode", [(2, 13, 1), (0, 3, 1), (1, 40, 1)]),
        ("decode", [(2, 13, 3), (0, 3, 1)]),
        ("prefill", [(2, 13, 5), (0, 0, 11), (1, 7, 1)]),
        ("prefill", [(1, 0, 1)]),
    ],
)
def test_attention(world, kind, chunks, released, entries, no_readable_attention, monkeypatch):
    arguments = attention_inputs(world(released=released), chunks, kind, entries)
    quick = QUICK["attention"].sparse(*arguments)
    monkeypatch.undo()
    close(quick, READABLE["attention"].sparse(*arguments))


@pytest.mark.parametrize("few_rows", [0, 100])
@pytest.mark.parametrize("bad", [0x7F, 0xFF])
def test_a_key_that_is_not_finite_spoils_only_rows_that_see_it(world, bad, few_rows, monkeypatch):
    monkeypatch.setattr("deepinfer_cpu_ref.quick_attention.FEW_ROWS", few_rows)
    here = world()
    arguments = attention_inputs(here, [(2, 13, 1), (0, 3, 1), (1, 40, 1)], "decode", entries=True)
    here.window.bytes_ZRb[here.slots[0], 2] = bad
    quick, readable = QUICK["attention"].sparse(*arguments), READABLE["attention"].sparse(*arguments)
    close(quick, readable)
    assert readable[1].isnan().all()
    assert not readable[[0, 2]].isnan().any()


def test_attention_in_tiles(world, monkeypatch, no_readable_attention):
    monkeypatch.setattr("deepinfer_cpu_ref.quick_attention.FEW_ROWS", 0)
    monkeypatch.setattr("deepinfer_cpu_ref.quick_attention.TILE_ROWS", 3)
    monkeypatch.setattr("deepinfer_cpu_ref.quick_attention.TILE_BYTES", 1)
    cases = [
        attention_inputs(world(), chunks, kind, entries=True)
        for kind, chunks in (("decode", [(2, 13, 1), (0, 3, 1)]), ("prefill", [(0, 0, 11), (1, 7, 7)]))
    ]
    found = [QUICK["attention"].sparse(*arguments) for arguments in cases]
    monkeypatch.undo()
    for quick, arguments in zip(found, cases, strict=True):
        close(quick, READABLE["attention"].sparse(*arguments))


@pytest.mark.parametrize("candidates", [[0, 1, 2], [0, 2, -1], [0, 1, -1]])
def test_selection_with_candidates_that_exclude_something_or_nothing(world, candidates):
    here = world(index_width=32)
    step = here.step([(0, 10, 1)], "decode")
    for entry in range(11):
        record = IndexRecord(32).encode_parts(torch.randn(32))
        block = here.table[0, entry // here.index.entries_per_block]
        used = here.index.bytes_Nb[block, : here.index.entries_per_block * here.index.format.nbytes]
        sections = here.index.format.block_sections(used, here.index.entries_per_block)
        sections.data[entry % here.index.entries_per_block] = record.data
        sections.scales[entry % here.index.entries_per_block] = record.scales
    rule = SelectionRule(top_k=12, candidate_blocks=3, candidate_block_size=4)
    arguments = (torch.randn(1, 2, 32), torch.randn(1, 2), here.index, step, rule, torch.tensor([candidates]))
    quick, readable = QUICK["selection"].top_entries(*arguments), READABLE["selection"].top_entries(*arguments)
    assert torch.equal(quick.entries_TK, readable.entries_TK)
