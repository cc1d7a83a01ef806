"""What an answer needs to follow a form: xgrammar's names, so that its matchers are used as they are.

Shapes: K rows, W words of a bitmask (32 tokens each).
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from deepinfer.sampling.grammar.specification import GrammarSource


class Matcher(Protocol):
    """One place in a form. What it raises as RuntimeError ends its answer alone."""

    def accept_token(self, token_id: int) -> bool:
        """Move on; False, and nothing happens, where the form does not allow the token."""

    def fill_next_token_bitmask(self, mask_KW: NDArray[np.int32], row: int, /) -> object:
        """Write the tokens that may come next into a row."""

    def rollback(self, count: int) -> None:
        """Take the last accepted tokens back."""

    def is_completed(self) -> bool:
        """Return whether the answer may end here."""

    def fork(self) -> Self:
        """Return an independent matcher at the same place."""


class CompiledForm(Protocol):
    """A form that is ready to be followed, by any number of answers."""

    def matcher(self) -> Matcher:
        """Return a place at its beginning."""


class FormCompiler(Protocol):
    """Compiles forms outside the step loop."""

    def submit(self, source: GrammarSource) -> Future[CompiledForm]:
        """Return a future of the form; it raises GrammarError with the reason if there is none."""

    def close(self) -> None:
        """End what the compiler has started."""
