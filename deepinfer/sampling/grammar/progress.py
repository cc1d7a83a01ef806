"""How far one answer has come in its form: the allowed next tokens, moved on by committed tokens only.

Legend: W words of a bitmask (32 tokens each), K drafts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from deepinfer.sampling.grammar.library import GrammarError
from deepinfer.sampling.grammar.matching import CompiledForm
from deepinfer.sampling.grammar.specification import StructuredOutputs

_ALL = np.int32(-1)

ALLOWANCE_S = 5.0
"""Seconds of computing that following a form may take from an answer's beginning to its end, plus, per token:"""
ALLOWANCE_PER_TOKEN_S = 0.005


class Phase(Enum):
    """Where an answer stands."""

    FREE = "free"
    BOUND = "bound"
    FORM = "form"
    ENDED = "ended"


class GrammarProgress:
    """One answer's place in its form.

    A preemption does not touch it: it depends on the committed tokens alone.

    Following an ambiguous form (``root ::= "a" | root root``) takes longer with every token, and the steps of everybody
    wait for it; the computing is measured, and an answer that needs too much of it ends.
    """

    def __init__(self, form: CompiledForm, wanted: StructuredOutputs, end_token_ids: Sequence[int]) -> None:
        """Stand at the beginning of an answer.

        Args:
            form: the compiled form.
            wanted: what the request asked for.
            end_token_ids: the model's end tokens.
        """
        self._wanted = wanted
        self._end_token_ids = frozenset(end_token_ids)
        self._matcher = form.matcher()
        self._spent_s = 0.0
        self._allowed_s = ALLOWANCE_S
        self._recent: tuple[int, ...] = ()
        self._phase = Phase.FREE if wanted.trigger_token_ids else self._form_begins()

    @property
    def phase(self) -> Phase:
        """Where the answer stands."""
        return self._phase

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here as far as its form is concerned."""
        return self._phase is Phase.ENDED or (self._phase is Phase.FORM and bool(self._matcher.is_completed()))

    def copy(self) -> GrammarProgress:
        """Return an independent progress at the same place, for a fork of the answer."""
        twin = object.__new__(GrammarProgress)
        twin._wanted, twin._end_token_ids = self._wanted, self._end_token_ids
        twin._matcher = self._matcher.fork()
        twin._recent, twin._phase = self._recent, self._phase
        twin._spent_s, twin._allowed_s = self._spent_s, self._allowed_s
        return twin

    def commit(self, token_id: int) -> None:
        """Move on by one emitted token.

        Raises:
            GrammarError: the form does not allow the token here, or takes too long to follow.
        """
        kind = self._wanted.source.kind
        # Of this thread: a busy machine takes nothing from the allowance.
        began_s = time.thread_time()
        if not self._advance(token_id):
            raise GrammarError(f"token {token_id} was emitted where the form ({kind}) forbids it")
        self._spent_s += time.thread_time() - began_s
        self._allowed_s += ALLOWANCE_PER_TOKEN_S
        if self._spent_s > self._allowed_s:
            raise GrammarError(
                f"following the {kind} has taken {self._spent_s:.1f} s of computing, and takes longer with each token; "
                "write it so that a text can be read in one way only"
            )

    def fill(self, mask_KW: NDArray[np.int32], drafts: Sequence[int] = ()) -> None:
        """Write the allowed tokens of the next position and of those behind each draft.

        The progress itself does not move. Behind a draft that the form forbids everything is allowed: that draft has
        no probability, so nothing behind it is ever emitted.

        Args:
            mask_KW: int32 [1 + len(drafts), W], bit t set where token t is allowed.
            drafts: the drafted tokens, in order.
        """
        began_s = time.thread_time()
        recent, phase = self._recent, self._phase
        accepted = 0
        mask_KW[:] = _ALL
        self._fill_row(mask_KW, 0)
        for row, draft in enumerate(drafts, start=1):
            in_form = self._phase is Phase.FORM
            # Not asked about a token that it forbids, the library does not complain about it on the standard error.
            if (in_form and not _is_set(mask_KW[row - 1], draft)) or not self._advance(draft):
                break
            accepted += in_form
            self._fill_row(mask_KW, row)
        if accepted:
            self._matcher.rollback(accepted)
        self._recent, self._phase = recent, phase
        self._spent_s += time.thread_time() - began_s

    def _fill_row(self, mask_KW: NDArray[np.int32], row: int) -> None:
        if self._phase is Phase.FORM:
            self._matcher.fill_next_token_bitmask(mask_KW, row)
        elif self._phase is Phase.BOUND and self._wanted.bound_token_id is not None:
            word, bit = divmod(self._wanted.bound_token_id, 32)
            mask_KW[row] = 0
            mask_KW[row, word] = np.array(1 << bit, np.uint32).view(np.int32)

    def _advance(self, token_id: int) -> bool:
        if self._phase is Phase.FREE:
            trigger = tuple(self._wanted.trigger_token_ids)
            self._recent = (*self._recent, token_id)[-len(trigger) :]
            if self._recent == trigger:
                self._phase = self._form_begins()
            return True
        if self._phase is Phase.BOUND:
            self._phase = Phase.FORM
            return token_id == self._wanted.bound_token_id
        if self._phase is Phase.FORM:
            if not self._matcher.accept_token(token_id):
                return False
            if token_id in self._end_token_ids:
                self._phase = Phase.ENDED
        return True

    def _form_begins(self) -> Phase:
        return Phase.FORM if self._wanted.bound_token_id is None else Phase.BOUND


def _is_set(mask_W: NDArray[np.int32], token_id: int) -> bool:
    return bool(mask_W[token_id >> 5] >> (token_id & 31) & 1)
