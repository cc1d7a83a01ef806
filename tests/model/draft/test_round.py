"""Draft rounds against golden values, against a second implementation, and in every company and place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.ops.drafting import DraftBlock
from deepinfer.errors import ArgumentError

RingsMaker = Callable[..., Any]

FLOAT32 = OpOptions(kv_cache_dtype="float32")
FLOAT64 = OpOptions(kv_cache_dtype="float32", activation_dtype=torch.float64)
INVARIANT = OpOptions(kv_cache_dtype="float32", batch_invariant=True)
TOLERANCE = 2e-5


def filled(rings: Any, taps: Tensor, *contexts: int) -> list[int]:
    """Store contexts of these lengths, each in a state slot of its own; return the slots."""
    slots = list(range(1, len(contexts) + 1))
    for slot, context in zip(slots, contexts, strict=True):
        if context:
            rings.store([(slot, 0, taps[:context])])
    return slots


@pytest.mark.parametrize("options", [FLOAT32, INVARIANT, FLOAT64])
def test_a_round_equals_the_golden(rings_of: RingsMaker, golden: dict[str, Tensor], options: OpOptions) -> None:
    rings = rings_of(options)
    slots = filled(rings, golden["taps"], 70)
    found, logits_RnV = rings.round(golden["draft_anchor"].tolist(), [70], slots, 3)
    assert found.token_ids_Rn[0].tolist() == golden["draft_tokens"].tolist()
    expected = golden["draft_logits"]
    torch.testing.assert_close(logits_RnV[0].float(), expected, rtol=0, atol=TOLERANCE)
    confidences = golden["draft_confidence_logits"]
    torch.testing.assert_close(found.confidence_logits_Rn[0].float(), confidences, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("context", [0, 1, 2, 7, 8, 9, 12, 13, 33, 70])
@pytest.mark.parametrize("drafts", [1, 3, 5])
def test_a_round_equals_the_reference(
    rings_of: RingsMaker, golden: dict[str, Tensor], reference: Any, context: int, drafts: int
) -> None:
    """Contexts around the window (8) and the ring (12), and none at all; blocks shorter and longer than released."""
    rings = rings_of(FLOAT64)
    slots = filled(rings, golden["taps"], context)
    found, logits_RnV = rings.round([195], [context], slots, drafts)
    tokens, logits_nV, confidences_n = reference.round(golden["taps"][:context], 195, drafts)
    assert found.token_ids_Rn[0].tolist() == tokens
    torch.testing.assert_close(logits_RnV[0], logits_nV, rtol=0, atol=2e-6)
    torch.testing.assert_close(found.confidence_logits_Rn[0], confidences_n, rtol=0, atol=2e-6)


def test_released_records_stay_close_to_unquantised_ones(rings_of: RingsMaker, golden: dict[str, Tensor]) -> None:
    rings = rings_of(OpOptions())
    slots = filled(rings, golden["taps"], 70)
    _, logits_RnV = rings.round([195], [70], slots, 3)
    error = (logits_RnV[0] - golden["draft_logits"]).abs()
    assert 1e-4 < error.max() < 0.25 * golden["draft_logits"].std()


def test_requests_of_a_batch_do_not_see_each_other(rings_of: RingsMaker, golden: dict[str, Tensor]) -> None:
    """Bit for bit in the invariant mode: alone, together, in another order, beside padding."""
    rings = rings_of(INVARIANT)
    contexts, anchors = [3, 70, 0, 12], [5, 195, 300, 17]
    slots = filled(rings, golden["taps"], *contexts)
    together, logits_RnV = rings.round(anchors, contexts, slots, 3)
    for number in range(4):
        alone, alone_logits = rings.round([anchors[number]], [contexts[number]], [slots[number]], 3)
        assert torch.equal(alone_logits[0], logits_RnV[number])
        assert torch.equal(alone.confidence_logits_Rn[0], together.confidence_logits_Rn[number])
    order = [2, 0, 3, 1]
    padded, padded_logits = rings.round(
        [*(anchors[n] for n in order), 0],
        [*(contexts[n] for n in order), 0],
        [*(slots[n] for n in order), 0],
        3,
        valid=[True] * 4 + [False],
    )
    assert torch.equal(padded_logits[:4], logits_RnV[order])
    assert torch.equal(padded.token_ids_Rn[:4], together.token_ids_Rn[order])
    assert padded_logits[4].isfinite().all()


def test_the_cut_of_the_context_into_steps_changes_nothing(rings_of: RingsMaker, golden: dict[str, Tensor]) -> None:
    """One prefill chunk, many, decode steps with several rows, padding rows: the same bits in the rings."""
    taps = golden["taps"]
    whole, cut = rings_of(INVARIANT), rings_of(INVARIANT)
    whole.store([(1, 0, taps[:40])])
    start = 0
    for rows, kind in ((1, "prefill"), (17, "prefill"), (2, "decode"), (4, "decode"), (13, "prefill"), (3, "decode")):
        cut.store([(1, start, taps[start : start + rows])], kind, padding=2)
        start += rows
    assert start == 40
    _, one = whole.round([9], [40], [1], 3)
    _, other = cut.round([9], [40], [1], 3)
    assert torch.equal(one, other)


def test_rejected_rows_are_overwritten_before_they_are_read(rings_of: RingsMaker, golden: dict[str, Tensor]) -> None:
    """Steps of 1 + 3 rows of which some are rejected leave the rings as if they had never run."""
    taps, wrong = golden["taps"], golden["taps"].flip(0) * 3
    clean, dirty = rings_of(INVARIANT), rings_of(INVARIANT)
    clean.store([(1, 0, taps[:20])])
    dirty.store([(1, 0, taps[:10])])
    known = 10
    for accepted in (0, 1, 3, 2, 0):
        rows = torch.cat((taps[known : known + 1 + accepted], wrong[: 3 - accepted]))
        dirty.store([(1, known, rows)], "decode")
        known += 1 + accepted
        _, seen = dirty.round([9], [known], [1], 3)
        before = rings_of(INVARIANT)
        before.store([(1, 0, taps[:known])])
        assert torch.equal(seen, before.round([9], [known], [1], 3)[1])
    assert known == 21


def test_a_round_writes_nothing_and_reads_only_its_own_window(rings_of: RingsMaker, golden: dict[str, Tensor]) -> None:
    rings = rings_of(FLOAT32)
    rings.store([(2, 0, golden["taps"][:30])])
    before = rings.pools.slot_bytes_Zb.clone()
    found, logits_RnV = rings.round([195], [30], [2], 3)
    assert torch.equal(before, rings.pools.slot_bytes_Zb)
    assert logits_RnV.isfinite().all()  # everything else in the pool is NaN
    assert found.confidence_logits_Rn.isfinite().all()


def test_positions_before_the_window_start_are_not_seen(
    rings_of: RingsMaker, golden: dict[str, Tensor], reference: Any
) -> None:
    rings = rings_of(FLOAT64)
    rings.store([(1, 27, golden["taps"][27:30])])  # a truncated prompt has left nothing before position 27
    _, logits_RnV = rings.round([7], [30], [1], 3, starts=[27])
    _, expected_nV, _ = reference.round(golden["taps"][:30], 7, 3, start=27)
    torch.testing.assert_close(logits_RnV[0], expected_nV, rtol=0, atol=2e-6)


def test_the_markov_head_follows_the_drafts_that_were_chosen(
    rings_of: RingsMaker, golden: dict[str, Tensor], reference: Any
) -> None:
    rings = rings_of(FLOAT64)
    slots = filled(rings, golden["taps"], 20, 31)
    drawn = [[4, 401, 33], [90, 2, 501]]
    found, logits_RnV = rings.round(
        [1, 2], [20, 31], slots, 3, choose=lambda draft, _: torch.tensor([row[draft] for row in drawn])
    )
    assert found.token_ids_Rn.tolist() == drawn
    for number, (anchor, context) in enumerate(((1, 20), (2, 31))):
        _, expected_nV, confidences_n = reference.round(golden["taps"][:context], anchor, 3, chosen=drawn[number])
        torch.testing.assert_close(logits_RnV[number], expected_nV, rtol=0, atol=2e-6)
        torch.testing.assert_close(found.confidence_logits_Rn[number], confidences_n, rtol=0, atol=2e-6)


def test_a_draft_that_could_not_be_drawn_indexes_nothing(rings_of: RingsMaker, golden: dict[str, Tensor]) -> None:
    rings = rings_of(INVARIANT)
    slots = filled(rings, golden["taps"], 20, 20)

    def choose(draft: int, logits_RV: Tensor) -> Tensor:
        best_R = logits_RV.argmax(-1)
        return torch.where(torch.tensor([True, draft != 1]), best_R, -1)

    found, logits_RnV = rings.round([8, 8], [20, 20], slots, 3, choose=choose)
    assert found.token_ids_Rn[1, 1] == -1
    assert logits_RnV.isfinite().all()
    assert torch.equal(logits_RnV[0, :2], logits_RnV[1, :2])


def test_a_block_may_end_behind_the_last_position(rings_of: RingsMaker, golden: dict[str, Tensor]) -> None:
    """The tables hold 256 positions; the rows that still count are rotated by their own."""
    rings = rings_of(FLOAT64)
    rings.store([(1, 185, golden["taps"])])
    _, logits_RnV = rings.round([8], [255], [1], 3)
    assert logits_RnV.isfinite().all()


@pytest.mark.parametrize("drafts", [0, 33])
def test_a_block_of_an_impossible_length_is_refused(rings_of: RingsMaker, drafts: int) -> None:
    with pytest.raises(ArgumentError, match=rf"{drafts} is outside 1 \.\. 32"):
        rings_of(FLOAT32).round([8], [0], [1], drafts)


def test_a_round_without_requests_is_empty(rings_of: RingsMaker) -> None:
    rings = rings_of(FLOAT32)
    none = torch.zeros(0, dtype=torch.int64)
    block = DraftBlock(none, none, none, none.bool())
    found = rings.model.round(none, block, 3, rings.pools, lambda _, logits_RV: logits_RV.argmax(-1))
    assert found.token_ids_Rn.shape == found.confidence_logits_Rn.shape == (0, 3)
