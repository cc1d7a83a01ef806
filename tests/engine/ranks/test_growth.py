"""Records that come from a rank in pieces are those that its engine gave, and a piece is as small as what is new."""

from __future__ import annotations

import pickle

import pytest

from deepinfer.engine.growing import Prefix
from deepinfer.engine.outputs import CompletionOutput, RequestOutput
from deepinfer.engine.ranks.growth import Received, Sender


class Growing:
    """A request with two answers, one of which has log-probabilities of nothing."""

    def __init__(self, name: str = "a", *, with_logprobs: bool = True) -> None:
        self.name, self.with_logprobs = name, with_logprobs
        self.token_ids: list[list[int]] = [[], []]
        self.logprobs: list[list[dict[int, float]]] = [[], []]

    def grow(self, place: int, count: int) -> None:
        for _ in range(count):
            token_id = 1000 + len(self.token_ids[place])
            self.token_ids[place].append(token_id)
            self.logprobs[place].append({token_id: -0.5, 7: -float(place)})

    def record(self, *texts: str, prompt_logprobs: bool = False, finished: bool = False) -> RequestOutput:
        outputs = tuple(
            CompletionOutput(
                place,
                text,
                token_ids=Prefix(token_ids, len(token_ids)),
                logprobs=Prefix(logprobs, len(logprobs)) if self.with_logprobs else None,
                finish_reason="stop" if finished else None,
                stop_reason="x" if finished else None,
                message=None,
            )
            for place, (text, token_ids, logprobs) in enumerate(zip(texts, self.token_ids, self.logprobs, strict=True))
        )
        listed = (None, {3: -1.0}) if prompt_logprobs else None
        return RequestOutput(self.name, "prompt", (1, 2), listed, outputs, finished)


def carried(sender: Sender, received: Received, record: RequestOutput) -> tuple[RequestOutput, int]:
    (growth,) = sender.growths([record])
    message = pickle.dumps(growth)
    return received.record(pickle.loads(message)), len(message)  # noqa: S301 - made here


@pytest.mark.parametrize("with_logprobs", [True, False])
def test_every_record_is_the_one_that_was_given(*, with_logprobs: bool) -> None:
    request, sender, received = Growing(with_logprobs=with_logprobs), Sender(), Received()
    steps = [(0, 0, "", "", False), (1, 0, "ab", "", True), (2, 3, "abcde", "x", True), (0, 1, "abcdefg", "xy", True)]
    for first, second, one, other, prompt_logprobs in steps:
        request.grow(0, first)
        request.grow(1, second)
        record = request.record(one, other, prompt_logprobs=prompt_logprobs)
        kept = carried(sender, received, record)[0]
        request.grow(0, 1)  # what comes later does not show in it
        assert kept == record
        assert kept.outputs[0].token_ids == record.outputs[0].token_ids
    # A stop string is found, and taken back.
    last = request.record("abc", "xy", prompt_logprobs=True, finished=True)
    assert carried(sender, received, last)[0] == last


def test_a_piece_is_as_small_as_what_is_new() -> None:
    request, sender, received = Growing(), Sender(), Received()
    sizes = []
    for step in range(300):
        request.grow(0, 1)
        request.grow(1, 1)
        record = request.record("t" * step, "u" * step)
        sizes.append(carried(sender, received, record)[1])
    assert max(sizes[1:]) < 400 < len(pickle.dumps(record)) / 10


def test_an_id_that_was_forgotten_or_has_ended_begins_anew() -> None:
    sender = Sender()
    for over in ("discarded", "finished"):
        request, received = Growing(), Received()
        request.grow(0, 3)
        record = request.record("abc", "", finished=over == "finished")
        assert carried(sender, received, record)[0] == record
        if over == "discarded":
            sender.forget(["a", "unknown"])
    again = Growing()
    again.grow(1, 1)
    assert carried(sender, Received(), again.record("", "z"))[0] == again.record("", "z")
