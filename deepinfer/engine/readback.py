"""A step's results on their way to the host: copies that are readable once the step's work has ended.

Legend: R requests, n drafts a request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from deepinfer.sampling.sampler import SampledStep
from deepinfer.sampling.verification import VerifiedRun, VerifiedStep

Value = TypeVar("Value")
ToHost = Callable[[torch.Tensor], torch.Tensor]


class Results(Protocol):
    """What the host reads of a step, once its work has ended."""

    def runs(self) -> list[VerifiedRun]:
        """Return what each request emits."""

    def next_drafts(self) -> list[list[int]] | None:
        """Return the drafts of each request's next step, placeholders included; None in an engine without drafts."""


@dataclass(frozen=True, slots=True)
class Readback:
    """The results of a step as the ops gave them.

    Attributes:
        result: tokens, verdicts and log-probabilities.
        next_drafts_Rn: int64 [R, n], what the step has drafted for the next one, -1 where there is none; None in an
            engine without drafts.
    """

    result: SampledStep | VerifiedStep
    next_drafts_Rn: torch.Tensor | None = None

    def runs(self) -> list[VerifiedRun]:
        """Return what each request emits."""
        if isinstance(self.result, VerifiedStep):
            return self.result.read()
        return [VerifiedRun((row,), 0) for row in self.result.read()]

    def next_drafts(self) -> list[list[int]] | None:
        """Return the drafts of each request's next step, placeholders included."""
        if self.next_drafts_Rn is None:
            return None
        drafts: list[list[int]] = self.next_drafts_Rn.tolist()
        return drafts


def on_host(value: Value, to_host: ToHost) -> Value:
    """Return a dataclass whose tensors, however deep, were replaced by their copies."""
    return _moved(value, to_host)  # type: ignore[no-any-return]


def _moved(value: Any, to_host: ToHost) -> Any:
    if isinstance(value, torch.Tensor):
        return to_host(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _moved(getattr(value, each.name), to_host) for each in fields(value)})
    return value
