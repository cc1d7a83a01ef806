"""The same traffic in several worlds: whatever is drafted, and whenever steps are planned, answers must not differ.

Every life is checked against the truth as ever. Beside that the records of two lives are laid side by side: this needs
nobody who knows the truth. Verification is coupled, because only then no token may depend on drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from deepinfer.sim.life import LifeReport, live

MOST_DRAFTS = 5

_OWN_ENDS = frozenset({"stop", "length", "grammar_failed"})
"""Reasons that lie in the tokens: both lives must come to them, at the same token."""


class World(NamedTuple):
    """What may differ between two lives.

    Attributes:
        drafts: drafts of a step.
        is_ahead: steps are planned ahead.
    """

    drafts: int
    is_ahead: bool

    def __str__(self) -> str:
        return f"{self.drafts} drafts, {'planned ahead' if self.is_ahead else 'one by one'}"


def worlds_of(seed: int) -> list[World]:
    """Return the worlds that a seed is lived in: without drafts both ways, each number of drafts one way by turns."""
    with_drafts = [World(drafts, (drafts + seed) % 2 == 0) for drafts in range(1, MOST_DRAFTS + 1)]
    return [World(0, is_ahead=False), World(0, is_ahead=True), *with_drafts]


def live_in_worlds(
    seed: int,
    steps: int,
    model: Path | None = None,
    worlds: Sequence[World] | None = None,
    *,
    has_forms: bool | None = None,
) -> list[LifeReport]:
    """Live a seed's traffic in several worlds; the problems of a report tell where it differs from the first one.

    Args:
        seed: what to replay.
        steps: engine steps with traffic.
        model: as for :func:`~deepinfer.sim.life.live`.
        worlds: None for :func:`worlds_of` the seed.
        has_forms: as for :func:`~deepinfer.sim.life.live`.
    """
    reports: list[LifeReport] = []
    for world in worlds or worlds_of(seed):
        report = live(
            seed,
            steps,
            model,
            drafts=world.drafts,
            async_scheduling=world.is_ahead,
            verification="coupled",
            has_forms=has_forms,
            is_short=True,
            script=reports[0].script if reports else None,
        )
        if reports:
            report.problems += differences(reports[0], report)
        report.problems[:] = [f"with {world}: {problem}" for problem in report.problems]
        reports.append(report)
    return reports


def differences(first: LifeReport, other: LifeReport) -> list[str]:
    """Return where the answers of two lives contradict each other.

    What was aborted, lost its memory or was struck by a fault may have come to another length in the other life.
    Children that were forked from other histories are other requests.
    """
    problems = []
    for request_id, ended in first.answers.items():
        twin = other.answers.get(request_id)
        if twin is None or twin.prompt != ended.prompt:
            continue
        for index, ((tokens, reason), (twins, twin_reason)) in enumerate(zip(ended.answers, twin.answers, strict=True)):
            name = f"request {request_id} answer {index}"
            shared = min(len(tokens), len(twins))
            if tokens[:shared] != twins[:shared]:
                place = next(place for place in range(shared) if tokens[place] != twins[place])
                problems.append(f"{name}: output {place} is {twins[place]}, and {tokens[place]} in the first world")
            elif {reason, twin_reason} <= _OWN_ENDS and (len(tokens), reason) != (len(twins), twin_reason):
                problems.append(
                    f"{name}: ended with {twin_reason!r} after {len(twins)} tokens, and with {reason!r} after "
                    f"{len(tokens)} in the first world"
                )
    return problems
