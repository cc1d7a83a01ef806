"""Variables of the vendor's runtime: this module writes them, before the runtime starts, and nothing else does.

`deepinfer.settings` stays the one reader of what the user asks of DeepInfer. What is set here belongs to CANN, HCCL
and torch-npu: they read it once, when they start, so that it must be in place before ``import torch_npu`` (task queue)
and before the first group of ranks (HCCL). A value that the user has set already wins if it keeps the level, and is a
problem, never overwritten, if it breaks it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Final

from deepinfer.accelerator.capabilities import Repeatability
from deepinfer.errors import DeterminismError


@dataclass(frozen=True, slots=True)
class VendorVariable:
    """One variable and what each repeatability level needs of it.

    Attributes:
        name: the variable.
        accepted: per level, from R1 up, the values that keep it; the first is what the driver sets.
        effect: what it does, for the reader of a plan.
    """

    name: str
    accepted: Mapping[Repeatability, tuple[str, ...]]
    effect: str

    def values_for(self, level: Repeatability) -> tuple[str, ...]:
        """Return the accepted values of ``level``, or of R1 for lower levels: the driver never runs below R1."""
        return self.accepted[max(Repeatability.RUN_TO_RUN, min(level, Repeatability.PLACEMENT_INVARIANT))]


_R1, _R2, _R3 = Repeatability.RUN_TO_RUN, Repeatability.BATCH_INVARIANT, Repeatability.PLACEMENT_INVARIANT

VARIABLES: Final = (
    VendorVariable(
        "TASK_QUEUE_ENABLE",
        {_R1: ("1", "0"), _R2: ("1", "0"), _R3: ("1", "0")},
        "operators are launched from a queue of one level; two levels cannot be recorded into graphs",
    ),
    VendorVariable(
        "HCCL_DETERMINISTIC",
        {_R1: ("strict", "true"), _R2: ("strict",), _R3: ("strict",)},
        # Free of charge here: the driver gathers and adds in rank order, it never asks HCCL for a sum.
        "reductions between ranks keep one order; strict: also when the number of elements changes",
    ),
    VendorVariable(
        "LCCL_DETERMINISTIC",
        {_R1: ("1",), _R2: ("1",), _R3: ("1",)},
        "the same for the local communication library",
    ),
)


def problems(level: Repeatability, environ: Mapping[str, str] | None = None) -> list[str]:
    """Return what the environment has set that ``level`` cannot live with, one sentence each."""
    present = os.environ if environ is None else environ
    found = []
    for variable in VARIABLES:
        value = present.get(variable.name, "").strip()
        accepted = variable.values_for(level)
        if value and value not in accepted:
            found.append(
                f"{variable.name}={value!r} breaks R{int(level)} ({variable.effect}); unset it, or set "
                f"{' or '.join(accepted)} before the process starts"
            )
    return found


def apply(level: Repeatability, environ: MutableMapping[str, str] | None = None) -> None:
    """Set every variable that is not set to what ``level`` needs; DeterminismError with every value that breaks it."""
    target = os.environ if environ is None else environ
    found = problems(level, target)
    if found:
        raise DeterminismError(f"driver 'ascend' cannot keep R{int(level)}: {'; '.join(found)}.")
    for variable in VARIABLES:
        if not target.get(variable.name, "").strip():
            target[variable.name] = variable.values_for(level)[0]


def apply_at_start(environ: MutableMapping[str, str] | None = None) -> None:
    """Set what is not set, for the level that every run keeps (R1), and leave what the user has set.

    A value that breaks R1 stays in force here, and is refused by name as soon as a level is demanded.
    """
    target = os.environ if environ is None else environ
    for variable in VARIABLES:
        if not target.get(variable.name, "").strip():
            target[variable.name] = variable.values_for(_R1)[0]


def in_force(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return every variable with its value as it is now; an empty text is one that is not set."""
    present = os.environ if environ is None else environ
    return {variable.name: present.get(variable.name, "") for variable in VARIABLES}


def described(environ: Mapping[str, str] | None = None) -> str:
    """Return the variables with their values as they are now, on one line."""
    return " ".join(f"{name}={value or 'unset'}" for name, value in in_force(environ).items())
