"""The tokens of an answer as a table: what was chosen, how probable it was, and what else was likely."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from deepinfer.cli import show

if TYPE_CHECKING:
    from deepinfer.engine.outputs import CompletionOutput

SpellToken = Callable[[int], str]

_HEADER = ("#", "token", "id", "log-prob", "chance", "others")


def token_table(answer: CompletionOutput, spell: SpellToken | None) -> str:
    """Return one line per emitted token of an answer whose log-probabilities were asked for.

    Args:
        answer: what to show.
        spell: gives the text of one token; None shows ids only.
    """
    entries = answer.logprobs or ()
    rows = [
        _row(place, token_id, entry, spell)
        for place, (token_id, entry) in enumerate(zip(answer.token_ids, entries, strict=True))
    ]
    return show.table(_HEADER, rows)


def _row(place: int, chosen: int, entry: Mapping[int, float], spell: SpellToken | None) -> list[str]:
    value = entry[chosen]
    # Best first; among equals the lower id, as everywhere.
    others = sorted((token for token in entry if token != chosen), key=lambda token: (-entry[token], token))
    listed = "  ".join(f"{_name(token, spell)} {_chance(entry[token])}" for token in others)
    return [str(place), _text(chosen, spell), str(chosen), f"{value:.4f}", _chance(value), listed]


def _text(token_id: int, spell: SpellToken | None) -> str:
    """Return a token's text in quotes, so that spaces show and nothing reaches the terminal as a command."""
    return "" if spell is None else show.printable(json.dumps(spell(token_id), ensure_ascii=False))


def _name(token_id: int, spell: SpellToken | None) -> str:
    return str(token_id) if spell is None else _text(token_id, spell)


def _chance(log_probability: float) -> str:
    return f"{100 * math.exp(log_probability):.2f} %"
