"""What a request's tokens ought to be, told by the oracle driver without any cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self, cast

from deepinfer.accelerator import AcceleratorDriver, registry
from deepinfer.model.config import ModelConfig


class History(Protocol):
    """A request's tokens so far, and the token that must follow."""

    def extend(self, ids: Sequence[int]) -> None:
        """Append tokens."""

    def next_token(self) -> int:
        """Return the token that follows."""

    def copy(self) -> Self:
        """Return an independent history that continues from here."""


class Foretelling(Protocol):
    """Somebody who can say which tokens must come, from the history alone."""

    def history(self, config: ModelConfig) -> History:
        """Return an empty history of a request of this model."""


def make_oracle(end_one_in: int) -> tuple[AcceleratorDriver, Foretelling]:
    """Return the oracle driver, as a driver and as one who foretells; ``end_one_in`` is its rate of end tokens.

    The driver is found by its name: the engine's rooms import no driver.
    """
    driver = registry.load("oracle")(end_one_in=end_one_in)  # type: ignore[call-arg]  # more than the contract asks
    return driver, cast("Foretelling", driver)
