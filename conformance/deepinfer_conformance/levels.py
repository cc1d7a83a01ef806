"""The ladder: what each level demands as a minimum claim, which checks must pass, and what was reached.

A level is reached if every level below is, its minimum is claimed, all its must-pass checks were run, and nothing that
was claimed has been shown wrong. Optional levels that a driver does not claim are shown as n/a and passed over.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from typing import Any, Final

from deepinfer.accelerator import needed_op_names
from deepinfer_conformance.outcomes import CaseResult, Level, Outcome

NOTHING: Final = "none"
_OPTIONAL: Final = (Level.L3, Level.L4)
_BATCH_INVARIANT: Final = 2


class Standing(StrEnum):
    """Where a driver stands on one level."""

    REACHED = "reached"
    NOT_APPLICABLE = "n/a"
    NOT_CLAIMED = "not claimed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class LevelState:
    """One rung."""

    level: Level
    standing: Standing
    why: str

    def as_json(self) -> dict[str, str]:
        """Return plain values."""
        return {"level": self.level.name, "standing": str(self.standing), "why": self.why}


def must_pass() -> Mapping[Level, tuple[str, ...]]:
    """Return the checks of each level that a complete package must contain; the list is data, frozen by a test."""
    text = resources.files("deepinfer_conformance").joinpath("must_pass.toml").read_text()
    return {Level[name]: tuple(entry["checks"]) for name, entry in tomllib.loads(text).items()}


def ladder(results: Sequence[CaseResult], claims: Mapping[str, Any]) -> tuple[LevelState, ...]:
    """Return the state of every level."""
    return tuple(_state(level, [each for each in results if each.level is level], claims) for level in Level)


def level_reached(states: Sequence[LevelState]) -> str:
    """Return the highest level reached without skipping any, such as "L6", or "none"."""
    reached = NOTHING
    for state in states:
        if state.standing is Standing.REACHED:
            reached = state.level.name
        elif state.standing is not Standing.NOT_APPLICABLE:
            break
    return reached


def _state(level: Level, results: Sequence[CaseResult], claims: Mapping[str, Any]) -> LevelState:
    lacking = minimum_lacking(level, claims)
    ran = {each.check for each in results}
    missing = [check for check in must_pass()[level] if check not in ran]
    broken = [each for each in results if not each.outcome.is_good]
    if broken:
        return LevelState(level, Standing.FAILED, f"{len(broken)} of {len(results)} cases, first {broken[0].id}")
    if level in _OPTIONAL and _is_absent(level, claims):
        why = "one rank: no collective backend is claimed" if level is Level.L3 else "graphs: none"
        return (
            LevelState(level, Standing.NOT_APPLICABLE, why)
            if not missing
            else LevelState(level, Standing.NOT_RUN, _list(missing))
        )
    if lacking:
        return LevelState(level, Standing.NOT_CLAIMED, lacking)
    if missing:
        return LevelState(level, Standing.NOT_RUN, _list(missing))
    if all(each.outcome is Outcome.NOT_CLAIMED for each in results):
        return LevelState(level, Standing.NOT_CLAIMED, "no case of it was claimed: nothing has been shown")
    return LevelState(level, Standing.REACHED, f"{len(results)} case{'' if len(results) == 1 else 's'}")


def minimum_lacking(level: Level, claims: Mapping[str, Any]) -> str:
    """Return what the claims lack for a level; empty when they suffice."""
    ops, fallbacks = claims["ops"], set(claims["declared_fallbacks"])
    if level is Level.L0:
        return "" if ops else "no op is claimed"
    uncovered = [op for op in needed_op_names() if op not in ops and op not in fallbacks]
    if uncovered:
        return f"neither native nor a named fallback: {_list(uncovered)}"
    if level is Level.L1:
        return "" if ops else "no op is claimed"
    weak = [op for op, claim in ops.items() if int(claim["repeatability"][1:]) < _BATCH_INVARIANT]
    return f"below R2: {_list(weak)}" if level is Level.L2 and weak else ""


def _is_absent(level: Level, claims: Mapping[str, Any]) -> bool:
    return not claims["collectives"] if level is Level.L3 else not claims["graphs"]


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"
