"""A step's results on their way to the host: copies that are readable once the step's work has ended.

Legend: R requests, n drafts a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from deepinfer.engine.draft_tally import DraftTally
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
class JudgedDrafts:
    """What the tally of drafts counts of a decode step, once the verdicts are known.

    Attributes:
        tally: of the engine.
        verified_R: int64 [R], drafts that each request verifies.
        chances_Rn: float32 [R, n], the cumulative chances that they were given.
    """

    tally: DraftTally
    verified_R: torch.Tensor
    chances_Rn: torch.Tensor

    def count(self, runs: Sequence[VerifiedRun]) -> None:
        """Count the step."""
        accepted_R = np.array([run.accepted for run in runs])
        self.tally.note(self.verified_R.cpu().numpy(), accepted_R, self.chances_Rn.cpu().numpy())


@dataclass(frozen=True, slots=True)
class Readback:
    """The results of a step as the ops gave them.

    Attributes:
        result: tokens, verdicts and log-probabilities.
        judged: what is counted of the drafts when the runs are read; None where none were verified.
        next_drafts_Rn: int64 [R, n], what the step has drafted for the next one, -1 where there is none; None in an
            engine without drafts.
    """

    result: SampledStep | VerifiedStep
    judged: JudgedDrafts | None = None
    next_drafts_Rn: torch.Tensor | None = None

    def runs(self) -> list[VerifiedRun]:
        """Return what each request emits; to be asked once."""
        if isinstance(self.result, VerifiedStep):
            runs = self.result.read()
            if self.judged is not None:
                self.judged.count(runs)
            return runs
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
