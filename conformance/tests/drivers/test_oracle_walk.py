"""Random walks by hand: chunks, batches, disowned rows, forks and reused memory, every token checked."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from deepinfer_conformance.drivers import OracleDriver, oracle_tokens


@dataclass
class Speaker:
    request: object
    token: int | None = None
    """The token that it will say next; None while its prompt is not computed."""


class Walk:
    def __init__(self, hand, seed: int) -> None:
        self.hand = hand
        self.random = random.Random(seed)
        self.speakers: list[Speaker] = []
        self.checked = 0

    def arrive(self) -> None:
        ids = [self.random.randrange(512) for _ in range(self.random.randrange(1, 40))]
        self.speakers.append(Speaker(self.hand.request(ids)))

    def leave(self) -> None:
        gone = self.speakers.pop(self.random.randrange(len(self.speakers)))
        self.hand.release(gone.request, [speaker.request for speaker in self.speakers])

    def fork(self, parent: Speaker) -> None:
        self.speakers.append(Speaker(self.hand.fork(parent.request), self.random.randrange(512)))

    def prefill(self, waiting: list[Speaker]) -> None:
        chosen = self.random.sample(waiting, self.random.randrange(1, len(waiting) + 1))
        chunks = [
            self.hand.chunk(s.request, self.random.randrange(1, len(s.request.ids) - s.request.cached + 1))
            for s in chosen
        ]
        for speaker, token in zip(chosen, self.hand.step("prefill", chunks), strict=True):
            if speaker.request.cached == len(speaker.request.ids):
                self.check(speaker, token)
                speaker.token = token

    def decode(self, speakers: list[Speaker]) -> None:
        chunks = []
        for speaker in speakers:
            drafts = [self.random.randrange(512) for _ in range(self.random.randrange(3))]
            speaker.request.ids += [speaker.token, *drafts]
            chunks.append(self.hand.chunk(speaker.request, 1 + len(drafts)))
        for speaker, chunk, token in zip(speakers, chunks, self.hand.step("decode", chunks), strict=True):
            self.check(speaker, token)
            speaker.token = token
            disowned = self.random.randrange(chunk.rows)
            if disowned:
                del speaker.request.ids[-disowned:]
                speaker.request.cached -= disowned
                speaker.token = self.right(speaker)

    def right(self, speaker: Speaker) -> int:
        return oracle_tokens(speaker.request.ids, 1, self.hand.config, 512)[0]

    def check(self, speaker: Speaker, token: int) -> None:
        assert token == self.right(speaker)
        self.checked += 1

    def step(self) -> None:
        waiting = [speaker for speaker in self.speakers if speaker.token is None]
        speaking = [speaker for speaker in self.speakers if speaker.token is not None]
        room, chance = len(self.speakers) < 5, self.random.random()
        if room and chance < 0.3:
            self.arrive()
        elif waiting and chance < 0.6:
            self.prefill(waiting)
        elif speaking and chance < 0.85:
            self.decode(speaking)
        elif speaking and room and chance < 0.93:
            self.fork(self.random.choice(speaking))
        elif self.speakers:
            self.leave()


@pytest.mark.parametrize("seed", range(2))
def test_every_token_of_a_random_walk_is_the_histories(make_hand, three_layers, seed) -> None:
    walk = Walk(make_hand(OracleDriver(), three_layers, num_blocks=150, num_slots=6), seed)
    for _ in range(90):
        walk.step()
    assert walk.checked > 30
