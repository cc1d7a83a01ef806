"""StructuredOutputs: the form that an answer must have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from deepinfer.sampling import conversion
from deepinfer.sampling.checks import id_problems, length_problems
from deepinfer.sampling.limits import SamplingLimits

GrammarKind = Literal["json_schema", "regex", "ebnf"]
KINDS: tuple[GrammarKind, ...] = ("json_schema", "regex", "ebnf")


class GrammarSource(NamedTuple):
    """What is compiled; equal sources share one compiled grammar."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The form that an answer must have; exactly one of the first three is given.

    Without a trigger the whole answer has the form. With one, the answer is free text until the trigger's tokens have
    been emitted in a row, and has the form from then on. Once the form is complete only an end token may follow, where
    the form allows no continuation.

    Attributes:
        json_schema: a JSON schema, as text or as a mapping (stored as text); ``"{}"`` means any JSON.
        regex: a regular expression that the whole text matches.
        ebnf: a grammar in xgrammar's EBNF with a rule named ``root``.
        trigger_token_ids: tokens whose appearance in a row begins the form.
        bound_token_id: emitted once, in front of the form, whatever the model says; it is not part of the form.
    """

    json_schema: str | Mapping[str, object] | None = None
    regex: str | None = None
    ebnf: str | None = None
    trigger_token_ids: Sequence[int] = ()
    bound_token_id: int | None = None

    def __post_init__(self) -> None:
        """Bring every value to its stored form, or raise one TypeError about all that have none."""
        wrong: list[str] = []
        if isinstance(self.json_schema, Mapping):
            try:
                object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
            except (TypeError, ValueError, RecursionError) as error:
                wrong.append(f"json_schema: not expressible as JSON ({error})")
        wrong += [
            f"{kind}: {getattr(self, kind)!r:.80} is not text"
            for kind in KINDS
            if not isinstance(getattr(self, kind), (str, Mapping, type(None)))
        ]
        for name, convert in (
            ("trigger_token_ids", conversion.integers),
            ("bound_token_id", conversion.optional(conversion.integer)),
        ):
            try:
                object.__setattr__(self, name, convert(getattr(self, name)))
            except TypeError as error:
                wrong.append(f"{name}: {error}")
        if wrong:
            raise TypeError("StructuredOutputs: " + "; ".join(wrong))

    @property
    def source(self) -> GrammarSource:
        """What is to be compiled.

        Raises:
            ValueError: there is not exactly one form; :meth:`problems` says so in words.
        """
        (given,) = self._given()
        return given

    def problems(self, vocab_size: int, limits: SamplingLimits) -> list[str]:
        """Return every reason to refuse a request with this form, in words."""
        given = self._given()
        problems = []
        if len(given) != 1:
            found = " and ".join(source.kind for source in given) or "none"
            problems.append(f"structured_outputs has {found}; give exactly one of {', '.join(KINDS)}")
        problems += [
            f"structured_outputs.{source.kind} has {len(source.text)} characters; the limit is "
            f"{limits.grammar_characters}"
            for source in given
            if len(source.text) > limits.grammar_characters
        ]
        problems += [
            f"structured_outputs.{source.kind} has a lone surrogate, which no encoding can express"
            for source in given
            if any("\ud800" <= character <= "\udfff" for character in source.text)
        ]
        trigger = "structured_outputs.trigger_token_ids"
        problems += length_problems(trigger, len(self.trigger_token_ids), limits.trigger_token_ids)
        problems += id_problems(trigger, self.trigger_token_ids, vocab_size)
        if self.bound_token_id is not None:
            problems += id_problems("structured_outputs.bound_token_id", [self.bound_token_id], vocab_size)
        return problems

    def _given(self) -> list[GrammarSource]:
        texts = ((kind, getattr(self, kind)) for kind in KINDS)
        return [GrammarSource(kind, text) for kind, text in texts if text is not None]


def structured_outputs(value: object) -> StructuredOutputs | None:
    """Return a form, or None; a mapping of its fields is one too."""
    if value is None or isinstance(value, StructuredOutputs):
        return value
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return StructuredOutputs(**value)
    raise TypeError(f"{value!r:.80} is no StructuredOutputs")
