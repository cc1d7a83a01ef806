"""The checks of values that :class:`~deepinfer.sampling.params.SamplingParams` is made of, each in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

_SHOWN_ITEMS = 5


def integer_problems(name: str, value: int, least: int, most: int) -> list[str]:
    """Check an integer's range, both ends included."""
    if least <= value <= most:
        return []
    return [f"{name} is {_short(value)}; give an integer from {least} to {most}"]


def number_problems(name: str, value: float, least: float, most: float = math.inf) -> list[str]:
    """Check that a number is finite and lies in a range, both ends included."""
    if math.isfinite(value) and least <= value <= most:
        return []
    extent = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
    return [f"{name} is {value!r}; give a finite number {extent}"]


def length_problems(name: str, length: int, most: int) -> list[str]:
    """Check the length of a list."""
    return [f"{name} has {length} entries; the limit is {most}"] if length > most else []


def id_problems(name: str, ids: Iterable[int], vocab_size: int, *, unset: int | None = None) -> list[str]:
    """Check that every token id lies in ``[0, vocab_size)``, or is the ``unset`` marker."""
    wrong = [token_id for token_id in ids if not 0 <= token_id < vocab_size and token_id != unset]
    if not wrong:
        return []
    marker = f", or {unset} for none" if unset is not None else ""
    return [f"{name} holds {_listed(wrong)}; give token ids from 0 to {vocab_size - 1}{marker}"]


def string_problems(name: str, texts: Sequence[str], most_characters: int) -> list[str]:
    """Check stop strings: not empty, not too long, and expressible in UTF-8."""
    problems = []
    if "" in texts:
        problems.append(f"{name} holds an empty string, which would end every text at once; leave it out")
    lengths = [len(text) for text in texts if len(text) > most_characters]
    if lengths:
        problems.append(f"{name} holds a string of {max(lengths)} characters; the limit is {most_characters}")
    surrogates = [text for text in texts if any("\ud800" <= character <= "\udfff" for character in text)]
    if surrogates:
        problems.append(f"{name} holds {surrogates[0]!r:.80}, which has a lone surrogate and can never be decoded")
    return problems


def _short(value: int) -> str:
    # Python refuses to print integers of thousands of digits.
    return str(value) if abs(value) < 2**128 else f"{'-' if value < 0 else ''}2**{value.bit_length() - 1} or beyond"


def _listed(values: Sequence[int]) -> str:
    shown = ", ".join(_short(value) for value in values[:_SHOWN_ITEMS])
    return shown if len(values) <= _SHOWN_ITEMS else f"{shown} and {len(values) - _SHOWN_ITEMS} more"
