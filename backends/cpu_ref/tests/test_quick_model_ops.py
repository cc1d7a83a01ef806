"""The quick model ops against the readable ones on the same inputs: equal up to rounding, equal where it is exact."""

import math

import pytest
import torch

from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.ops.attention import LongRange
from deepinfer.accelerator.ops.experts import RouterWeights, Routing
from deepinfer.accelerator.ops.mixing import MixWeights
from deepinfer.accelerator.ops.norm import RotaryTable
from deepinfer.accelerator.ops.selection import SelectionRule
from deepinfer.accelerator.weights import StoredExpert, StoredWeight
from deepinfer.numerics import IndexRecord, LongRangeRecord, WindowRecord
from deepinfer_cpu_ref import Driver
from deepinfer_cpu_ref.attention import CpuRefAttention
from deepinfer_cpu_ref.quick_codec import QuickDecoder, halves, interleaved
from deepinfer_cpu_ref.quick_mixing import doubly_stochastic

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


def test_attention_in_tiles(world, monkeypatch, no_readable_attention):
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
