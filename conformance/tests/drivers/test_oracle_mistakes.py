"""Each kind of mistake that an engine can make with its memory shows as a wrong token of the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from deepinfer.accelerator import StepLayout
from deepinfer_conformance.drivers import Calls, Fault, FaultKind, FaultyDriver, OracleDriver, oracle_tokens

PROMPT = [(5 * place * place + place + 29) % 400 for place in range(30)]
CHUNKS = [13, 17]
COUNT = 6
DECODE_FROM = len(CHUNKS)
"""Number of the first decode step, counted from 0."""


def expected(prompt: list[int], config, count: int = COUNT + 1) -> list[int]:
    return oracle_tokens(prompt, count, config, config.vocab_size)


def speak(hand) -> list[int]:
    """Run the prompt in two chunks, then decode."""
    request = hand.request(PROMPT)
    (said,) = hand.decode([request], [hand.prefill(request, CHUNKS)], COUNT)
    return said


def replaced(field: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[StepLayout], StepLayout]:
    return lambda step: dataclasses.replace(step, **{field: change(getattr(step, field))})


def other_in_place(row: int, column: int, value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed[row, column] = value
        return changed

    return change


LAYOUT_MISTAKES = {
    "another block in the table": replaced("block_table_RB", other_in_place(0, 1, 33)),
    "two blocks of the table swapped": replaced("block_table_RB", lambda t: t[:, [1, 0, *range(2, t.shape[1])]]),
    "a table that is empty from the third block on": replaced(
        "block_table_RB", lambda t: t * (torch.arange(t.shape[1]) < 2)
    ),
    "another state slot": replaced("state_slots_R", lambda t: t - 1),
    "positions one too high": lambda s: dataclasses.replace(
        s,
        position_T=s.position_T + 1,
        cached_R=s.cached_R + 1,
        max_position=s.max_position + 1,
        block_table_RB=torch.nn.functional.pad(s.block_table_RB, (0, 1), value=33),
    ),
    "positions one too low": lambda s: dataclasses.replace(s, position_T=s.position_T - 1, cached_R=s.cached_R - 1),
    "a window that starts too late": replaced("window_start_R", lambda t: t + 28),
    "another ring size": lambda s: dataclasses.replace(s, ring=s.ring + 1),
    "another block size": lambda s: dataclasses.replace(s, block_size=2 * s.block_size),
    "a row taken for padding": replaced("valid_T", torch.zeros_like),
    "a row taken for an image": replaced("image_T", torch.ones_like),
}


@pytest.mark.parametrize("step_number", [1, DECODE_FROM + 1])
@pytest.mark.parametrize("mistake", LAYOUT_MISTAKES)
def test_a_wrong_step_layout_shows(make_hand, three_layers, mistake, step_number) -> None:
    hand = make_hand(OracleDriver(), three_layers)
    seen = []

    def tamper(step: StepLayout) -> StepLayout:
        seen.append(step)
        return LAYOUT_MISTAKES[mistake](step) if len(seen) == step_number + 1 else step

    hand.tamper = tamper
    assert speak(hand) != expected(PROMPT, three_layers)
    assert len(seen) > step_number


LAYERS = 3
LOST_OR_MISPLACED = {
    "a ring that was not written": Fault(op="codec.store_window", kind=FaultKind.STALE, calls=Calls.at(7)),
    "a ring written one place off": Fault(
        op="codec.store_window", kind=FaultKind.VALUE, part="slot_T", calls=Calls.at(8)
    ),
    "entries that were not written": Fault(op="codec.store_entries", kind=FaultKind.STALE, calls=Calls.at(3)),
    "an entry written one place off": Fault(
        op="codec.store_entries", kind=FaultKind.VALUE, part="slot_T", row=3, calls=Calls.at(2)
    ),
    "index keys that were not written": Fault(op="codec.store_index_keys", kind=FaultKind.STALE, calls=Calls.at(3)),
    "an index key written one place off": Fault(
        op="codec.store_index_keys", kind=FaultKind.VALUE, part="slot_T", row=3, calls=Calls.at(2)
    ),
    "a pending row that was not kept": Fault(
        op="compression.pool_pairs", kind=FaultKind.VALUE, part="pending.rows_ZPW", calls=Calls.at(1)
    ),
    "a rotation by the wrong position": Fault(
        op="norm.rotary", kind=FaultKind.VALUE, part="position_T", row=0, calls=Calls.at(24)
    ),
    "a look-back that missed the history": Fault(
        op="memory.ngram_rows", kind=FaultKind.VALUE, part="tokens_TG", row=0, element=2, calls=Calls.at(3)
    ),
    "a bit of a record": Fault(op="codec.encode", kind=FaultKind.BIT, row=0, element=1, calls=Calls.at(10)),
    "a row sent to another expert": Fault(
        op="experts.route", kind=FaultKind.VALUE, part="result.experts_Tk", row=0, calls=Calls.at(9)
    ),
    "picks of the step before": Fault(
        op="selection.top_entries", kind=FaultKind.STALE, calls=Calls(first=9), calls_ago=2
    ),
}


@pytest.mark.parametrize("mistake", LOST_OR_MISPLACED)
def test_what_is_lost_or_misplaced_shows(make_hand, three_layers, mistake) -> None:
    driver = FaultyDriver.wrapping(OracleDriver(), [LOST_OR_MISPLACED[mistake]])
    assert speak(make_hand(driver, three_layers)) != expected(PROMPT, three_layers)
    assert driver.strikes


def test_without_a_fault_the_same_harness_gives_the_right_tokens(make_hand, three_layers) -> None:
    driver = FaultyDriver.wrapping(OracleDriver(), [])
    assert speak(make_hand(driver, three_layers)) == expected(PROMPT, three_layers)


@pytest.mark.parametrize("pool", ["block_bytes_Nb", "slot_bytes_Zb"])
def test_a_fork_that_copies_too_little_shows(make_hand, three_layers, pool) -> None:
    hand = make_hand(OracleDriver(), three_layers)
    parent = hand.request(PROMPT)
    hand.prefill(parent, CHUNKS)
    child = hand.fork(parent)
    item = child.table[len(PROMPT) // 4] if pool == "block_bytes_Nb" else child.slot
    getattr(hand.pools, pool)[item].random_(0, 256)
    (said,) = hand.decode([child], [17], 6)
    assert said[1:] != expected([*PROMPT, 17], three_layers, 6)


@pytest.mark.parametrize("shared", ["block", "slot"])
def test_memory_with_two_owners_shows(make_hand, three_layers, shared) -> None:
    hand = make_hand(OracleDriver(), three_layers)
    first, second = hand.request(PROMPT), hand.request(PROMPT[7:20])
    tokens = [hand.prefill(first, CHUNKS)]
    if shared == "slot":
        second.slot = first.slot
    else:
        second.table = [first.table[2]]
    tokens.append(hand.prefill(second, [13]))
    said = hand.decode([first, second], tokens, 4)
    assert said[0] != expected(PROMPT, three_layers, 5)


def test_tokens_handed_to_the_wrong_request_show(make_hand, three_layers) -> None:
    hand = make_hand(OracleDriver(), three_layers)
    requests = [hand.request(PROMPT), hand.request(PROMPT[3:16])]
    tokens = [hand.prefill(requests[0], CHUNKS), hand.prefill(requests[1], [13])]
    said = hand.decode(requests, tokens[::-1], 1)
    assert said[0][1] != expected(PROMPT, three_layers, 2)[1]
    assert said[1][1] != expected(PROMPT[3:16], three_layers, 2)[1]


def test_a_prefill_chunk_that_runs_as_a_decode_step_shows(make_hand, three_layers) -> None:
    """Its records would overwrite the ring before its first rows have read it."""
    hand = make_hand(OracleDriver(), three_layers)
    request = hand.request(PROMPT)
    hand.prefill(request, [13])
    (token,) = hand.step("decode", [hand.chunk(request, 17)])
    assert token != expected(PROMPT, three_layers, 1)[0]


def test_every_record_that_a_row_may_see_is_read(make_hand, three_layers) -> None:
    """One flipped bit in the head or tail of any live window record or entry changes the very next token."""
    hand = make_hand(OracleDriver(), three_layers)
    request = hand.request(PROMPT)
    request.ids.append(hand.prefill(request, CHUNKS))
    right = expected(PROMPT, three_layers, 2)[1]
    window, cached = three_layers.sliding_window, len(PROMPT)
    places = [
        (hand.pools.window(layer).bytes_ZRb[request.slot], position % hand.pools.layout.ring)
        for layer in range(LAYERS)
        for position in range(cached + 1 - window, cached)
    ]
    for owner, ratio in ((1, 2), (2, 1)):
        view = hand.pools.entries(owner).bytes_NEb
        per_block = view.shape[1]
        places += [
            (view[request.table[entry // per_block]], entry % per_block) for entry in range((cached + 1) // ratio)
        ]
    places.pop()  # the newest ratio-1 entry is written by the next step itself
    saved = (hand.pools.block_bytes_Nb.clone(), hand.pools.slot_bytes_Zb.clone())

    def next_token() -> int:
        (token,) = hand.step("decode", [hand.chunk(request, 1)])
        request.cached -= 1
        hand.pools.block_bytes_Nb.copy_(saved[0])
        hand.pools.slot_bytes_Zb.copy_(saved[1])
        return token

    assert next_token() == right
    for number, (records, place) in enumerate(places):
        byte = (number * 5) % 11 if number % 4 else -1
        records[place, byte] ^= 1 << (number % 8)
        assert next_token() != right, (number, byte)
