"""R2: a row has the same bits alone, in any batch, at any place, beside any neighbour, with any number of threads."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch

from deepinfer.accelerator.ops.attention import LongRange
from deepinfer.accelerator.ops.experts import RouterWeights
from deepinfer.accelerator.ops.mixing import MixWeights
from deepinfer.accelerator.ops.norm import RotaryTable
from deepinfer.accelerator.ops.selection import SelectionRule
from deepinfer.accelerator.weights import StoredExpert, StoredWeight
from deepinfer.numerics import quantise_fp8_weight, quantise_mxfp4_weight

ROWS = 40
LENGTH = 25
SIZES = (1, 2, 3, 7, 8, 9, 17, 33)
HIDDEN = 96
ARITHMETIC = [(torch.float32, "portable"), (torch.bfloat16, "served")]


def quantised(rows, columns, fmt="fp8_block32"):
    quantise = quantise_fp8_weight if fmt == "fp8_block32" else quantise_mxfp4_weight
    codes, scale = quantise(torch.randn(rows, columns) * columns**-0.5)
    return StoredWeight("w", fmt, codes, scale, rows, columns)


class Case(NamedTuple):
    """A stateless op: its row tensors, and what it computes from a selection of their rows."""

    rows: list
    compute: object


def dense(groups, dtype):
    prepared = groups["linear"].prepare(quantised(40, HIDDEN))
    return Case([torch.randn(ROWS, HIDDEN).to(dtype)], lambda x: [groups["linear"].dense(x, prepared)])


def wide_dense(groups, dtype):
    prepared = groups["linear"].prepare(quantised(24, 2048), "float32")
    return Case([torch.randn(ROWS, 2048).to(dtype)], lambda x: [groups["linear"].dense(x, prepared)])


def grouped(groups, dtype):
    prepared = groups["linear"].prepare_grouped(quantised(3 * 40, HIDDEN), 3)
    return Case([torch.randn(ROWS, 3, HIDDEN).to(dtype)], lambda x: [groups["linear"].grouped(x, prepared)])


def rms(groups, dtype):
    weight = torch.rand(HIDDEN)
    return Case([torch.randn(ROWS, HIDDEN).to(dtype)], lambda x: [groups["norm"].rms(x, weight, 1e-20)])


def rotary(groups, dtype):
    angles = torch.rand(50, 5)
    table = RotaryTable(angles.cos(), angles.sin())
    rows = [torch.randn(ROWS, 3, 17).to(dtype), torch.randint(0, 50, (ROWS,))]
    return Case(rows, lambda x, position: [groups["norm"].rotary(x, table, position)])


def mixing(groups, dtype):
    weights = MixWeights(torch.randn(24, 4 * HIDDEN), torch.randn(24), torch.rand(3))

    def compute(streams, output):
        mix = groups["mixing"].mixes(streams, weights, 20, 1e-6, 1e-20)
        collapsed, posted = groups["mixing"].collapse(streams, mix.pre_TS), groups["mixing"].post(output, streams, mix)
        return [mix.pre_TS, mix.post_TS, mix.comb_TSS, collapsed, posted]

    return Case([torch.randn(ROWS, 4, HIDDEN).to(dtype), torch.randn(ROWS, HIDDEN).to(dtype)], compute)


def gate(groups, dtype):
    weights = torch.randn(2, 4, HIDDEN)
    rows = [
        torch.randn(ROWS, 4, HIDDEN).to(dtype),
        torch.randn(ROWS, 4, HIDDEN).to(dtype),
        torch.randn(ROWS, HIDDEN).to(dtype),
        torch.arange(ROWS) % 5 != 0,
    ]
    return Case(
        rows, lambda x, key, value, alive: [groups["memory"].gate(x, key, value, weights[0], weights[1], alive, 1e-20)]
    )


def experts(groups, dtype):
    group = groups["experts"]

    made = [
        StoredExpert(quantised(64, HIDDEN, "mxfp4"), quantised(HIDDEN, 64, "mxfp4"), quantised(64, HIDDEN, "mxfp4"))
        for _ in range(5)
    ]
    prepared, shared = group.prepare(made, 10.0), group.prepare_shared(made[0], 10.0)
    router = RouterWeights(torch.randn(5, HIDDEN), torch.randn(5), torch.randn(5))

    def compute(x, image, valid):
        routing = group.route(x, router, image, valid, 2, 1.5)
        slots, own = group.routed(x, routing, prepared), group.shared(x, shared)
        local = group.local(x, routing, prepared, shared)
        return [routing.experts_Tk, routing.weights_Tk, slots, own, group.combine(own, slots), local]

    rows = [torch.randn(ROWS, HIDDEN).to(dtype), torch.arange(ROWS) % 3 == 0, torch.arange(ROWS) % 7 != 0]
    return Case(rows, compute)


def pick(case, indices):
    return [rows[indices] for rows in case.rows]


@pytest.mark.parametrize(("dtype", "numerics"), ARITHMETIC)
@pytest.mark.parametrize("build", [dense, wide_dense, grouped, rms, rotary, mixing, gate, experts])
def test_a_row_has_the_same_bits_in_every_batch(ops, threads, build, dtype, numerics):
    case = build(ops(activation_dtype=dtype, numerics=numerics, batch_invariant=True), dtype)
    with threads(1):
        expected = case.compute(*case.rows)
    order = torch.randperm(ROWS)
    batches = [torch.arange(ROWS - size, ROWS) for size in SIZES]
    batches += [torch.tensor([0]), torch.tensor([17]), order, order[:11], torch.tensor([3] * 9)]
    # With three threads or more, an unpadded width of 24 or 40 would have other bits than with one.
    for count, tried in ((1, batches), (3, batches[:8:2] + batches[-3:])):
        with threads(count):
            for batch in tried:
                for got, whole in zip(case.compute(*pick(case, batch)), expected, strict=True):
                    assert torch.equal(got, whole[batch]), f"{batch.tolist()} with {count} threads"


@pytest.mark.parametrize("noise", [math.nan, math.inf, 1e38, 1e-42])
@pytest.mark.parametrize("build", [dense, wide_dense, grouped, rms, rotary, mixing, gate, experts])
def test_a_row_has_the_same_bits_beside_any_neighbour(ops, build, noise):
    case = build(ops(batch_invariant=True), torch.float32)
    expected = case.compute(*case.rows)
    quiet = torch.arange(ROWS) % 4 == 1
    noisy = [
        torch.where(quiet.view(-1, *[1] * (rows.dim() - 1)), rows, noise) if rows.is_floating_point() else rows
        for rows in case.rows
    ]
    for got, whole in zip(case.compute(*noisy), expected, strict=True):
        assert torch.equal(got[quiet], whole[quiet])


class Paged:
    """Attention and selection over three requests whose whole history is known."""

    def __init__(self, here, groups, dtype, heads, top_k):
        self.here, self.groups, self.heads, self.top_k = here, groups, heads, top_k
        positions = 48
        shape = (3, positions)
        self.query = torch.randn(*shape, heads, here.width).to(dtype)
        self.index_query = torch.randn(*shape, 3, here.index_width).to(dtype)
        self.index_weight = torch.randn(*shape, 3).to(dtype)
        self.sinks = torch.randn(heads)
        self.records = here.window.format.encode(torch.randn(*shape, here.width))
        self.entries, self.keys = torch.randn(*shape, here.width), torch.randn(*shape, here.index_width)

    def run(self, chunks, padding=0, kind="prefill"):
        """One step as a model runs it: select, attend, store the window last (prefill) or first (decode)."""
        here, step = self.here, self.here.step(chunks, kind=kind, padding=padding)
        codec, plumbing = self.groups["codec"], self.groups["plumbing"]

        def rows(values):
            picked = [values[request, cached : cached + count] for request, cached, count in chunks]
            filler = torch.full((padding, *values.shape[2:]), 0xFF if values.dtype == torch.uint8 else math.nan)
            return torch.cat([*picked, filler.to(values.dtype)])

        entry_slots, window_slots = plumbing.entry_slots(step, here.ratio), plumbing.window_slots(step)
        codec.store_entries(here.entries, rows(self.entries), entry_slots)
        codec.store_index_keys(here.index, rows(self.keys), entry_slots)
        if kind == "decode":
            codec.store_window(here.window, rows(self.records), window_slots)
        rule = SelectionRule(self.top_k, 3, 4, publish=True)
        query, weight = rows(self.index_query), rows(self.index_weight)
        chosen = self.groups["selection"].top_entries(query, weight, here.index, step, rule)
        reindexed = self.groups["selection"].top_entries(
            query, weight, here.index, step, SelectionRule(self.top_k, 3, 4), chosen.candidates_TB
        )
        output = self.groups["attention"].sparse(
            rows(self.query),
            rows(self.records),
            here.window,
            LongRange(here.entries, chosen.entries_TK),
            self.sinks,
            here.window_size,
            step,
        )
        if kind == "prefill":
            codec.store_window(here.window, rows(self.records), window_slots)
        return output, chosen.entries_TK, chosen.candidates_TB, reindexed.entries_TK

    def whole(self, request):
        return self.run([(request, 0, LENGTH)])


def sizes(name):
    if name == "released":
        return {"width": 512, "index_width": 128, "window_size": 128, "ring": 134}, 64, 20
    return {"width": 64, "index_width": 64}, 4, 6


@pytest.mark.parametrize(("dtype", "numerics"), ARITHMETIC)
@pytest.mark.parametrize("shape", ["tiny", "released"])
def test_prefill_chunks_and_decode_agree_bit_for_bit(world, ops, threads, shape, dtype, numerics):
    options, heads, top_k = sizes(shape)
    groups = ops(activation_dtype=dtype, numerics=numerics, batch_invariant=True)
    paged = Paged(world(**options), groups, dtype, heads, top_k)
    with threads(1):
        expected = [paged.whole(request) for request in range(3)]

    def compare(chunks, got):
        row = 0
        for request, cached, count in chunks:
            for part, whole in zip(got, expected[request], strict=True):
                assert torch.equal(part[row : row + count], whole[cached : cached + count]), chunks
            row += count

    # Two threads: chunks of two requests. One thread: rows one at a time beside steps of up to three.
    with threads(2):
        for start, stop in itertools.pairwise([0, 1, 8, 13, LENGTH]):
            chunks = [(0, start, stop - start), (2, start, stop - start)]
            compare(chunks, paged.run(chunks, padding=start % 3))
    with threads(1):
        for position in range(LENGTH):
            chunks = [(1, position, 1)]
            if position % 3 == 0:
                chunks = [(2, position, min(3, LENGTH - position)), *chunks]
            if position == LENGTH - 1:
                chunks.insert(0, (0, position, 1))
            compare(chunks, paged.run(chunks, kind="decode"))


@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("visible", [24, 40, 72, 101, 511, 513])
def test_copies_of_one_key_tie_wherever_they_lie(world, ops, threads, visible, count):
    """Eight keys repeated: a cut through the second best key falls by entry number, not by place in a product."""
    here, groups = world(requests=1, positions=520, index_width=64, released=False), ops(batch_invariant=True)
    keys = torch.randn(8, 64).repeat(65, 1)
    slots = groups["plumbing"].entry_slots(here.step([(0, 0, 520)]), 1)
    groups["codec"].store_index_keys(here.index, keys, slots)
    copies = -(-visible // 8)
    rule = SelectionRule(copies + copies // 2, 1, 8)
    step = here.step([(0, visible - 2, 2)])
    for _ in range(8):
        query, weight = torch.randn(2, 8, 64), torch.rand(2, 8)
        with threads(count):
            entries = groups["selection"].top_entries(query, weight, here.index, step, rule).entries_TK[1]
        kinds = (entries % 8).unique().tolist()
        assert len(kinds) == 2
        cut = min(kinds, key=lambda kind, entries=entries: int((entries % 8 == kind).sum()))
        kept = entries[entries % 8 == cut].tolist()
        assert kept == list(range(cut, visible, 8))[: len(kept)]
