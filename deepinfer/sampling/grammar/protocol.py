"""What the engine and its grammar process say to each other: one JSON value per line, each way."""

from __future__ import annotations

from typing import TypedDict

MODULE = "deepinfer.sampling.grammar.process"
"""What ``python -m`` runs as the grammar process."""


class Greeting(TypedDict):
    """First line to the process.

    Attributes:
        vocabulary: the bytes of every token in hexadecimal; empty for control marks.
        vocab_size: the model's vocabulary, which may be longer.
        end_token_ids: tokens that may follow a complete form.
        address_space_bytes: memory that the process may map.
    """

    vocabulary: list[str]
    vocab_size: int
    end_token_ids: list[int]
    address_space_bytes: int


class Reply(TypedDict):
    """One line per grammar from the process, and one when it is ready.

    Attributes:
        compiled: the serialised grammar, None when there is none.
        problem: why there is none, in words; empty when there is one.
    """

    compiled: str | None
    problem: str
