"""Training sequences: a function of seed and step alone, so that a resumed run sees what an uninterrupted one sees.

A sequence is a document that states names' things, then a stream of items, each ended by the stop token; some ask for
what the document stated. Answers weigh most in the loss; running text teaches the language and weighs little, and a
stated thing is a coin toss that nobody can learn.

Legend: B sequences, T positions.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .world import Item, Preamble, Task, draw_item, preamble, question

BEGIN_ID, END_ID, PAD_ID = 0, 1, 2
_TEXT_WEIGHT, _ANSWER_WEIGHT = 0.1, 1.0
_BEGIN_CHANCE = 0.3
_DOCUMENT_CHANCE = 0.75
_TASKS: dict[Task, float] = {"sum": 0.5, "json": 0.14, "brackets": 0.1, "facts": 0.1, "phrase": 0.06, "sentence": 0.1}
"""How often each task is drawn: what must be worked out more often than what must only be known."""


class Batch(NamedTuple):
    """Token ids [B, T], the loss weight of each position's own token [B, T], and which of them recall the document."""

    ids_BT: Tensor
    weight_BT: Tensor
    recalled_BT: Tensor


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a batch holds: sequences, their length, and how often an item of the stream asks for the document.

    The larger that share, the more of the sequences have a document: three quarters at least, unless it is 0.
    """

    sequences: int
    length: int
    recall_share: float = 0.5

    def part_of(self, processes: int) -> Recipe:
        """Give one process's part: its share of the sequences, at least one."""
        return replace(self, sequences=max(1, self.sequences // processes))


def make_batch(tokenizer: Tokenizer, recipe: Recipe, seed: int, step: int) -> Batch:
    """Make the batch of one step."""
    rng = random.Random(f"train {seed} {step}")
    rows = [_sequence(tokenizer, rng, recipe) for _ in range(recipe.sequences)]
    ids, weights, recalled = zip(*rows, strict=True)
    return Batch(torch.tensor(ids), torch.tensor(weights), torch.tensor(recalled))


def _sequence(tokenizer: Tokenizer, rng: random.Random, recipe: Recipe) -> tuple[list[int], list[float], list[bool]]:
    ids: list[int] = []
    weights: list[float] = []
    recalled: list[bool] = []

    def add(text: str, weight: float, *, stop: bool = False) -> None:
        new = tokenizer.encode(text, add_special_tokens=False).ids + [END_ID] * stop
        ids.extend(new)
        weights.extend([weight] * len(new))
        recalled.extend([False] * len(new))

    if rng.random() < _BEGIN_CHANCE:
        ids.append(BEGIN_ID)
        weights.append(0.0)
        recalled.append(False)
    stated: Preamble | None = None
    if recipe.recall_share and rng.random() < max(_DOCUMENT_CHANCE, recipe.recall_share):
        # Documents of every size up to two thirds: near and far questions in every sequence length.
        size = int(recipe.length * rng.uniform(0.1, 0.65))
        pairs = min(rng.randint(2, max(2, size // 9)), 40)
        stated = preamble(rng, size, pairs, "train")
        add(stated.text, _TEXT_WEIGHT)
    while len(ids) < recipe.length:
        if stated is not None and rng.random() < recipe.recall_share:
            name = rng.choice(list(stated.values))
            add(question(name), 0.0)
            add(f" {stated.values[name]}", _ANSWER_WEIGHT, stop=True)
            recalled[-2] = True  # the value is one token, before the stop
            continue
        item = _draw(rng)
        add(item.prompt, _TEXT_WEIGHT if item.task == "sentence" else 0.0)
        add(item.answer, _TEXT_WEIGHT if item.task == "sentence" else _ANSWER_WEIGHT, stop=True)
    return ids[: recipe.length], weights[: recipe.length], recalled[: recipe.length]


def _draw(rng: random.Random) -> Item:
    (task,) = rng.choices(list(_TASKS), list(_TASKS.values()))
    return draw_item(task, rng, "train")
