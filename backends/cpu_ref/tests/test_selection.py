import itertools
import math

import pytest
import torch

from deepinfer.accelerator.ops.selection import SelectionRule
from deepinfer.errors import OpRefusedError
from deepinfer.numerics import Float32Record

MODES = [False, True]


def store_keys(here, request, keys):
    """Write index keys 0.. of a request through its block table, one at a time."""
    per_block = here.index.entries_per_block
    for entry, key in enumerate(keys):
        block = here.table[request, entry // per_block]
        parts = here.index.format.encode_parts(key[None])
        data, scale = here.index.format.data_bytes, here.index.format.scale_bytes
        at = entry % per_block
        here.index.bytes_Nb[block, at * data : (at + 1) * data] = parts.data[0]
        base = per_block * data
        here.index.bytes_Nb[block, base + at * scale : base + (at + 1) * scale] = parts.scales[0]


def scores_of(here, query, weights, keys):
    """One row's scores, by the formula, in float64."""
    record = here.index.format
    query = query.double() if isinstance(record, Float32Record) else record.round_trip(query).double()
    keys = record.round_trip(keys).double()
    return [
        sum(float(weights[h]) * max(float((query[h] * key).sum()), 0.0) for h in range(query.shape[0])) for key in keys
    ]


def expected_entries(scores, top_k, allowed=None):
    """The total order, by sorting pairs; NaN below every number."""
    numbers = [index for index in range(len(scores)) if allowed is None or index in allowed]
    ranked = sorted(numbers, key=lambda i: (math.isnan(scores[i]), -scores[i] if not math.isnan(scores[i]) else 0, i))
    chosen = sorted(ranked[:top_k])
    return chosen + [-1] * (top_k - len(chosen))


def expected_blocks(scores, count, size):
    blocks = {}
    for index, score in enumerate(scores):
        blocks.setdefault(index // size, []).append(score)
    best = {}
    for block, members in blocks.items():
        numbers = [score for score in members if not math.isnan(score)]
        best[block] = (0, max(numbers)) if numbers else (-1, 0.0)
    if best:
        best[max(best)] = (0, math.inf)
    chosen = sorted(sorted(best, key=lambda b: (-best[b][0], -best[b][1], b))[:count])
    return chosen + [-1] * (count - len(chosen))


def run(ops, here, chunks, keys, query, weights, rule, candidates=None, padding=0, **options):
    for request, request_keys in keys.items():
        store_keys(here, request, request_keys)
    return ops(**options)["selection"].top_entries(
        query, weights, here.index, here.step(chunks, padding=padding), rule, candidates
    )


@pytest.mark.parametrize("invariant", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("released", [True, False])
@pytest.mark.parametrize("ratio", [1, 2])
def test_a_ragged_step_picks_by_score_then_by_number(world, ops, ratio, released, dtype, invariant):
    here = world(ratio=ratio, released=released)
    keys = {request: torch.randn(24, 32) for request in range(3)}
    chunks = [(2, 13, 4), (0, 0, 12), (1, 20, 1)]
    query, weights = torch.randn(17, 3, 32).to(dtype), torch.randn(17, 3).to(dtype)
    rule = SelectionRule(top_k=5, candidate_blocks=2, candidate_block_size=4, publish=True)
    options = {"activation_dtype": dtype, "batch_invariant": invariant}
    result = run(ops, here, chunks, keys, query, weights, rule, **options)
    row = 0
    for request, cached, count in chunks:
        for position in range(cached, cached + count):
            seen = (position + 1) // ratio
            scores = scores_of(here, query[row], weights[row], keys[request][:seen])
            assert result.entries_TK[row].tolist() == expected_entries(scores, 5)
            assert result.candidates_TB[row].tolist() == expected_blocks(scores, 2, 4)
            row += 1


@pytest.mark.parametrize("invariant", MODES)
def test_only_candidate_blocks_compete(world, ops, invariant):
    here = world()
    keys = torch.randn(30, 32)
    query, weights = torch.randn(6, 2, 32), torch.rand(6, 2)
    candidates = torch.tensor([[0, 2, 5], [1, -1, -1], [-1, -1, -1], [6, 7, 99], [0, 1, 2], [7, 3, 5]])
    rule = SelectionRule(top_k=5, candidate_blocks=3, candidate_block_size=4)
    result = run(ops, here, [(1, 24, 6)], {1: keys}, query, weights, rule, candidates, batch_invariant=invariant)
    assert result.candidates_TB is None
    for row in range(6):
        scores = scores_of(here, query[row], weights[row], keys[: 25 + row])
        allowed = {index for index in range(len(scores)) if index // 4 in candidates[row].tolist()}
        assert result.entries_TK[row].tolist() == expected_entries(scores, 5, allowed)


def test_a_publishing_layer_ignores_candidates_for_itself(world, ops):
    here = world()
    keys, query, weights = torch.randn(30, 32), torch.randn(1, 2, 32), torch.rand(1, 2)
    rule = SelectionRule(top_k=4, candidate_blocks=2, candidate_block_size=4, publish=True)
    free = run(ops, here, [(1, 29, 1)], {1: keys}, query, weights, rule)
    bound = run(ops, here, [(1, 29, 1)], {1: keys}, query, weights, rule, torch.tensor([[0, 1]]))
    assert torch.equal(free.entries_TK, bound.entries_TK)
    assert torch.equal(free.candidates_TB, bound.candidates_TB)


@pytest.mark.parametrize("seen", [0, 1, 2, 5, 6, 7, 8, 20])
@pytest.mark.parametrize("publish", [False, True])
def test_flat_scores_give_the_lowest_numbers(world, ops, seen, publish):
    here = world(ratio=2)
    rule = SelectionRule(top_k=6, candidate_blocks=2, candidate_block_size=4, publish=publish)
    # Every relu is zero: negative dot products of one direction.
    keys, query = -torch.ones(seen, 32), torch.ones(1, 3, 32)
    result = run(ops, here, [(0, 2 * seen, 1)], {0: keys}, query, torch.ones(1, 3), rule)
    assert result.entries_TK.tolist() == [expected_entries([0.0] * seen, 6)]
    if publish:
        assert result.candidates_TB.tolist() == [expected_blocks([0.0] * seen, 2, 4)]


def test_negative_and_positive_zero_are_equal(world, ops):
    here = world(released=False)
    keys = torch.zeros(9, 32)
    keys[4:] = -1.0
    # Entries 0..3 score -0 * 0, the others 0: all of them are zeros of some sign.
    result = run(
        ops, here, [(0, 8, 1)], {0: keys}, torch.ones(1, 1, 32), torch.tensor([[-1.0]]), SelectionRule(5, 1, 4)
    )
    assert result.entries_TK.tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("position", range(40))
def test_no_row_picks_an_entry_of_the_future(world, ops, position):
    here = world(ratio=2)
    keys = torch.ones(24, 32) * 2.0 ** torch.arange(24)[:, None]  # exact in 4 bits; the newest entry always scores best
    query, weights = torch.ones(40, 1, 32), torch.ones(40, 1)
    rule = SelectionRule(top_k=6, candidate_blocks=3, candidate_block_size=2, publish=True)
    whole = run(ops, here, [(0, 0, 40)], {0: keys}, query, weights, rule)
    alone = run(ops, here, [(0, position, 1)], {0: keys}, query[:1], weights[:1], rule)
    seen = (position + 1) // 2
    newest = list(range(max(0, seen - 6), seen))
    assert whole.entries_TK[position].tolist() == newest + [-1] * (6 - len(newest))
    assert torch.equal(whole.entries_TK[position], alone.entries_TK[0])
    assert torch.equal(whole.candidates_TB[position], alone.candidates_TB[0])


@pytest.mark.parametrize("invariant", MODES)
def test_nan_scores_rank_below_every_number_and_do_not_spread(world, ops, invariant):
    here = world(released=False)
    keys, query, weights = torch.randn(20, 32), torch.randn(3, 2, 32), torch.randn(3, 2)
    keys[3], keys[7] = math.nan, math.nan
    query[1, 0, 0] = math.nan
    rule = SelectionRule(top_k=19, candidate_blocks=19, candidate_block_size=1, publish=True)
    result = run(ops, here, [(0, 17, 3)], {0: keys}, query, weights, rule, batch_invariant=invariant)
    # 20 entries for 19 places in the last row: one of the two NaN entries must go, the later one.
    assert result.entries_TK[2].tolist() == [entry for entry in range(20) if entry != 7]
    assert result.candidates_TB[2].tolist() == [entry for entry in range(20) if entry != 7]
    rule = SelectionRule(top_k=5, candidate_blocks=5, candidate_block_size=4)
    result = run(ops, here, [(0, 17, 3)], {0: keys}, query, weights, rule, batch_invariant=invariant)
    assert result.entries_TK[1].tolist() == [0, 1, 2, 3, 4]
    scores = scores_of(here, query[0], weights[0], keys[:18])
    assert result.entries_TK[0].tolist() == expected_entries(scores, 5)


def test_minus_infinity_ranks_above_nan(world, ops):
    here = world(released=False)
    keys = torch.zeros(4, 32)
    keys[0, 0], keys[1, 0], keys[2, 0], keys[3, 0] = math.nan, 3e38, 1.0, 3e38
    result = run(
        ops, here, [(0, 3, 1)], {0: keys}, torch.full((1, 1, 32), 10.0), torch.tensor([[-1.0]]), SelectionRule(3, 1, 4)
    )
    assert result.entries_TK.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("invariant", MODES)
def test_poison_beyond_what_a_row_may_see_does_not_influence_it(world, ops, invariant):
    rule = SelectionRule(top_k=4, candidate_blocks=2, candidate_block_size=4, publish=True)
    keys, query, weights = torch.randn(20, 32), torch.randn(2, 2, 32), torch.rand(2, 2)
    here = world()
    result = run(ops, here, [(1, 18, 2)], {1: keys}, query, weights, rule, batch_invariant=invariant)
    clean = world()
    clean.index.bytes_Nb.fill_(0)
    again = run(ops, clean, [(1, 18, 2)], {1: keys}, query, weights, rule, batch_invariant=invariant)
    assert torch.equal(result.entries_TK, again.entries_TK)
    assert torch.equal(result.candidates_TB, again.candidates_TB)


def test_rows_that_see_nothing_and_padding_rows_are_all_missing(world, ops):
    here = world(ratio=2)
    for rule in (SelectionRule(3, 2, 4, publish=True), SelectionRule(3, 2, 4)):
        for candidates in (None, torch.zeros(3, 2, dtype=torch.int64)):
            result = run(
                ops, here, [(1, 0, 1)], {}, torch.randn(3, 2, 32), torch.rand(3, 2), rule, candidates, padding=2
            )
            assert result.entries_TK.tolist() == [[-1] * 3] * 3
            if rule.publish:
                assert result.candidates_TB.tolist() == [[-1] * 2] * 3


def test_padding_rows_of_a_long_request_are_all_missing(world, ops):
    here = world()
    keys, rule = torch.randn(20, 32), SelectionRule(4, 2, 4, publish=True)
    query = torch.full((3, 2, 32), math.nan)
    query[0] = 1.0
    result = run(ops, here, [(1, 19, 1)], {1: keys}, query, torch.ones(3, 2), rule, padding=2)
    assert (result.entries_TK[0] >= 0).all()
    assert result.entries_TK[1:].tolist() == [[-1] * 4] * 2
    assert result.candidates_TB[1:].tolist() == [[-1] * 2] * 2


def test_no_rows_give_no_rows(world, ops):
    here = world()
    for chunks in ([], [(0, 5, 0)], [(0, 5, 0), (1, 3, 0)]):
        for candidates in (None, torch.zeros(0, 2, dtype=torch.int64)):
            for publish in (False, True):
                rule = SelectionRule(3, 2, 4, publish=publish)
                result = run(ops, here, chunks, {}, torch.zeros(0, 2, 32), torch.zeros(0, 2), rule, candidates)
                assert result.entries_TK.shape == (0, 3)
                assert (result.candidates_TB is None) == (not publish)


def test_tiles_and_key_pieces_do_not_change_the_pick(world, ops, monkeypatch):
    here = world(positions=48)
    keys, query, weights = torch.randn(40, 32), torch.randn(12, 2, 32), torch.rand(12, 2)
    rule = SelectionRule(top_k=5, candidate_blocks=3, candidate_block_size=4, publish=True)
    whole = run(ops, here, [(1, 28, 12)], {1: keys}, query, weights, rule)
    monkeypatch.setattr("deepinfer_cpu_ref.selection.TILE_BYTES", 40_000)
    monkeypatch.setattr("deepinfer_cpu_ref.selection.KEY_PIECE", 16)
    cut = run(ops, here, [(1, 28, 12)], {1: keys}, query, weights, rule)
    assert torch.equal(whole.entries_TK, cut.entries_TK)
    assert torch.equal(whole.candidates_TB, cut.candidates_TB)


def test_queries_of_any_strides_pick_the_same(world, ops):
    here = world()
    keys, rule = torch.randn(20, 32), SelectionRule(4, 2, 4)
    query, weights = torch.randn(2, 3, 64)[:, :, ::2].transpose(0, 1), torch.rand(2, 3).t()
    strided = run(ops, here, [(1, 17, 3)], {1: keys}, query, weights, rule)
    dense = run(ops, here, [(1, 17, 3)], {1: keys}, query.contiguous(), weights.contiguous(), rule)
    assert torch.equal(strided.entries_TK, dense.entries_TK)


def test_every_chunk_split_picks_the_same(world, ops):
    here = world(ratio=2)
    keys, query, weights = torch.randn(10, 32), torch.randn(20, 2, 32), torch.rand(20, 2)
    rule = SelectionRule(top_k=4, candidate_blocks=2, candidate_block_size=2, publish=True)
    whole = run(ops, here, [(0, 0, 20)], {0: keys}, query, weights, rule, batch_invariant=True)
    for cut in range(1, 20):
        picks = [
            run(ops, here, [(0, a, b - a)], {}, query[a:b], weights[a:b], rule, batch_invariant=True)
            for a, b in itertools.pairwise([0, cut, 20])
        ]
        assert torch.equal(torch.cat([pick.entries_TK for pick in picks]), whole.entries_TK)
        assert torch.equal(torch.cat([pick.candidates_TB for pick in picks]), whole.candidates_TB)


def test_queries_that_do_not_describe_the_step_are_refused(world, ops):
    here, rule = world(), SelectionRule(3, 2, 4)
    with pytest.raises(OpRefusedError, match="2 rows"):
        run(ops, here, [(0, 0, 2)], {}, torch.zeros(3, 2, 32), torch.zeros(3, 2), rule)
    with pytest.raises(OpRefusedError, match="last dimension must be 32"):
        run(ops, here, [(0, 0, 2)], {}, torch.zeros(2, 2, 64), torch.zeros(2, 2), rule)
