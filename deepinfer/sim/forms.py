"""Forms without a library: small automata over token ids, through the interface by which the engine follows any form.

An automaton is drawn from its text, which stands in a request's ``regex``. So everything around a form (masks, drafts,
bans, stops, aborts, preemption) can be lived through without xgrammar, and another reading of the same automaton
(:mod:`deepinfer.sim.wishes`) knows which tokens may come.

Legend: S states, V vocabulary, K rows, W words of a bitmask.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from deepinfer.sampling.grammar import CompiledForm
from deepinfer.sampling.grammar.library import GrammarError
from deepinfer.sampling.grammar.specification import GrammarSource

ALPHABET = range(2, 14)
"""The tokens that forms are made of: few, so that bans and stops hit them."""

_BROKEN = "broken"
_WIDTHS = (1, 1, 3, 6, len(ALPHABET))
FORBIDDEN = -1


@dataclass(frozen=True, slots=True)
class Automaton:
    """A form.

    Attributes:
        next_SV: int64, the state behind a token, -1 where it is forbidden; the end token leads nowhere, to state 0.
        is_complete_S: where the end token is allowed.
        end_token_id: the end token.
    """

    next_SV: NDArray[np.int64]
    is_complete_S: NDArray[np.bool_]
    end_token_id: int

    @classmethod
    def from_text(cls, text: str, vocab_size: int, end_token_id: int) -> Automaton:
        """Draw an automaton: states with one token, with few and with many; no state without a way on or an end."""
        draw = np.random.default_rng(zlib.crc32(text.encode()))
        states = int(draw.integers(2, 7))
        next_SV = np.full((states, vocab_size), FORBIDDEN, np.int64)
        is_complete_S = draw.random(states) < 0.3
        for state in range(states):
            # A complete state without a token: only the end may follow.
            width = 0 if is_complete_S[state] and draw.random() < 0.4 else int(draw.choice(_WIDTHS))
            tokens = draw.choice(np.array(ALPHABET), width, replace=False)
            next_SV[state, tokens] = draw.integers(0, states, width)
        next_SV[is_complete_S, end_token_id] = 0
        return cls(next_SV, is_complete_S, end_token_id)

    def matcher(self) -> AutomatonMatcher:
        """Return a place at the beginning."""
        return AutomatonMatcher(self, [0])


class AutomatonMatcher:
    """A place in a form, and the way to it."""

    def __init__(self, form: Automaton, states: list[int]) -> None:
        self._form = form
        self._states = states

    def accept_token(self, token_id: int) -> bool:
        """Move on, if the token is allowed."""
        following = int(self._form.next_SV[self._states[-1], token_id])
        if following == FORBIDDEN:
            return False
        self._states.append(following)
        return True

    def fill_next_token_bitmask(self, mask_KW: NDArray[np.int32], row: int) -> None:
        """Write the allowed tokens into a row."""
        allowed_V = self._form.next_SV[self._states[-1]] != FORBIDDEN
        bits = np.zeros(32 * mask_KW.shape[1], np.bool_)
        bits[: len(allowed_V)] = allowed_V
        mask_KW[row] = np.packbits(bits, bitorder="little").view(np.int32)

    def rollback(self, count: int) -> None:
        """Take tokens back; the beginning is never taken back."""
        if not 0 <= count < len(self._states):
            raise RuntimeError(f"{count} of {len(self._states) - 1} accepted tokens were to be taken back")
        del self._states[len(self._states) - count :]

    def is_completed(self) -> bool:
        """Return whether the answer may end here."""
        return bool(self._form.is_complete_S[self._states[-1]])

    def fork(self) -> Self:
        """Return an independent matcher at the same place."""
        return type(self)(self._form, list(self._states))


def is_broken(text: str) -> bool:
    """Return whether no form comes of a text."""
    return text.startswith(_BROKEN)


def form_text(number: int, *, is_broken: bool = False) -> str:
    """Return the text of a form."""
    return f"{_BROKEN if is_broken else 'automaton'} {number}"


class AutomatonCompiler:
    """Compiles at once, or one :meth:`tick` later, by the text."""

    def __init__(self, vocab_size: int, end_token_id: int) -> None:
        """Prepare for a vocabulary."""
        self._vocab_size = vocab_size
        self._end_token_id = end_token_id
        self._waiting: list[tuple[GrammarSource, Future[CompiledForm]]] = []

    def submit(self, source: GrammarSource) -> Future[CompiledForm]:
        """Return a future of the form."""
        future: Future[CompiledForm] = Future()
        self._waiting.append((source, future))
        if zlib.crc32(source.text.encode()) % 4:
            self.tick()
        return future

    def tick(self) -> None:
        """Finish everything that was begun."""
        waiting, self._waiting = self._waiting, []
        for source, future in waiting:
            if is_broken(source.text):
                future.set_exception(GrammarError(f"not a usable {source.kind}: {source.text}"))
            else:
                future.set_result(Automaton.from_text(source.text, self._vocab_size, self._end_token_id))

    def close(self) -> None:
        """Cancel what waits."""
        for _, future in self._waiting:
            future.cancel()


def tokens_of(allowed_V: NDArray[np.bool_]) -> list[int]:
    """Return the ids that are allowed, ascending."""
    ids: list[int] = np.flatnonzero(allowed_V).tolist()
    return ids


def unpacked(mask_W: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """Return bool [V], a row of a bitmask read bit by bit."""
    return np.unpackbits(mask_W.view(np.uint8), bitorder="little")[:vocab_size].astype(np.bool_)


def without(allowed_V: NDArray[np.bool_], banned: Sequence[int] | NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return what is left when ids are banned."""
    left_V = allowed_V.copy()
    left_V[np.asarray(banned, np.int64)] = False
    return left_V
