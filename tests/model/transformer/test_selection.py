"""What the layers pick: only finished entries, none twice, padded with -1; reused between indexers (fault 41)."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.accelerator.ops.attention import AttentionOps, LongRange
from deepinfer.accelerator.ops.linear import LinearOps
from deepinfer.accelerator.ops.selection import Selection, SelectionOps, SelectionRule
from deepinfer.accelerator.weights import PreparedWeight
from deepinfer.errors import InvariantError
from deepinfer.model.transformer import Transformer

BenchMaker = Callable[..., Any]


@dataclass
class Calls:
    """What one forward pass asked for: weights, rules and candidates of each pick, entries of each attention."""

    projected: list[Tensor] = field(default_factory=list)
    head_weights: list[Tensor] = field(default_factory=list)
    rules: list[SelectionRule] = field(default_factory=list)
    candidates: list[Tensor | None] = field(default_factory=list)
    picks: list[Selection] = field(default_factory=list)
    attended: list[LongRange | None] = field(default_factory=list)


def watched(bench: Any, calls: Calls) -> Any:
    model = bench.model
    linear, selection, attention = model.ops.linear, model.ops.selection, model.ops.attention

    class WatchedLinear(LinearOps):
        def embed(self, *arguments: Any) -> Tensor:
            return linear.embed(*arguments)

        def grouped(self, *arguments: Any) -> Tensor:
            return linear.grouped(*arguments)

        def dense(self, x_TK: Tensor, weight: PreparedWeight) -> Tensor:
            output = linear.dense(x_TK, weight)
            if weight.name.endswith("weights_proj.weight"):
                calls.projected.append(output)
            return output

    class WatchedSelection(SelectionOps):
        def top_entries(self, *arguments: Any) -> Selection:
            calls.head_weights.append(arguments[1])
            calls.rules.append(arguments[4])
            calls.candidates.append(arguments[5])
            calls.picks.append(selection.top_entries(*arguments))
            return calls.picks[-1]

    class WatchedAttention(AttentionOps):
        def sparse(self, *arguments: Any) -> Tensor:
            calls.attended.append(arguments[3])
            return attention.sparse(*arguments)

    ops = replace(model.ops, linear=WatchedLinear(), selection=WatchedSelection(), attention=WatchedAttention())
    bench.model = Transformer(model.config, model.weights, ops, model.rotary)
    return bench


@pytest.fixture
def calls() -> Calls:
    return Calls()


def test_picks_are_finished_entries_without_repeats(
    bench_of: BenchMaker, golden: dict[str, Tensor], calls: Calls
) -> None:
    bench = watched(bench_of(), calls)
    bench.prefill(bench.admit(golden["ids"][:40].tolist()), [40])
    for ratio, pick in zip((2, 1, 1), calls.picks, strict=True):
        for position, entries in enumerate(pick.entries_TK.tolist()):
            found = [entry for entry in entries if entry >= 0]
            visible = (position + 1) // ratio
            assert len(found) == min(visible, bench.model.config.index_topk)
            assert found == sorted(set(found))
            assert all(entry < visible for entry in found)
            assert entries[len(found) :] == [-1] * (len(entries) - len(found))


def test_each_layer_reads_the_entries_of_its_owner_with_the_last_published_picks(
    bench_of: BenchMaker, golden: dict[str, Tensor], calls: Calls
) -> None:
    bench = watched(bench_of(), calls)
    bench.prefill(bench.admit(golden["ids"][:30].tolist()), [30])
    assert calls.attended[:2] == [None, None]
    for layer, owner, picker in ((2, 2, 0), (3, 2, 0), (4, 4, 1), (5, 4, 1), (6, 4, 2), (7, 4, 2)):
        long_range = calls.attended[layer]
        assert long_range is not None
        assert long_range.cache is bench.pools.entries(owner)
        assert long_range.entries_TK is calls.picks[picker].entries_TK


def test_only_the_source_publishes_candidates_and_only_later_indexers_obey_them(
    bench_of: BenchMaker, golden: dict[str, Tensor], calls: Calls
) -> None:
    bench = watched(bench_of(), calls)
    bench.prefill(bench.admit(golden["ids"][:40].tolist()), [40])
    assert [rule.publish for rule in calls.rules] == [False, True, False]
    published = calls.picks[1].candidates_TB
    assert published is not None
    assert calls.candidates[:2] == [None, None]
    assert calls.candidates[2] is published
    size = bench.model.config.candidate_block_size
    for entries, blocks in zip(calls.picks[2].entries_TK.tolist(), published.tolist(), strict=True):
        assert {entry // size for entry in entries if entry >= 0} <= set(blocks)


def test_a_driver_that_publishes_nothing_is_noticed(
    bench_of: BenchMaker, golden: dict[str, Tensor], calls: Calls
) -> None:
    bench = watched(bench_of(), calls)
    picking = bench.model.ops.selection

    class Silent(SelectionOps):
        def top_entries(self, *arguments: Any) -> Selection:
            return replace(picking.top_entries(*arguments), candidates_TB=None)

    model = bench.model
    bench.model = Transformer(model.config, model.weights, replace(model.ops, selection=Silent()), model.rotary)
    with pytest.raises(InvariantError, match="layer 6"):
        bench.prefill(bench.admit(golden["ids"][:4].tolist()), [4])


@pytest.mark.parametrize("chunks", [(40,), (11, 29)])
def test_a_row_may_pick_the_entry_that_it_completes(
    bench_of: BenchMaker, golden: dict[str, Tensor], calls: Calls, chunks: tuple[int, ...]
) -> None:
    bench = watched(bench_of(), calls)
    bench.prefill(bench.admit(golden["ids"][:40].tolist()), chunks)
    newest = torch.cat([pick.entries_TK.amax(1) for pick in calls.picks[1::3]])
    assert bool((newest == torch.arange(40)).any())
    assert int(newest[0]) == 0


def test_head_weights_carry_both_scale_factors(bench_of: BenchMaker, golden: dict[str, Tensor], calls: Calls) -> None:
    """They change no pick, so no golden value sees them; a driver's score does."""
    bench = watched(bench_of(), calls)
    bench.prefill(bench.admit(golden["ids"][:9].tolist()), [9])
    assert len(calls.projected) == 3
    for projected, weights in zip(calls.projected, calls.head_weights, strict=True):
        assert torch.equal(weights, projected * 64**-0.5 * 4**-0.5)
