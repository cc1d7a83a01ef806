import math

import pytest
import torch

from deepinfer.accelerator.ops.attention import LongRange
from deepinfer.errors import OpRefusedError

MODES = [False, True]


class History:
    """Encoded window records and entries of every request, by position and number, in float64."""

    def __init__(self, here, positions=48, entries=48, scale=1.0):
        requests = here.table.shape[0]
        self.here = here
        self.records = here.window.format.encode(torch.randn(requests, positions, here.width) * scale)
        self.window = here.window.format.decode(self.records).double()
        entry_bytes = here.entries.format.encode(torch.randn(requests, entries, here.width) * scale)
        self.entries = here.entries.format.decode(entry_bytes).double()
        for request in range(requests):
            for entry in range(min(entries, here.table.shape[1] * here.block_size)):
                block = here.table[request, entry // here.block_size]
                here.entries.bytes_NEb[block, entry % here.block_size] = entry_bytes[request, entry]

    def fill_ring(self, request, upto):
        """Let the ring hold positions before ``upto`` only."""
        for position in range(max(0, upto - self.here.ring), upto):
            self.here.window.bytes_ZRb[self.here.slots[request], position % self.here.ring] = self.records[
                request, position
            ]

    def own(self, chunks, padding=0):
        rows = [self.records[request, cached : cached + count] for request, cached, count in chunks]
        poison = torch.full((padding, self.here.window.format.nbytes), 0xFF, dtype=torch.uint8)
        return torch.cat([*rows, poison])


def expected_row(query, keys, sinks, *, served=False):
    """One row by its formula; keys is a list of float64 vectors."""
    out = torch.zeros_like(query, dtype=torch.float64)
    if not keys:
        return out
    for head in range(query.shape[0]):
        scores = [float((query[head].double() * key).sum()) * query.shape[1] ** -0.5 for key in keys]
        largest = max(scores)
        weights = [math.exp(score - largest) for score in scores]
        total = sum(weights) + math.exp(float(sinks[head]) - largest)
        if served:
            weights = [float(torch.tensor(weight, dtype=torch.float64).bfloat16()) for weight in weights]
        out[head] = sum(weight * key for weight, key in zip(weights, keys, strict=True)) / total
    return out


def row_keys(history, request, position, window_size, entries=(), start=0):
    first = max(0, start, position - window_size + 1)
    return [*history.window[request, first : position + 1], *(history.entries[request, e] for e in entries if e >= 0)]


@pytest.mark.parametrize("invariant", MODES)
@pytest.mark.parametrize("numerics", ["portable", "served"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_ragged_prefill_is_its_formula(world, ops, dtype, numerics, invariant):
    here = world()
    history = History(here)
    chunks = [(2, 13, 5), (0, 0, 11), (1, 7, 1)]
    for request, cached, _ in chunks:
        history.fill_ring(request, cached)
    query, sinks = torch.randn(17, 3, 32).to(dtype), torch.randn(3)
    entries = torch.stack([torch.randperm(20)[:6] for _ in range(17)])
    entries[3, 2:], entries[4], entries[8, 0] = -1, -1, -1
    options = {"activation_dtype": dtype, "numerics": numerics, "batch_invariant": invariant}
    result = ops(**options)["attention"].sparse(
        query, history.own(chunks), here.window, LongRange(here.entries, entries), sinks, 8, here.step(chunks)
    )
    assert result.dtype == dtype
    row = 0
    for request, cached, count in chunks:
        for position in range(cached, cached + count):
            keys = row_keys(history, request, position, 8, entries[row].tolist())
            expected = expected_row(query[row], keys, sinks, served=numerics == "served")
            tolerance = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float64: 1e-10}[dtype]
            if numerics == "served" and dtype != torch.float64:
                # A last-bit difference of a probability may move it to the next bfloat16.
                tolerance = max(tolerance, 4e-3)
            torch.testing.assert_close(result[row].double(), expected, rtol=tolerance, atol=tolerance)
            row += 1


def one_hot_world(world, contexts=32):
    """Values reveal which positions were read: position p stores a one in channel p, scores are all equal."""
    here = world(width=contexts, released=False, positions=contexts, ring=12)
    history = History(here, positions=contexts, entries=1)
    history.records = here.window.format.encode(torch.eye(contexts).repeat(3, 1, 1))
    return here, history


def read_positions(output):
    """Equal scores give every key that was read the same weight."""
    return [channel for channel, value in enumerate(output.tolist()) if value > 0]


@pytest.mark.parametrize("invariant", MODES)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("context", range(1, 31))
def test_a_query_reads_exactly_its_window_in_prefill_and_decode(world, ops, context, rows, invariant):
    first = max(0, context - rows)
    for kind, start in (("prefill", 0), ("prefill", 7), ("decode", 0), ("decode", 7)):
        here, history = one_hot_world(world)
        history.fill_ring(1, first)
        chunk = [(1, first, context - first)]
        own = history.own(chunk)
        if kind == "decode":
            history.fill_ring(1, context)
        attention = ops(batch_invariant=invariant)["attention"]
        step = here.step(chunk, kind=kind, window_starts={1: start})
        query = torch.zeros(context - first, 1, 32)
        result = attention.sparse(query, own, here.window, None, torch.full((1,), -math.inf), 8, step)
        for row, position in enumerate(range(first, context)):
            expected = list(range(max(start, position - 7), position + 1))
            assert read_positions(result[row, 0]) == expected
            if expected:
                torch.testing.assert_close(result[row, 0].sum(), torch.tensor(1.0))


@pytest.mark.parametrize("start", range(13))
@pytest.mark.parametrize("invariant", MODES)
def test_chunk_starts_at_all_residues_read_ring_and_chunk_seamlessly(world, ops, start, invariant):
    here, history = one_hot_world(world)
    history.fill_ring(2, start)
    chunk = [(2, start, 16)]
    result = ops(batch_invariant=invariant)["attention"].sparse(
        torch.zeros(16, 2, 32), history.own(chunk), here.window, None, torch.full((2,), -math.inf), 8, here.step(chunk)
    )
    for row in range(16):
        for head in range(2):
            assert read_positions(result[row, head]) == list(range(max(0, start + row - 7), start + row + 1))


@pytest.mark.parametrize("invariant", MODES)
def test_poison_padding_and_neighbours_do_not_influence_a_row(world, ops, invariant):
    here = world()
    history = History(here)
    history.fill_ring(1, 5)
    attention = ops(batch_invariant=invariant)["attention"]
    query, sinks = torch.randn(3, 2, 32), torch.randn(2)
    entries = torch.tensor([[0, 3, -1, -1], [-1, -1, -1, -1], [-1, 2, -1, 1]])
    alone = attention.sparse(
        query, history.own([(1, 5, 3)]), here.window, LongRange(here.entries, entries), sinks, 8, here.step([(1, 5, 3)])
    )
    assert alone.isfinite().all()
    # A neighbour whose ring, records, query and entries are all NaN, and padding rows.
    chunks = [(0, 9, 2), (1, 5, 3)]
    here.entries.bytes_NEb[here.table[0]] = 0xFF
    own = history.own(chunks, padding=2)
    own[:2] = 0xFF
    noise = torch.full((2, 2, 32), math.nan)
    together = attention.sparse(
        torch.cat((noise, query, noise)),
        own,
        here.window,
        LongRange(here.entries, torch.cat((torch.tensor([[4, 5, 6, 7]] * 2), entries, torch.full((2, 4), 40)))),
        sinks,
        8,
        here.step(chunks, padding=2),
    )
    assert together[:2].isnan().all()
    assert together[5:].isfinite().all()
    torch.testing.assert_close(together[2:5], alone, rtol=1e-6, atol=1e-6)
    if invariant:
        assert torch.equal(together[2:5], alone)


@pytest.mark.parametrize("sink", [-math.inf, 0.0, 300.0])
@pytest.mark.parametrize("invariant", MODES)
def test_a_row_without_any_key_gives_exact_zeros(world, ops, sink, invariant):
    here = world()
    history = History(here)
    step = here.step([(1, 2, 1)], window_starts={1: 3})
    result = ops(batch_invariant=invariant)["attention"].sparse(
        torch.randn(1, 4, 32),
        history.own([(1, 2, 1)]),
        here.window,
        LongRange(here.entries, torch.full((1, 6), -1)),
        torch.full((4,), sink),
        8,
        step,
    )
    assert torch.equal(result, torch.zeros(1, 4, 32))


def test_a_row_without_keys_beside_one_with_keys_gives_exact_zeros(world, ops):
    here = world()
    history = History(here)
    chunks = [(1, 2, 1), (0, 2, 1)]
    history.fill_ring(0, 2)
    step = here.step(chunks, window_starts={1: 3})
    sinks = torch.full((4,), -math.inf)
    result = ops()["attention"].sparse(torch.randn(2, 4, 32), history.own(chunks), here.window, None, sinks, 8, step)
    assert torch.equal(result[0], torch.zeros(4, 32))
    assert (result[1] != 0).all()


def test_a_sink_takes_weight_from_every_key_but_adds_no_value(world, ops):
    here = world()
    history = History(here)
    query, chunk = torch.zeros(1, 1, 32), [(0, 0, 1)]
    for sink, share in ((-math.inf, 1.0), (0.0, 0.5), (math.log(3.0), 0.25), (200.0, 0.0)):
        result = ops()["attention"].sparse(
            query, history.own(chunk), here.window, None, torch.tensor([sink]), 8, here.step(chunk)
        )
        torch.testing.assert_close(result[0, 0].double(), history.window[0, 0] * share, rtol=1e-6, atol=1e-30)


def test_the_same_token_in_window_and_entries_counts_twice(world, ops):
    here = world()
    history = History(here)
    chunk, entries = [(0, 0, 1)], torch.zeros(1, 1, dtype=torch.int64)
    result = ops()["attention"].sparse(
        torch.zeros(1, 1, 32),
        history.own(chunk),
        here.window,
        LongRange(here.entries, entries),
        torch.tensor([-math.inf]),
        8,
        here.step(chunk),
    )
    torch.testing.assert_close(
        result[0, 0].double(), (history.window[0, 0] + history.entries[0, 0]) / 2, rtol=1e-6, atol=1e-6
    )


def test_entries_may_come_in_any_order_with_gaps(world, ops):
    here = world()
    history = History(here)
    query, sinks, chunk = torch.randn(1, 2, 32), torch.zeros(2), [(1, 0, 1)]
    attention = ops()["attention"]
    results = [
        attention.sparse(
            query,
            history.own(chunk),
            here.window,
            LongRange(here.entries, torch.tensor([order])),
            sinks,
            8,
            here.step(chunk),
        )
        for order in ([3, 9, 17, -1, -1], [17, -1, 3, -1, 9], [-1, -1, 9, 17, 3])
    ]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("invariant", MODES)
def test_no_rows_give_no_rows(world, ops, invariant):
    here = world()
    own = torch.zeros(0, here.window.format.nbytes, dtype=torch.uint8)
    for step in (here.step([]), here.step([(0, 3, 0)])):
        result = ops(batch_invariant=invariant)["attention"].sparse(
            torch.zeros(0, 3, 32), own, here.window, None, torch.zeros(3), 8, step
        )
        assert result.shape == (0, 3, 32)


def test_tiles_of_rows_do_not_change_the_result(world, ops, monkeypatch):
    here = world()
    history = History(here)
    chunks = [(0, 0, 30)]
    query, sinks = torch.randn(30, 2, 32), torch.randn(2)
    entries = torch.randint(-1, 20, (30, 6))
    arguments = (query, history.own(chunks), here.window, LongRange(here.entries, entries), sinks, 8, here.step(chunks))
    attention = ops(batch_invariant=True)["attention"]
    whole = attention.sparse(*arguments)
    monkeypatch.setattr("deepinfer_cpu_ref.attention.TILE_BYTES", 3 * 14 * 32 * 4)
    assert torch.equal(attention.sparse(*arguments), whole)


def test_rows_of_a_draft_round_may_share_one_window(world, ops):
    """Rows that all stand at the round's last position read each other: the whole block and the same context."""
    here, history = one_hot_world(world)
    history.fill_ring(0, 9)
    chunk = [(0, 9, 3)]
    step = here.step(chunk)
    step.position_T.fill_(11)
    sinks = torch.full((1,), -math.inf)
    result = ops()["attention"].sparse(torch.zeros(3, 1, 32), history.own(chunk), here.window, None, sinks, 11, step)
    for row in range(3):
        assert read_positions(result[row, 0]) == list(range(1, 12))


def test_what_does_not_describe_the_step_is_refused(world, ops):
    here = world()
    attention, step = ops()["attention"], here.step([(0, 0, 2)])
    own = torch.zeros(2, here.window.format.nbytes, dtype=torch.uint8)
    query, sinks = torch.zeros(2, 3, 32), torch.zeros(3)
    with pytest.raises(OpRefusedError, match="2 rows"):
        attention.sparse(query[:1], own, here.window, None, sinks, 8, step)
    with pytest.raises(OpRefusedError, match="3 heads"):
        attention.sparse(query, own, here.window, None, sinks[:2], 8, step)
    with pytest.raises(OpRefusedError, match="ring of 12"):
        attention.sparse(query, own, here.window, None, sinks, 13, step)
    with pytest.raises(OpRefusedError, match="last dimension must be 32"):
        attention.sparse(query[:, :, :31], own, here.window, None, sinks, 8, step)
