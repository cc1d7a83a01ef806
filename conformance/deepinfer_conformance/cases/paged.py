"""Cases of the ops that read a step: attention, selection, compression, plumbing.

Legend: T rows, R requests, B candidate blocks, K selected entries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch

from deepinfer.accelerator import OpOptions, StepKind
from deepinfer.accelerator.ops.attention import LongRange
from deepinfer.accelerator.ops.selection import SelectionRule
from deepinfer_conformance.case import Specimen
from deepinfer_conformance.cases.axes import KV, KV_NUMERIC, ONCE, PLAIN, Specimens
from deepinfer_conformance.data.call import OpCall
from deepinfer_conformance.data.draws import Draws
from deepinfer_conformance.data.layouts import pitched
from deepinfer_conformance.data.worlds import Chunk, Placement, Sizes, World

FIRST = (Chunk(0, 0, 5), Chunk(1, 0, 9), Chunk(2, 0, 1))
MIDDLE = (Chunk(2, 7, 3), Chunk(0, 16, 8), Chunk(1, 15, 4))
DECODE = (Chunk(0, 20, 1), Chunk(1, 7, 1), Chunk(2, 0, 1))
DECODE_MANY = (Chunk(1, 17, 3), Chunk(0, 8, 4), Chunk(2, 30, 1))
NOTHING: tuple[Chunk, ...] = ()


def specimens(seed: int) -> Iterator[Specimen]:
    """Yield the specimens of groups ``compression``, ``selection``, ``attention`` and ``plumbing``."""
    yield from _compression(seed)
    yield from _selection(seed)
    yield from _attention(seed)
    yield from _plumbing(seed)


def _compression(seed: int) -> Iterator[Specimen]:
    found = Specimens("compression.pool_pairs", seed, PLAIN)

    def pool(
        name: str, chunks: Sequence[Chunk], kind: StepKind = "prefill", placement: Placement | None = None
    ) -> None:
        def build(draws: Draws, options: OpOptions) -> OpCall:
            return World(draws, options).lay(chunks, kind, placement).pooling()

        found.add(name, build)

    pool("from_position_0", FIRST)
    pool("cuts_through_pairs", MIDDLE)
    pool("decode", DECODE, "decode")
    pool("decode_several_rows", DECODE_MANY, "decode")
    pool("no_rows", NOTHING)
    pool("padding_rows", MIDDLE, placement=Placement(padding=3))
    pool("chunk_longer_than_the_pending_ring", (Chunk(0, 3, 17), Chunk(1, 2, 1)))
    pool("random_poison", MIDDLE, placement=Placement(poison=1))

    def extreme(draws: Draws, options: OpOptions) -> OpCall:
        call = World(draws, options).lay(MIDDLE).pooling()
        return call.replacing(gate_TC=call.tensor("gate_TC") * 60.0)

    found.add("one_gate_takes_all", extreme)
    return iter(found)


def _selection(seed: int) -> Iterator[Specimen]:
    found = Specimens("selection.top_entries", seed, KV)

    def choose(
        name: str,
        chunks: Sequence[Chunk],
        top_k: int,
        kind: StepKind = "prefill",
        *,
        ratio: int = 2,
        exact: bool = False,
        publish: tuple[int, int] | None = None,
        restrict: tuple[int, int] | None = None,
        placement: Placement | None = None,
        change: Callable[[OpCall], OpCall] | None = None,
    ) -> None:
        def build(draws: Draws, options: OpOptions) -> OpCall:
            laid = World(draws, options, Sizes(ratio=ratio), whole_numbers=exact).lay(chunks, kind, placement)
            blocks, size = publish or restrict or (4, 4)
            rule = SelectionRule(top_k, blocks, size, publish is not None)
            candidates_TB = None
            if restrict is not None:
                candidates_TB = _some_candidates(draws, laid.step.position_T, ratio, blocks, size)
            call = laid.selection(rule, candidates_TB)
            return call if change is None else change(call)

        found.add(name, build, exact=exact, top_k=top_k)

    choose("from_position_0", FIRST, 3)
    choose("middle", MIDDLE, 6)
    choose("ratio_1", MIDDLE, 6, ratio=1)
    choose("decode", DECODE, 4, "decode")
    choose("decode_several_rows", DECODE_MANY, 4, "decode")
    choose("no_rows", NOTHING, 4)
    choose("padding_rows", MIDDLE, 4, placement=Placement(padding=2))
    choose("fewer_entries_than_k", (Chunk(0, 4, 3), Chunk(1, 0, 2)), 12)
    for delta in (-1, 0, 1):
        choose(f"visible_is_k{delta:+d}", (Chunk(0, 15, 1), Chunk(1, 31, 1)), 8 - delta, "decode")
    choose("ties_everywhere", MIDDLE, 6, exact=True)
    choose("ties_ratio_1", (Chunk(0, 30, 4), Chunk(1, 12, 5)), 5, ratio=1, exact=True)
    choose("all_scores_zero", MIDDLE, 4, exact=True, change=_zero_queries)
    choose("negative_head_weights", MIDDLE, 4, exact=True, change=_negated_weights)
    choose("nan_key_loses", MIDDLE, 5, exact=True, change=_nan_query_row)
    choose("publishes_blocks", MIDDLE, 4, ratio=1, publish=(3, 4))
    choose("publishes_blocks_with_ties", MIDDLE, 4, ratio=1, publish=(3, 4), exact=True)
    choose("publishes_all_blocks", FIRST, 4, ratio=1, publish=(8, 4))
    choose("restricted_to_candidates", MIDDLE, 4, ratio=1, restrict=(3, 4))
    choose("restricted_with_ties", MIDDLE, 4, ratio=1, restrict=(2, 4), exact=True)
    choose("random_poison", MIDDLE, 6, placement=Placement(poison=1))
    return iter(found)


def _some_candidates(draws: Draws, position_T: torch.Tensor, ratio: int, blocks: int, size: int) -> torch.Tensor:
    """Return ascending candidate blocks of each row, then -1: what a publishing layer could have left."""
    rows = []
    for row, position in enumerate(position_T.tolist()):
        existing = -(-((position + 1) // ratio) // size)
        kept = draws.permutation(f"candidates/{row}", max(existing, 1))[: min(blocks, existing)].sort().values
        rows.append(torch.cat([kept, torch.full((blocks - len(kept),), -1)]))
    return torch.stack(rows)


def _zero_queries(call: OpCall) -> OpCall:
    return call.replacing(query_TJI=torch.zeros_like(call.tensor("query_TJI")))


def _negated_weights(call: OpCall) -> OpCall:
    return call.replacing(head_weight_TJ=-call.tensor("head_weight_TJ"))


def _nan_query_row(call: OpCall) -> OpCall:
    """A NaN head weight makes every score of that row NaN; the order falls back to the entry numbers."""
    weights_TJ = call.tensor("head_weight_TJ").clone()
    weights_TJ[3] = float("nan")
    return call.replacing(head_weight_TJ=weights_TJ)


def _attention(seed: int) -> Iterator[Specimen]:
    found = Specimens("attention.sparse", seed, KV_NUMERIC)

    def attend(
        name: str,
        chunks: Sequence[Chunk],
        kind: StepKind = "prefill",
        *,
        sizes: Sizes | None = None,
        long_range: bool = True,
        shared: int = 0,
        placement: Placement | None = None,
        change: Callable[[OpCall], OpCall] | None = None,
        full: bool = False,
    ) -> None:
        def build(draws: Draws, options: OpOptions) -> OpCall:
            laid = World(draws, options, sizes, shared=shared).lay(chunks, kind, placement)
            call = laid.attention(long_range=long_range)
            return call if change is None else change(call)

        found.add(name, build, full=full)

    attend("from_position_0", FIRST)
    attend("middle", MIDDLE)
    attend("window_only", MIDDLE, long_range=False)
    attend("decode", DECODE, "decode")
    attend("decode_several_rows", DECODE_MANY, "decode")
    attend("no_rows", NOTHING)
    attend("padding_rows", MIDDLE, placement=Placement(padding=3))
    for delta in (-1, 0, 1):
        attend(f"window{delta:+d}_positions", (Chunk(0, 7 + delta, 1), Chunk(1, 5 + delta, 2)), "decode")
        attend(f"ring{delta:+d}_positions", (Chunk(0, 11 + delta, 2), Chunk(1, 0, 12 + delta)))
        attend(f"block{delta:+d}_positions", (Chunk(0, 15 + delta, 1), Chunk(1, 7 + delta, 1)), "decode")
    attend("chunk_longer_than_the_ring", (Chunk(0, 3, 30), Chunk(1, 11, 14)))
    attend("truncated_window", (Chunk(0, 16, 6, window_start=14), Chunk(1, 9, 3, window_start=9)))
    attend("shared_blocks", (Chunk(0, 20, 3), Chunk(1, 18, 2)), shared=2)
    attend("nothing_selected", MIDDLE, change=_without_entries)
    attend("wide", MIDDLE, sizes=Sizes(width=512, heads=5), full=True)
    attend("many_heads", DECODE_MANY, "decode", sizes=Sizes(width=64, heads=17))
    attend("strong_sink", MIDDLE, change=lambda call: call.replacing(sinks_H=call.tensor("sinks_H") + 30.0))
    attend("sharp_scores", MIDDLE, change=lambda call: call.replacing(query_THC=call.tensor("query_THC") * 16))
    attend(
        "pitched_query",
        MIDDLE,
        change=lambda call: call.replacing(query_THC=pitched(call.tensor("query_THC"), float("nan"))),
    )
    attend("random_poison", MIDDLE, placement=Placement(poison=1))
    return iter(found)


def _without_entries(call: OpCall) -> OpCall:
    long_range = call.at("long_range")
    if not isinstance(long_range, LongRange):
        raise TypeError("the case has no long-range keys to take away")
    missing_TK = torch.full_like(long_range.entries_TK, -1)
    return call.replacing(long_range=dataclasses.replace(long_range, entries_TK=missing_TK))


def _plumbing(seed: int) -> Iterator[Specimen]:
    steps: tuple[tuple[str, Sequence[Chunk], StepKind, int], ...] = (
        ("from_position_0", FIRST, "prefill", 0),
        ("middle", MIDDLE, "prefill", 0),
        ("decode", DECODE, "decode", 0),
        ("decode_several_rows", DECODE_MANY, "decode", 0),
        ("no_rows", NOTHING, "prefill", 0),
        ("padding_rows", MIDDLE, "prefill", 3),
        ("chunk_longer_than_the_ring", (Chunk(0, 3, 30), Chunk(1, 11, 14), Chunk(2, 0, 13)), "prefill", 0),
    )
    window = Specimens("plumbing.window_slots", seed, ONCE)
    entries = Specimens("plumbing.entry_slots", seed, ONCE)
    for name, chunks, kind, padding in steps:
        placement = Placement(padding=padding)

        def slots(
            draws: Draws,
            options: OpOptions,
            chunks: Sequence[Chunk] = chunks,
            kind: StepKind = kind,
            placement: Placement = placement,
        ) -> OpCall:
            return World(draws, options).lay(chunks, kind, placement).window_slots()

        window.add(name, slots)
        for ratio in (1, 2):

            def entry(
                draws: Draws,
                options: OpOptions,
                chunks: Sequence[Chunk] = chunks,
                kind: StepKind = kind,
                placement: Placement = placement,
                ratio: int = ratio,
            ) -> OpCall:
                return World(draws, options).lay(chunks, kind, placement).entry_slots(ratio)

            entries.add(f"{name}_ratio_{ratio}", entry)
    window.add("numbers_past_2_31", lambda draws, options: _far(World(draws, options).lay(MIDDLE).window_slots()))
    entries.add("numbers_past_2_31", lambda draws, options: _far(World(draws, options).lay(MIDDLE).entry_slots(2)))
    yield from window
    yield from entries


def _far(call: OpCall) -> OpCall:
    """Return a step whose slots and blocks lie so far out that 32 bits do not hold the addresses."""
    step = call.at("step")
    far = dataclasses.replace(
        step,  # type: ignore[type-var]
        state_slots_R=step.state_slots_R + 2**31,  # type: ignore[attr-defined]
        block_table_RB=step.block_table_RB + 2**30,  # type: ignore[attr-defined]
    )
    return call.replacing(step=far)
