"""A step's results on their way to the host: copies that are readable once the step's work has ended.

Legend: R requests, n drafts a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.engine.draft_tally import DraftTally
from deepinfer.sampling.sampler import SampledStep
from deepinfer.sampling.verification import VerifiedRun, VerifiedStep

Value = TypeVar("Value")
ToHost = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class NextDrafts:
    """What a step has drafted for the next one.

    Attributes:
        token_ids_Rn: int64 [R, n], -1 where there is none.
        chances_Rn: float32 [R, n], cumulative chances of acceptance.
    """

    token_ids_Rn: torch.Tensor
    chances_Rn: torch.Tensor


class Results(Protocol):
    """What the host reads of a step, once its work has ended."""

    def runs(self) -> list[VerifiedRun]:
        """Return what each request emits."""

    def next_drafts(self) -> list[list[int]] | None:
        """Return the drafts of each request's next step, placeholders included; None in an engine without drafts."""

    def next_chances(self) -> NDArray[np.float64]:
        """Return the cumulative chances [R, n] of these drafts; n is 0 in an engine without drafts."""


@dataclass(frozen=True, slots=True)
class JudgedDrafts:
    """What the tally of drafts counts of a decode step, once the verdicts are known.

    Attributes:
        tally: of the engine.
        verified_R: int64 [R], drafts that each request verifies.
        chances_Rn: float32 [R, n], the cumulative chances that they were given.
        is_due: False for requests that had ended before they were judged; nothing of them counts.
    """

    tally: DraftTally
    verified_R: torch.Tensor
    chances_Rn: torch.Tensor
    is_due: tuple[bool, ...]

    def count(self, runs: Sequence[VerifiedRun]) -> None:
        """Count the step."""
        accepted_R = np.array([run.accepted for run in runs])
        verified_R = np.where(self.is_due, self.verified_R.cpu().numpy(), 0)
        self.tally.note(verified_R, accepted_R, self.chances_Rn.cpu().numpy())


@dataclass(frozen=True, slots=True)
class Readback:
    """The results of a step as the ops gave them.

    Attributes:
        result: tokens, verdicts and log-probabilities.
        judged: what is counted of the drafts when the runs are read; None where none were verified.
        drafted: what the step has drafted for the next one; None in an engine without drafts.
    """

    result: SampledStep | VerifiedStep
    judged: JudgedDrafts | None = None
    drafted: NextDrafts | None = None

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
        if self.drafted is None:
            return None
        drafts: list[list[int]] = self.drafted.token_ids_Rn.tolist()
        return drafts

    def next_chances(self) -> NDArray[np.float64]:
        """Return the cumulative chances [R, n] of these drafts."""
        if self.drafted is None:
            return np.zeros((0, 0))
        chances_Rn: NDArray[np.float64] = self.drafted.chances_Rn.to(torch.float64).numpy()
        return chances_Rn


def on_host(value: Value, to_host: ToHost) -> Value:
    """Return a dataclass whose tensors, however deep, were replaced by their copies."""
    return _moved(value, to_host)  # type: ignore[no-any-return]


def _moved(value: Any, to_host: ToHost) -> Any:
    if isinstance(value, torch.Tensor):
        return to_host(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _moved(getattr(value, each.name), to_host) for each in fields(value)})
    return value
