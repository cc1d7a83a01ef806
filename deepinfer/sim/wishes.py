"""What requests want of their tokens (form, bans, stops, allowed ids), and which token must come then.

The rule of a driver names one token for a history. Where a request does not allow it, the logits that are left are
equal, and it depends on seed and temperature which token comes: that is computed here a second time, from parameters
and tokens alone, by none of the engine's code but the generator of its random numbers.

Legend: V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.model.config import ModelConfig
from deepinfer.numerics.philox import uniform_53
from deepinfer.sampling.grammar import StructuredOutputs
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.streams import sibling_seed, stream
from deepinfer.sim.forms import ALPHABET, FORBIDDEN, Automaton, form_text, is_broken, tokens_of, without
from deepinfer.sim.truth import Foretelling, History

_BOUND = -2
"""The place in front of a form where its bound token must come."""


def draw_wishes(draw: random.Random, params: SamplingParams) -> SamplingParams:
    """Return parameters with a form, with fewer tokens, or with neither."""
    letters = list(ALPHABET)
    kind = draw.choice(("form", "form", "form", "letters", "plain"))
    seeded = replace(params, seed=draw.getrandbits(40), stop_token_ids=draw.choice(((), (), (draw.choice(letters),))))
    if kind == "plain":
        return seeded
    min_tokens = min(params.max_tokens, draw.choice((0, 0, 0, 3)))
    banned = tuple(draw.sample(letters, draw.choice((0, 0, 1, 3))))
    wished = replace(seeded, min_tokens=min_tokens, blacklist_token_ids=banned)
    if kind == "letters":
        return replace(wished, allowed_token_ids=(*letters, draw.choice(letters)))
    has_trigger = draw.random() < 0.3
    form = StructuredOutputs(
        regex=form_text(draw.randrange(200), is_broken=draw.random() < 0.05),
        trigger_token_ids=draw.choice(((letters[0],), (letters[1], letters[2]))) if has_trigger else (),
        bound_token_id=draw.choice((None, None, None, 100, letters[3])),
    )
    # Free text that is to meet a trigger has to be short of words; the end of the form is none of them.
    return replace(wished, structured_outputs=form, allowed_token_ids=(1, *letters, 100) if has_trigger else None)


@dataclass(frozen=True, slots=True)
class Wishes:
    """The wishes of one request.

    Attributes:
        params: its parameters.
        form: its form; None without one, or if it is broken.
        always_V: bool [V], the tokens that it allows wherever the form stands and however many there are.
        end_token_id: the end token.
    """

    params: SamplingParams
    form: Automaton | None
    always_V: NDArray[np.bool_]
    end_token_id: int

    @classmethod
    def of(cls, params: SamplingParams, config: ModelConfig) -> Wishes:
        """Read the wishes of a request."""
        wanted = params.structured_outputs
        form = None
        if wanted is not None and not is_broken(wanted.source.text):
            form = Automaton.from_text(wanted.source.text, config.vocab_size, config.eos_token_id)
        always_V = np.ones(config.vocab_size, np.bool_)
        if params.allowed_token_ids is not None:
            always_V &= np.isin(np.arange(config.vocab_size), params.allowed_token_ids)
        return cls(params, form, without(always_V, params.blacklist_token_ids), config.eos_token_id)

    @property
    def cannot_begin(self) -> bool:
        """Whether its form cannot be compiled."""
        return self.params.structured_outputs is not None and self.form is None

    def place(self, outputs: Sequence[int]) -> int | None:
        """Return the state behind some outputs: None in free text and behind the end, -2 before the bound token."""
        wanted = self.params.structured_outputs
        if wanted is None or self.form is None:
            return None
        rest = list(outputs)
        trigger = list(wanted.trigger_token_ids)
        if trigger:
            ends = (end for end in range(len(trigger), len(rest) + 1) if rest[end - len(trigger) : end] == trigger)
            first = next(ends, None)
            if first is None:
                return None
            rest = rest[first:]
        if wanted.bound_token_id is not None:
            if not rest:
                return _BOUND
            rest = rest[1:]
        state = 0
        for token_id in rest:
            if token_id == self.end_token_id:
                return None
            state = int(self.form.next_SV[state, token_id])
        return state

    def choices(self, outputs: Sequence[int]) -> NDArray[np.bool_]:
        """Return bool [V], the tokens that may follow some outputs."""
        wanted, allowed_V = self.params.structured_outputs, self.always_V
        place = self.place(outputs)
        if place == _BOUND and wanted is not None:
            allowed_V = allowed_V & (np.arange(len(allowed_V)) == wanted.bound_token_id)
        elif place is not None and self.form is not None:
            allowed_V = allowed_V & (self.form.next_SV[place] != FORBIDDEN)
        return without(allowed_V, self.ends) if len(outputs) < self.params.min_tokens else allowed_V

    @property
    def ends(self) -> list[int]:
        """The tokens that end the answer."""
        return [*self.params.stop_token_ids, *([] if self.params.ignore_eos else [self.end_token_id])]

    def stands_at_an_end(self, outputs: Sequence[int]) -> bool:
        """Return whether the form would let the answer end behind some outputs."""
        place = self.place(outputs)
        return place is not None and place >= 0 and self.form is not None and bool(self.form.is_complete_S[place])


Substitute = Callable[[int, Sequence[int], int, SamplingParams, int], int | None]
"""Takes the token of the rule, the allowed ids, the token's index, the parameters and the sibling; returns the token
that comes instead, None if nobody can know it."""


def by_hash(token_id: int, allowed: Sequence[int], index: int, params: SamplingParams, sibling: int) -> int:  # noqa: ARG001
    """Return the token of a shadow, which knows no sampling."""
    return allowed[token_id % len(allowed)]


def by_draw(token_id: int, allowed: Sequence[int], index: int, params: SamplingParams, sibling: int) -> int:  # noqa: ARG001
    """Return the token that is drawn from equal logits."""
    if params.temperature == 0 or params.seed is None:
        return allowed[0]
    u = float(uniform_53(torch.tensor([sibling_seed(params.seed, sibling)]), torch.tensor([stream(index)])))
    return allowed[min(int(u * len(allowed)), len(allowed) - 1)]


class Foreteller:
    """Says which token must come for requests with wishes."""

    def __init__(self, foretelling: Foretelling, config: ModelConfig, substitute: Substitute) -> None:
        """Begin without requests."""
        self._foretelling = foretelling
        self._config = config
        self._substitute = substitute
        self._wishes: dict[str, Wishes] = {}

    def learn(self, request_id: str, params: SamplingParams) -> Wishes:
        """Take note of a request."""
        self._wishes[request_id] = wishes = Wishes.of(params, self._config)
        return wishes

    def empty_history(self) -> History:
        """Return an empty history."""
        return self._foretelling.history(self._config)

    def next_token(self, sequence_id: str, history: History, outputs: Sequence[int], index: int) -> int | None:
        """Return the token that must follow a history of ``index`` tokens; None if none may, or none can be known."""
        request_id, _, sibling = sequence_id.partition("/")
        expected = history.next_token()
        wishes = self._wishes[request_id]
        allowed_V = wishes.choices(outputs)
        if allowed_V[expected]:
            return expected
        allowed = tokens_of(allowed_V)
        return self._substitute(expected, allowed, index, wishes.params, int(sibling or 0)) if allowed else None

    def tokens(self, sequence_id: str, ids: Sequence[int], num_prompt_tokens: int, count: int) -> list[int]:
        """Return the ``count`` tokens that must follow some ids; 0 where none can."""
        history = self.empty_history()
        history.extend(ids)
        outputs = list(ids[num_prompt_tokens:])
        found: list[int] = []
        while len(found) < count:
            token_id = self.next_token(sequence_id, history, outputs, len(ids) + len(found))
            if token_id is None:
                break
            history.extend([token_id])
            outputs.append(token_id)
            found.append(token_id)
        return [*found, *[0] * (count - len(found))]
