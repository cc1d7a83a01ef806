"""A small world whose right answers are known: seeded, typed items, no outside text.

An `Item` is a prompt with its one right answer. What a model cannot have learned by heart:

======== ============================================== =========================================================
task     prompt and answer                              held out for the test split
======== ============================================== =========================================================
recall   statements and sentences, ``Tell: Anna has``   a tenth of the name and value pairs; documents by seed
sum      ``What is 12 + 30?`` - ``42``                  a tenth of the pairs of summands
json     a schema and values - the record               a tenth of the prompts
brackets an opening string - its closing                a tenth of the strings of two and more
facts    a question - its answer                        nothing: there is one right answer, to be known by heart
phrase   the head of a fixed phrase - its rest          nothing: exact repetition is what Engram is for
sentence the head of a sentence - its rest              sentences by seed; no single right answer, for perplexity
======== ============================================== =========================================================

Every word, digit and run of punctuation of this world is one token (`count_tokens` relies on it, tests hold it).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar
from zlib import crc32

from .vocabulary import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    CLOSING,
    COLOURS,
    ENDINGS,
    FACTS,
    FIELDS,
    NAMES,
    OPENING,
    PHRASES,
    PLACES,
    PREPOSITIONS,
    THINGS,
    TIMES,
    VERBS,
)  # fmt: skip

Task = Literal["recall", "sum", "json", "brackets", "facts", "phrase", "sentence"]
Split = Literal["train", "test"]
Drawn = TypeVar("Drawn")

TASKS: tuple[Task, ...] = ("recall", "sum", "json", "brackets", "facts", "phrase", "sentence")
DISTANCES = (10, 30, 100, 300, 600, 1000, 1500)
"""Tokens between a recalled value and its question in the test items."""

PIECE = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s"
"""What the tokenizer never joins: words, single digits, runs of punctuation, white space."""

_PIECE = re.compile(r" ?[^\W\d_]+| ?\d| ?[^\s\w]+|\s")
_STATEMENT_TOKENS = 4
_ASKED_TOKENS = 6  # the full stop behind a value and its question
_HEADER = "Notes:"
"""Begins every document, so that its first word too is written with the space before it, as the same token."""
_HELD_OUT_ONE_IN = 10


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt, the one right answer behind it, and how many tokens back the answer was given (0: nowhere)."""

    task: Task
    prompt: str
    answer: str
    distance: int = 0


@dataclass(frozen=True, slots=True)
class Preamble:
    """A document before the questions: its text, and the value and place (in tokens) of every name in it."""

    text: str
    values: dict[str, str]
    places: dict[str, int]
    tokens: int


def count_tokens(text: str) -> int:
    """Count the tokens of a text of this world."""
    return len(_PIECE.findall(text))


def held_out(key: str) -> bool:
    """Say whether this key belongs to the test split alone."""
    return crc32(key.encode()) % _HELD_OUT_ONE_IN == 0


def question(name: str) -> str:
    """Ask what a name has; the name is the token that the statement used."""
    return f"\nTell: {name} has"


def sentence(rng: random.Random) -> str:
    """Draw a sentence of about eleven tokens."""
    subject = f"the {rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)}"
    where = f"{rng.choice(PREPOSITIONS)} the {rng.choice(PLACES)}"
    rest = f"{rng.choice(VERBS)} {where} and {rng.choice(ENDINGS)}."
    return f"{rng.choice(TIMES)} {subject} {rest}" if rng.random() < 0.4 else f"T{subject[1:]} {rest}"


def preamble(rng: random.Random, tokens: int, pairs: int, split: Split) -> Preamble:
    """Draw a document of about ``tokens`` tokens that states ``pairs`` names' things among sentences."""
    values = _draw_values(rng, pairs, split)
    sentences = max(0, (tokens - _STATEMENT_TOKENS * pairs) // 11)
    parts: list[str | None] = [*values, *([None] * sentences)]
    rng.shuffle(parts)
    pieces: list[str] = [_HEADER]
    places: dict[str, int] = {}
    length = count_tokens(_HEADER)
    for name in parts:
        text = sentence(rng) if name is None else f"{name} has {values[name]}."
        pieces.append(f" {text}")
        length += count_tokens(pieces[-1])
        if name is not None:
            places[name] = length - 1
    return Preamble("".join(pieces), values, places, length)


def recall_item(rng: random.Random, distance: int, split: Split) -> Item:
    """Draw a question whose value stands about ``distance`` tokens before the place of the answer."""
    pairs = min(2 + distance // 40, 24)
    values = _draw_values(rng, pairs, split)
    name, *others = values
    pieces = [f" {sentence(rng)}" for _ in range(rng.randrange(3))]
    pieces.append(f" {name} has {values[name]}.")
    left = distance - _ASKED_TOKENS
    fillers = [f" {other} has {values[other]}." for other in others]
    while fillers and left < _STATEMENT_TOKENS * len(fillers):
        fillers.pop()
    left -= _STATEMENT_TOKENS * len(fillers)
    while (more := f" {sentence(rng)}") and count_tokens(more) <= left:
        fillers.append(more)
        left -= count_tokens(more)
    rng.shuffle(fillers)
    after = "".join(fillers)
    asked = question(name)
    text = _HEADER + "".join(pieces) + after
    return Item("recall", text + asked, f" {values[name]}", count_tokens(after) + _ASKED_TOKENS)


def sum_item(rng: random.Random, split: Split) -> Item:
    """Draw a sum of two numbers of up to two digits."""
    first, second = _until(lambda: (rng.randrange(100), rng.randrange(100)), lambda key: f"sum {key}", split)
    return Item("sum", f"What is {first} + {second}?", f" {first + second}")


def json_item(rng: random.Random, split: Split) -> Item:
    """Draw a schema with two to four fields, values for it, and the record."""

    def draw() -> tuple[str, str]:
        fields = rng.sample(FIELDS, rng.randint(2, 4))
        values = [_value(rng, field) for field, _ in fields]
        schema = ", ".join(f"{field} {kind}" for field, kind in fields)
        shown = (f'"{value}"' if kind == "text" else value for value, (_, kind) in zip(values, fields, strict=True))
        record = ", ".join(f'"{field}": {value}' for (field, _), value in zip(fields, shown, strict=True))
        return f"Record with {schema}: {', '.join(values)}.", f" {{{record}}}"

    prompt, answer = _until(draw, lambda key: f"json {key[0]}", split)
    return Item("json", prompt, answer)


def brackets_item(rng: random.Random, split: Split) -> Item:
    """Draw an opening string of one to six brackets; a single one is in both splits."""

    def draw() -> tuple[int, ...]:
        return tuple(rng.randrange(len(OPENING)) for _ in range(rng.randint(1 if split == "train" else 2, 6)))

    kinds = _until(draw, lambda key: f"brackets {key}", split)
    opening, closing = (" ".join(text) for text in ([OPENING[k] for k in kinds], [CLOSING[k] for k in kinds[::-1]]))
    return Item("brackets", f"Close {opening} :", f" {closing}")


def facts_item(rng: random.Random) -> Item:
    """Draw a fact."""
    question, answer = rng.choice(FACTS)
    return Item("facts", question, f" {answer}")


def phrase_item(rng: random.Random) -> Item:
    """Draw a phrase: two words are given, the rest is wanted."""
    words = rng.choice(PHRASES)
    return Item("phrase", f"Say {' '.join(words[:2])}", f" {' '.join(words[2:])}")


def sentence_item(rng: random.Random) -> Item:
    """Draw a sentence, cut behind its third word."""
    words = sentence(rng).split(" ")
    return Item("sentence", " ".join(words[:3]), f" {' '.join(words[3:])}")


def draw_item(task: Task, rng: random.Random, split: Split, distance: int = 30) -> Item:
    """Draw an item of a task; ``distance`` matters to recall alone."""
    makers: dict[Task, Callable[[], Item]] = {
        "recall": lambda: recall_item(rng, distance, split),
        "sum": lambda: sum_item(rng, split),
        "json": lambda: json_item(rng, split),
        "brackets": lambda: brackets_item(rng, split),
        "facts": lambda: facts_item(rng),
        "phrase": lambda: phrase_item(rng),
        "sentence": lambda: sentence_item(rng),
    }
    return makers[task]()


def held_out_items(seed: int, count: int) -> list[Item]:
    """Draw the test items: ``count`` for every task, and for recall ``count`` at every distance."""
    rng = random.Random(f"test {seed}")
    items = [draw_item("recall", rng, "test", distance) for distance in DISTANCES for _ in range(count)]
    return items + [draw_item(task, rng, "test") for task in TASKS if task != "recall" for _ in range(count)]


def _draw_values(rng: random.Random, pairs: int, split: Split) -> dict[str, str]:
    names = rng.sample(NAMES, pairs)
    return {name: _draw_value(rng, name, split) for name in names}


def _draw_value(rng: random.Random, name: str, split: Split) -> str:
    return _until(lambda: rng.choice(THINGS), lambda thing: f"recall {name} {thing}", split)


def _until(draw: Callable[[], Drawn], key: Callable[[Drawn], str], split: Split) -> Drawn:
    while True:
        found = draw()
        if held_out(key(found)) == (split == "test"):
            return found


def _value(rng: random.Random, field: str) -> str:
    if field in {"age", "count"}:
        return str(rng.randrange(100))
    if field in {"open", "new"}:
        return rng.choice(("true", "false"))
    return rng.choice({"name": NAMES, "city": CITIES, "thing": THINGS, "colour": COLOURS}[field])
