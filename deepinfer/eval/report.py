"""What an evaluation says: right answers by task, and what happened inside meanwhile."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from deepinfer.engine.draft_tally import ChanceRange
from deepinfer.engine.outputs import EngineStats
from deepinfer.eval.watching import AttentionShares, ExpertLoad, WatchingDriver


@dataclass(frozen=True, slots=True)
class RowResult:
    """One task at one distance.

    Attributes:
        task: what was asked.
        distance: about how many tokens back the answer stood; 0 where it did not.
        items: how many were asked.
        exact_match: share of answers that were right to the character and ended by themselves; None for running text.
        perplexity: of the answers behind the prompts; None for questions.
    """

    task: str
    distance: int
    items: int
    exact_match: float | None
    perplexity: float | None


@dataclass(frozen=True, slots=True)
class Internals:
    """What happened inside while the questions were answered.

    Attributes:
        verified_by_place: drafts that were verified, by their place among those of a step; empty without drafts.
        accepted_by_place: how many of them were accepted, which takes that all before them were.
        chance_ranges: the same drafts by the chance that the confidence head gave them, ten equal ranges from 0 on.
        attention: where each layer's attention went.
        experts: how often each expert was chosen, layer by layer, then draft stage by draft stage.
    """

    verified_by_place: tuple[int, ...]
    accepted_by_place: tuple[int, ...]
    chance_ranges: tuple[ChanceRange, ...]
    attention: tuple[AttentionShares, ...]
    experts: tuple[ExpertLoad, ...]

    @classmethod
    def of(cls, stats: EngineStats, watched: WatchingDriver) -> Internals:
        """Read what an engine and the driver that watched it have counted."""
        return cls(
            stats.verified_by_place,
            stats.accepted_by_place,
            stats.chance_ranges,
            watched.attention(),
            watched.experts(),
        )

    @property
    def calibration_error(self) -> float:
        """Expected and real acceptance apart, weighted by the drafts of each range of chances; 0 without drafts."""
        verified = sum(each.verified for each in self.chance_ranges)
        apart = sum(abs(each.expected - each.accepted) for each in self.chance_ranges)
        return apart / verified if verified else 0.0


@dataclass(frozen=True, slots=True)
class EvalReport:
    """What was measured, and on what.

    Attributes:
        settings: driver, numerics and whatever else the caller wants to keep beside the results.
        results: one entry per task and distance.
        internals: what happened inside; None where nobody watched.
    """

    settings: dict[str, object]
    results: tuple[RowResult, ...]
    internals: Internals | None = None

    def save(self, file: Path) -> None:
        """Write the report as JSON."""
        said: dict[str, object] = {"settings": self.settings, "results": [asdict(row) for row in self.results]}
        if self.internals is not None:
            said["internals"] = {**asdict(self.internals), "calibration_error": self.internals.calibration_error}
        file.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
