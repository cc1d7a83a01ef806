"""Regular expressions and grammars that the grammar library would read as something else, without a word.

It ignores anchors that stand inside, takes letters after a backslash that it does not know for themselves, lets a large
repetition count overflow, and writes an expression for the inside of a JSON string as it stands, quotes and all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_MOST_REPETITIONS = 2**31 - 1
# What the library knows, and what it refuses in its own words.
_KNOWN_LETTERS = frozenset("dDwWsSnrtfvaexucbBpPk0123456789")
# JSON writes these in two characters or more.
_ESCAPED_IN_JSON = frozenset('"\\') | frozenset(map(chr, range(32)))
_CONTROL_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b", "0": "\0"}

_TOKEN = re.compile(
    r"(?P<coded>\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\c[A-Za-z])"
    r"|(?P<escape>\\.)|(?P<count>\{[0-9]*,?[0-9]*\})|(?P<open>\((?:\?[:=!]|\?<[=!]|\?P?<\w+>)?)|(?P<other>.)",
    re.DOTALL,
)


# What stands quoted, in a class, or behind a comment's mark in a grammar, and counts, which stand nowhere else.
_IN_GRAMMAR = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|(?P<count>\{[0-9, ]*\})')


class _Token(NamedTuple):
    """A piece of an expression; inside a class, ``is_negated`` says which kind."""

    kind: str
    text: str
    is_in_class: bool
    is_negated: bool


def expression_problems(text: str, *, is_inside_json: bool = False) -> list[str]:
    """Return what in a regular expression would be read otherwise, in words; empty if nothing would.

    Args:
        text: the expression; one that is malformed is left to the library.
        is_inside_json: it describes the inside of a JSON string.
    """
    tokens = list(_tokens(text))
    problems = [f"anchor {anchor} in the middle, which would be ignored" for anchor in _idle_anchors(tokens)]
    for token in tokens:
        if token.kind == "count" and not token.is_in_class:
            problems += _count_problems(token.text)
        elif token.kind == "escape" and re.fullmatch("[A-Za-z]", token.text[1]):
            letter = token.text[1]
            problems += [f"escape {token.text}, which would mean the letter {letter}"] * (letter not in _KNOWN_LETTERS)
        # A negated class is cut down to what a JSON string may hold; a character that is named is not.
        if is_inside_json and not token.is_negated and _character(token) in _ESCAPED_IN_JSON:
            problems.append(f"{token.text!r}, which a JSON string cannot hold as it stands")
    return list(dict.fromkeys(problems))


def grammar_problems(text: str) -> list[str]:
    """Return what in an EBNF grammar would be read otherwise, in words; empty if nothing would."""
    return [problem for match in _IN_GRAMMAR.finditer(text) for problem in _count_problems(match["count"] or "")]


def _count_problems(text: str) -> list[str]:
    # Numbers of any length, which int() refuses from some length on.
    numbers = [number.lstrip("0") for number in re.findall("[0-9]+", text)]
    return [
        f"repetition count {number:.40}; the limit is {_MOST_REPETITIONS}"
        for number in numbers
        if len(number) > len(str(_MOST_REPETITIONS)) or int(number or "0") > _MOST_REPETITIONS
    ]


def _tokens(text: str) -> Iterator[_Token]:
    is_in_class = is_negated = False
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:  # a backslash at the very end
            return
        kind, piece = match.lastgroup or "other", match.group()
        if is_in_class and kind in ("count", "open"):
            kind, piece = "other", piece[0]
        place += len(piece)
        if kind == "other" and piece == "[" and not is_in_class:
            is_in_class, is_negated = True, text[place : place + 1] == "^"
            place += is_negated
            continue
        if kind == "other" and piece == "]" and is_in_class:
            is_in_class = is_negated = False
            yield _Token("class", piece, is_in_class=False, is_negated=False)
            continue
        yield _Token(kind, piece, is_in_class, is_negated)


def _idle_anchors(tokens: Iterable[_Token]) -> Iterator[str]:
    outside = [token for token in tokens if not token.is_in_class]
    yield from _anchors_behind_something(outside, "^", "open", ")")
    yield from _anchors_behind_something(outside[::-1], "$", ")", "open")


def _anchors_behind_something(tokens: Iterable[_Token], anchor: str, opening: str, closing: str) -> Iterator[str]:
    """Yield ``anchor`` for each that does not stand at the edge where the tokens begin."""
    is_at_edge = True
    groups: list[bool] = []  # whether each open group began there
    for token in tokens:
        is_plain = token.kind == "other"
        mark = token.text if is_plain else token.kind
        if mark == opening:
            groups.append(is_at_edge)
        elif mark == closing:
            is_at_edge = False
            del groups[-1:]
        elif mark == "|":
            is_at_edge = groups[-1] if groups else True
        elif mark == anchor:
            if not is_at_edge:
                yield anchor
        elif mark not in ("^", "$"):
            is_at_edge = False


def _character(token: _Token) -> str | None:
    """Return the character that a token names, None if it names none or several."""
    if token.kind == "other":
        return token.text
    if token.kind == "escape":
        return _CONTROL_LETTERS.get(token.text[1], None if token.text[1].isalnum() else token.text[1])
    if token.kind != "coded":
        return None
    if token.text[1] == "c":
        return chr(ord(token.text[2]) & 31)
    return chr(int(token.text[2:], 16))
