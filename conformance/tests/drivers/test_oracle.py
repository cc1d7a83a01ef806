"""The oracle's tokens follow from the history alone, and from nothing else if the memory is kept straight."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from deepinfer.accelerator import OpOptions, Repeatability
from deepinfer.errors import ArgumentError, DeterminismError, OpRefusedError, PlanError
from deepinfer.numerics import Float32Record, IndexRecord, LongRangeRecord, WindowRecord
from deepinfer_conformance.drivers import OracleDriver, OracleHistory, oracle_tokens
from deepinfer_conformance.drivers.oracle.hashing import TokenRule
from deepinfer_conformance.drivers.oracle.records import packed, read

PROMPT = [(7 * place * place + 3 * place + 11) % 400 for place in range(37)]


def chunks_of(total: int, size: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]


def expected(prompt: list[int], count: int, config) -> list[int]:
    return oracle_tokens(prompt, count, config, config.vocab_size)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 37])
def test_every_chunk_split_gives_the_tokens_of_the_history(make_hand, tiny8, size) -> None:
    hand = make_hand(OracleDriver(), tiny8)
    request = hand.request(PROMPT)
    (said,) = hand.decode([request], [hand.prefill(request, chunks_of(len(PROMPT), size))], 8)
    assert said == expected(PROMPT, 9, tiny8)


@pytest.mark.parametrize("kv_cache_dtype", ["released", "float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_depend_neither_on_the_activation_dtype_nor_on_the_cache_format(
    make_hand, three_layers, dtype, kv_cache_dtype
) -> None:
    options = OpOptions(activation_dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    hand = make_hand(OracleDriver(), three_layers, options)
    request = hand.request(PROMPT)
    (said,) = hand.decode([request], [hand.prefill(request, [20, 17])], 6)
    assert said == expected(PROMPT, 7, three_layers)


def test_requests_of_one_batch_do_not_meet(make_hand, three_layers) -> None:
    hand = make_hand(OracleDriver(), three_layers)
    prompts = [PROMPT[:9], PROMPT[5:6], PROMPT[3:22], PROMPT[:16]]
    requests = [hand.request(prompt) for prompt in prompts]
    first = hand.step("prefill", [hand.chunk(request, len(request.ids)) for request in requests])
    said = hand.decode(requests, first, 9)
    assert said == [expected(prompt, 10, three_layers) for prompt in prompts]
    assert len({tuple(words) for words in said}) == len(prompts)


def test_a_fork_speaks_as_its_parent_would(make_hand, three_layers) -> None:
    hand = make_hand(OracleDriver(), three_layers)
    parent = hand.request(PROMPT)
    hand.prefill(parent, [len(PROMPT)])
    child = hand.fork(parent)
    (of_parent,) = hand.decode([parent], [17], 6)
    (of_child,) = hand.decode([child], [23], 6)
    assert of_parent[1:] == expected([*PROMPT, 17], 6, three_layers)
    assert of_child[1:] == expected([*PROMPT, 23], 6, three_layers)


def test_rows_that_were_disowned_leave_no_trace(make_hand, three_layers) -> None:
    """Several rows in one decode step of which only the first is kept, as after rejected drafts."""
    hand = make_hand(OracleDriver(), three_layers)
    request = hand.request(PROMPT)
    token = hand.prefill(request, [len(PROMPT)])
    for drafts in ([5, 6], [7], [8, 9]):
        request.ids += [token, *drafts]
        hand.step("decode", [hand.chunk(request, 1 + len(drafts))])
        del request.ids[-len(drafts) :]
        request.cached -= len(drafts)
        token = expected(request.ids, 1, three_layers)[0]
    (said,) = hand.decode([request], [token], 4)
    assert said == expected(request.ids[:-4], 5, three_layers)


def test_padding_rows_change_nothing(make_hand, three_layers) -> None:
    hand = make_hand(OracleDriver(), three_layers)
    request, placeholder = hand.request(PROMPT), hand.request([0])
    placeholder.table = [0]
    said = [hand.prefill(request, [len(PROMPT)])]

    def with_padding(step):
        return dataclasses.replace(step, valid_T=torch.tensor([True, False]))

    hand.tamper = with_padding
    for _ in range(4):
        request.ids.append(said[-1])
        placeholder.cached = 0
        token, _ = hand.step("decode", [hand.chunk(request, 1), hand.chunk(placeholder, 1)])
        said.append(token)
    assert said == expected(PROMPT, 5, three_layers)


def test_image_spans_are_followed(make_hand, tiny8) -> None:
    images = [3 <= place < 9 or place == 20 for place in range(len(PROMPT))]
    hand = make_hand(OracleDriver(), tiny8)
    hand.tamper = lambda step: dataclasses.replace(step, image_T=torch.tensor([images[p] for p in step.position_T]))
    request = hand.request(PROMPT, images)
    token = hand.prefill(request, [9, 11, 17])
    history = OracleHistory(tiny8, tiny8.vocab_size)
    history.extend(PROMPT, images)
    assert token == history.next_token()
    assert token != expected(PROMPT, 1, tiny8)[0]


def test_memory_that_nobody_owns_does_not_matter(make_hand, three_layers) -> None:
    said = []
    for seed in (1, 2):
        hand = make_hand(OracleDriver(), three_layers)
        hand.poison(seed)
        request = hand.request(PROMPT)
        said.append(hand.decode([request], [hand.prefill(request, [5] * 7 + [2])], 3))
    assert said[0] == said[1]


def test_the_token_is_certain_at_any_temperature(make_hand, three_layers) -> None:
    hand = make_hand(OracleDriver(), three_layers)
    logits_BV = hand.transformer.logits(torch.tensor([[3.0, 77.0] + [0.0] * 126]))
    (chosen,) = logits_BV.argmax(1)
    for temperature in (0.001, 1.0, 1e6):
        probability = torch.softmax(logits_BV.double() / temperature, 1)[0, chosen]
        assert probability == 1.0
    without = logits_BV.clone()
    without[0, chosen] = -torch.inf
    assert torch.isfinite(without.max())


def test_the_end_token_comes_only_when_it_is_asked_for(tiny8) -> None:
    tokens = expected(PROMPT, 200, tiny8)
    assert 1 not in tokens
    often = oracle_tokens(PROMPT, 60, tiny8, tiny8.vocab_size, rule=TokenRule(end_one_in=4))
    assert 4 <= often.count(1) <= 30


def test_a_driver_that_ends_requests_agrees_with_its_rule(make_hand, three_layers) -> None:
    driver = OracleDriver(end_one_in=3, end_token_id=9)
    hand = make_hand(driver, three_layers)
    request = hand.request(PROMPT)
    (said,) = hand.decode([request], [hand.prefill(request, [len(PROMPT)])], 12)
    assert said == oracle_tokens(PROMPT, 13, three_layers, three_layers.vocab_size, rule=driver.rule)
    assert 9 in said


@pytest.mark.parametrize("cut", [1, 2, 5, 16, 36])
def test_a_history_does_not_depend_on_how_it_was_extended(tiny8, cut) -> None:
    whole, parts = OracleHistory(tiny8, 512), OracleHistory(tiny8, 512)
    whole.extend(PROMPT)
    parts.extend(PROMPT[:cut])
    twin = parts.copy()
    parts.extend([4, 4])
    twin.extend(PROMPT[cut:])
    assert twin.next_token() == whole.next_token()
    assert len(twin) == len(PROMPT)
    assert len(parts) == cut + 2


def test_every_id_and_every_swap_of_a_prompt_changes_the_token_sooner_or_later(three_layers) -> None:
    prompt = PROMPT[:14]
    right = expected(prompt, 6, three_layers)
    for place in range(len(prompt)):
        other = list(prompt)
        other[place] = (other[place] + 1) % 500
        assert expected(other, 6, three_layers) != right, place
    for place in range(len(prompt) - 1):
        other = list(prompt)
        other[place], other[place + 1] = other[place + 1], other[place]
        assert expected(other, 6, three_layers) != right, place


def test_tokens_are_spread_over_the_vocabulary(three_layers) -> None:
    tokens = [expected([first, 3], 1, three_layers)[0] for first in range(400)]
    assert len(set(tokens)) > 250
    assert max(tokens) > 480


@pytest.mark.parametrize("record_format", [WindowRecord(32), LongRangeRecord(64), IndexRecord(32), Float32Record(32)])
def test_a_record_whose_head_or_tail_was_replaced_is_damaged(record_format) -> None:
    words = torch.tensor([[5, 1 << 23, 7], [6, 99, 8], [7, 100, 9], [8, 101, 10]]).numpy()
    records = packed(words, record_format)
    assert not read(records, record_format).damage.any()
    torn = records.copy()
    torn[:, -4:] = records[[1, 2, 3, 0], -4:]
    assert read(torn, record_format).damage.any()
    torn = records.copy()
    torn[:, :6] = records[[1, 2, 3, 0], :6]
    assert read(torn, record_format).damage.any()


def test_a_format_that_is_too_narrow_is_refused() -> None:
    with pytest.raises(OpRefusedError, match="wider"):
        packed(torch.zeros((1, 3), dtype=torch.int64).numpy(), LongRangeRecord(16))


def test_activations_that_cannot_hold_a_digest_are_refused_by_the_plan(make_hand, three_layers) -> None:
    with pytest.raises(PlanError, match=r"bfloat16 \(has float32, float64\)"):
        make_hand(OracleDriver(), three_layers, OpOptions(activation_dtype=torch.bfloat16))


def test_r2_is_proved_and_more_is_refused() -> None:
    OracleDriver().set_determinism(Repeatability.BATCH_INVARIANT, [])
    with pytest.raises(DeterminismError, match="R2"):
        OracleDriver().set_determinism(Repeatability.PLACEMENT_INVARIANT, [])


def test_a_history_refuses_what_no_request_may_hold(tiny8) -> None:
    history = OracleHistory(tiny8, 512)
    with pytest.raises(ArgumentError, match="2 problems"):
        history.extend([512, -1])
    with pytest.raises(ArgumentError, match="empty"):
        history.next_token()
