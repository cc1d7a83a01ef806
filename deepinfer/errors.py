"""Typed errors of DeepInfer: each says what was asked, what is there, and what to do."""

from __future__ import annotations

from collections.abc import Iterable


class DeepInferError(Exception):
    """Base of every error that DeepInfer raises on purpose."""


class ProblemsError(DeepInferError):
    """Several problems found in one look, reported together so that one correction round is enough.

    Attributes:
        what: the thing that was refused, for example ``"config.json"``.
        problems: one sentence per problem, in the order in which they were found.
    """

    def __init__(self, what: str, problems: Iterable[str]) -> None:
        self.what = what
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        count = len(self.problems)
        super().__init__(f"{what}: {count} problem{'' if count == 1 else 's'}\n{lines}")

    def __reduce__(self) -> tuple[type[ProblemsError], tuple[str, tuple[str, ...]]]:
        """Come out of another process as what went in."""
        return type(self), (self.what, self.problems)


class ConfigurationError(ProblemsError):
    """A model or engine configuration is unknown, contradictory or cannot be served."""


class CheckpointError(ProblemsError):
    """A checkpoint is incomplete, damaged, or does not match its configuration."""


class ArgumentError(ProblemsError):
    """Arguments of a public call are unknown or out of range."""


class TokenizerError(DeepInferError):
    """Text was given where no tokenizer exists, or a tokenizer file cannot be read."""


class DriverLoadError(DeepInferError):
    """An accelerator driver is not installed, is registered twice, or failed while it was imported."""


class UnknownDriverError(DriverLoadError):
    """No installed distribution registers a driver under the name that was asked for."""


class DriverUnavailableError(DeepInferError):
    """A driver is installed but cannot run on this machine; the message lists every reason and remedy."""


class InterfaceVersionError(DriverLoadError):
    """A driver was written for a version of the contract that this core does not speak."""


class PlanError(ProblemsError):
    """The ops that a model needs cannot all be served by the chosen driver and the named fallbacks."""


class OpRefusedError(DeepInferError):
    """An op was called with inputs that its contract, or the driver's declared capability, excludes."""


class DeterminismError(DeepInferError):
    """A repeatability level was asked for that the driver cannot prove on this machine."""


class RankFailedError(DeepInferError):
    """A rank of a group raised, died or fell silent; the group was given up, and with it every request.

    Attributes:
        ranks: their numbers, ascending; empty where it cannot be told.
    """

    def __init__(self, ranks: Iterable[int], why: str) -> None:
        self.ranks = tuple(sorted(ranks))
        self.why = why
        who = f"rank {', '.join(map(str, self.ranks))}" if self.ranks else "a rank that cannot be told"
        super().__init__(f"the ranks were given up because of {who}: {why}")

    def __reduce__(self) -> tuple[type[RankFailedError], tuple[tuple[int, ...], str]]:
        """Come out of another process as what went in."""
        return type(self), (self.ranks, self.why)


class DuplicateRequestError(DeepInferError):
    """A request id is already alive in the engine."""


class InvariantError(DeepInferError):
    """An internal invariant does not hold; this is a fault of DeepInfer, never of the caller."""
