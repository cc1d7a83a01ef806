"""Requests that wait until the form of their answers is compiled; the step loop never waits for a compiler."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from deepinfer.engine.answers import Request
from deepinfer.errors import InvariantError
from deepinfer.model.config import ModelConfig
from deepinfer.sampling.grammar import (
    CompiledForm,
    FormCompiler,
    GrammarCompiler,
    GrammarProgress,
    StructuredOutputs,
)
from deepinfer.sampling.grammar.library import GrammarError
from deepinfer.scheduling.sequence import Sequence as ScheduledSequence
from deepinfer.tokenizer import Tokenizer

CompilerMaker = Callable[[], FormCompiler]
"""Makes the compiler when the first form comes."""


def compiler_of(tokenizer: Tokenizer | None, config: ModelConfig) -> GrammarCompiler:
    """Return a compiler of forms for a model."""
    if tokenizer is None:
        raise InvariantError("a form is to be compiled, but there is no tokenizer; admission refuses such requests")
    return GrammarCompiler(tokenizer, config.vocab_size, [config.eos_token_id])


class Prepared(NamedTuple):
    """A request whose form is settled.

    Attributes:
        request: the request; its answers have their progress.
        sequences: what the scheduler is to be given.
        problem: why there is no form; empty when there is one.
    """

    request: Request
    sequences: Sequence[ScheduledSequence]
    problem: str


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    request: Request
    sequences: Sequence[ScheduledSequence]
    wanted: StructuredOutputs
    compiled: Future[CompiledForm]


class WaitingForms:
    """The requests that wait, in the order of their admission."""

    def __init__(self, make_compiler: CompilerMaker, end_token_ids: Sequence[int]) -> None:
        """Start with none; the compiler is made when the first request comes."""
        self._make_compiler = make_compiler
        self._compiler: FormCompiler | None = None
        self._end_token_ids = tuple(end_token_ids)
        self._held: dict[str, _Held] = {}

    @property
    def request_ids(self) -> list[str]:
        """Ids of the requests that wait."""
        return list(self._held)

    @property
    def sequence_ids(self) -> list[str]:
        """Ids of the sequences that the scheduler does not know yet."""
        return [sequence.request_id for held in self._held.values() for sequence in held.sequences]

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._held

    def hold(self, request: Request, sequences: Sequence[ScheduledSequence], wanted: StructuredOutputs) -> None:
        """Keep a request back until its form is compiled."""
        if self._compiler is None:
            self._compiler = self._make_compiler()
        compiled = self._compiler.submit(wanted.source)
        self._held[request.request_id] = _Held(request, sequences, wanted, compiled)

    def take_prepared(self) -> list[Prepared]:
        """Hand out the requests whose form is settled."""
        settled = [request_id for request_id, held in self._held.items() if held.compiled.done()]
        return [self._prepare(self._held.pop(request_id)) for request_id in settled]

    def wait(self, limit_s: float) -> None:
        """Return when some form is settled, at the latest after ``limit_s`` seconds; at once if none is waited for."""
        waiting = [held.compiled for held in self._held.values()]
        if waiting:
            concurrent.futures.wait(waiting, limit_s, concurrent.futures.FIRST_COMPLETED)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop requests; what is being compiled for them stays in the compiler's cache."""
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def clear(self) -> None:
        """Drop every request."""
        self._held.clear()

    def close(self) -> None:
        """End the compiler."""
        if self._compiler is not None:
            self._compiler.close()
            self._compiler = None

    def _prepare(self, held: _Held) -> Prepared:
        try:
            compiled = held.compiled.result()
            for answer in held.request.answers:
                answer.progress = GrammarProgress(compiled, held.wanted, self._end_token_ids)
        except (GrammarError, RuntimeError, ValueError) as error:  # the library raises the last two
            return Prepared(held.request, held.sequences, f"structured_outputs: {error}")
        return Prepared(held.request, held.sequences, "")
