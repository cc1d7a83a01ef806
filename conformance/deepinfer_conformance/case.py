"""A case: one check of one subject, as data that can be listed, run, hashed and replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from deepinfer.accelerator import OpOptions, Repeatability
from deepinfer_conformance.data.call import OpCall
from deepinfer_conformance.outcomes import Finding, Level

if TYPE_CHECKING:
    from deepinfer_conformance.bench import Bench

Profile = Literal["quick", "full"]
PROFILES: tuple[Profile, ...] = ("quick", "full")

Law = Callable[["Bench", "Case"], Sequence[Finding]]
"""What a check does: run the driver on the bench and say what was found. It raises what the driver raises."""


@dataclass(frozen=True, slots=True)
class Case:
    """One case.

    Attributes:
        id: "LEVEL/op/check/name/options"; ``-`` stands for the op of a check of the whole driver.
        level: of the check.
        check: name of the check; a mutant is registered for each.
        op: "group.op", or "".
        options: how the ops are to compute.
        seed: of the run.
        law: what is checked.
        build: makes the inputs; None for checks without any. Called again whenever fresh inputs are needed.
        needs: the repeatability that the op must claim for this case to apply.
        extents: sizes that a driver may bound in ``OpCapability.largest``.
        profile: "quick" cases belong to both profiles.
        timeout_s: after this long the case counts as hanging.
        facts: what the law needs to know besides the inputs.
    """

    id: str
    level: Level
    check: str
    op: str
    options: OpOptions
    seed: int
    law: Law
    build: Callable[[], OpCall] | None = None
    needs: Repeatability = Repeatability.NONE
    extents: Mapping[str, int] = field(default_factory=dict)
    profile: Profile = "quick"
    timeout_s: float = 60.0
    facts: Mapping[str, object] = field(default_factory=dict)

    def inputs(self) -> OpCall:
        """Return fresh inputs; a case without inputs has none to give."""
        if self.build is None:
            raise TypeError(f"case {self.id!r} has no inputs")
        return self.build()


@dataclass(frozen=True, slots=True)
class Specimen:
    """Inputs of one op that several checks use.

    Attributes:
        op: "group.op".
        name: what is special about it; part of the case's id.
        build: makes the inputs for one dtype, numerics and cache format.
        options: for which options it is run.
        extents: see :class:`Case`.
        full: belongs to the full profile only.
        exact: small integers throughout, so that sums are exact in any order and ties are real ties.
        by_rows: its rows are independent: it also serves the row-invariance checks.
    """

    op: str
    name: str
    build: Callable[[OpOptions], OpCall]
    options: tuple[OpOptions, ...]
    extents: Mapping[str, int] = field(default_factory=dict)
    full: bool = False
    exact: bool = False
    by_rows: bool = False


def options_label(options: OpOptions) -> str:
    """Return the last part of a case id: "bfloat16-served-kvfloat32"; defaults are left out."""
    label = str(options.activation_dtype).removeprefix("torch.")
    if options.numerics != "portable":
        label += f"-{options.numerics}"
    if options.kv_cache_dtype != "released":
        label += f"-kv{options.kv_cache_dtype}"
    return label


def case_id(level: Level, op: str, check: str, name: str, options: OpOptions | None = None) -> str:
    """Return the identifier of a case."""
    parts = [level.name, op or "-", check, name]
    if options is not None:
        parts.append(options_label(options))
    return "/".join(part for part in parts if part)
