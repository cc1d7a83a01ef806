"""The plan: for every op, who computes it, how repeatable it is, and why others were refused.

It is made once, before anything is served, from frozen capabilities. What it cannot serve, it refuses with the whole
list. A fallback to the reference happens only for ops that the user or the driver named.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from deepinfer.accelerator.capabilities import OpCapability, Repeatability
from deepinfer.accelerator.interface import AcceleratorDriver, OpOptions
from deepinfer.accelerator.ops import OP_GROUPS, Feature, OpGroup, Ops, all_op_names, needed_op_names
from deepinfer.errors import PlanError

REFERENCE = "cpu_ref"


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One line of the plan.

    Attributes:
        op: identifier, "group.op".
        driver: name of the driver whose implementation runs.
        provider: "native", a library's name, or "fallback".
        repeatability: level that holds in this plan: R2 and above are kept only where the options demand them.
        note: why the chosen driver's own implementation is not used; empty when it is.
    """

    op: str
    driver: str
    provider: str
    repeatability: Repeatability
    note: str

    def as_json(self) -> dict[str, str]:
        """Return the row with plain values."""
        return {
            "op": self.op,
            "driver": self.driver,
            "provider": self.provider,
            "repeatability": f"R{int(self.repeatability)}",
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole table and the bound ops.

    Attributes:
        driver: name of the chosen driver.
        options: what the ops were built for.
        rows: one per op of the contract, in declared order; ops of a feature that was not asked for and that nobody
            serves are left out.
        ops: the ops, ready to call; what is left out refuses to be called.
        features: what was asked for beyond the text model.
        runtime_variables: of the vendor's runtime, with the values in force; an empty text is one that is not set.
    """

    driver: str
    options: OpOptions
    rows: tuple[PlanRow, ...]
    ops: Ops
    features: tuple[Feature, ...] = ()
    runtime_variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Identifiers of the ops that run on the reference by name."""
        return tuple(row.op for row in self.rows if row.provider == "fallback")

    @property
    def repeatability(self) -> Repeatability:
        """The strongest level that every op keeps."""
        return min(row.repeatability for row in self.rows)

    def as_json(self) -> dict[str, object]:
        """Return the plan with plain values."""
        return {
            "driver": self.driver,
            "dtype": str(self.options.activation_dtype).removeprefix("torch."),
            "numerics": self.options.numerics,
            "kv_cache_dtype": self.options.kv_cache_dtype,
            "batch_invariant": self.options.batch_invariant,
            "repeatability": f"R{int(self.repeatability)}",
            "features": list(self.features),
            "runtime_variables": dict(self.runtime_variables),
            "ops": [row.as_json() for row in self.rows],
        }


def make_plan(
    driver: AcceleratorDriver,
    options: OpOptions,
    *,
    allow_fallback: Iterable[str] = (),
    reference: AcceleratorDriver | None = None,
    features: Collection[Feature] = (),
) -> Plan:
    """Choose an implementation for every op that is needed, or raise PlanError with every reason.

    Ops of a feature that is not asked for are bound where the driver has them or they were named to fall back.

    Args:
        driver: the chosen driver, already known to be available.
        options: how ops are to compute.
        allow_fallback: op identifiers that the user lets run on the reference.
        reference: the cpu_ref driver; needed when anything is to fall back.
        features: what is asked for beyond the text model.
    """
    allowed = frozenset(allow_fallback)
    problems = _unknown_names("DEEPINFER_ALLOW_FALLBACK", allowed)
    declared = frozenset(driver.capabilities().declared_fallbacks)
    problems += _unknown_names(f"declared_fallbacks of driver {driver.name!r}", declared)

    refusals = _refusals(driver, options)
    absent = set(refusals) - set(needed_op_names(features)) - allowed - declared
    falling = set(refusals) - absent
    for group_type in OP_GROUPS:
        for names in group_type.bound_together:
            identifiers = [f"{group_type.group}.{name}" for name in names]
            if falling.intersection(identifiers):
                for identifier in identifiers:
                    refusals.setdefault(identifier, f"shares prepared weights with {_listed(identifiers, identifier)}")
                falling.update(identifiers)
    for identifier in sorted(falling, key=all_op_names().index):
        if identifier not in allowed | declared:
            problems.append(
                f"{identifier}: {refusals[identifier]}. Name it in DEEPINFER_ALLOW_FALLBACK to run it on {REFERENCE}, "
                f"or choose another accelerator{_or_without(identifier)}"
            )
    if falling and reference is None and not problems:
        problems.append(f"{len(falling)} ops fall back to {REFERENCE}, but the reference driver was not given")
    reference_refusals: Mapping[str, str] = {}
    if falling and reference is not None:
        reference = reference.serving(driver.device)
        reference_refusals = _refusals(reference, options)
        problems += [
            f"{identifier}: {REFERENCE} cannot serve it either: {reference_refusals[identifier]}"
            for identifier in sorted(falling)
            if identifier in reference_refusals
        ]
    if problems:
        raise PlanError(f"plan for accelerator {driver.name!r}", problems)

    return _bind(driver, reference, options, refusals, absent, tuple(dict.fromkeys(features)))


def _or_without(identifier: str) -> str:
    feature = next(group.feature for group in OP_GROUPS if group.group == identifier.partition(".")[0])
    return "" if feature is None else f", or run without {feature}"


def _unknown_names(source: str, names: Iterable[str]) -> list[str]:
    known = all_op_names()
    problems = []
    for name in sorted(set(names) - set(known)):
        close = difflib.get_close_matches(name, known, n=2)
        hint = f"; did you mean {' or '.join(close)}?" if close else f"; known ops: {', '.join(known)}"
        problems.append(f"{source} names {name!r}, which is no op of the contract{hint}")
    return problems


def _listed(identifiers: Iterable[str], without: str) -> str:
    return ", ".join(identifier for identifier in identifiers if identifier != without)


def _refusals(driver: AcceleratorDriver, options: OpOptions) -> dict[str, str]:
    """Return, for every op that the driver cannot serve under ``options``, the reason."""
    groups = driver.op_groups(options)
    claims = driver.capabilities().ops
    refusals: dict[str, str] = {}
    for group_type in OP_GROUPS:
        group = groups.get(group_type.group)
        implemented = type(group).implemented() if group is not None else ()
        for name in group_type.op_names():
            identifier = f"{group_type.group}.{name}"
            reason = _refusal(driver, options, claims.get(identifier), implemented=name in implemented)
            if reason:
                refusals[identifier] = reason
    return refusals


def _refusal(driver: AcceleratorDriver, options: OpOptions, claim: OpCapability | None, *, implemented: bool) -> str:
    who = f"driver {driver.name!r} {driver.version}"
    if claim is None:
        return f"{who} implements it but claims no capability for it" if implemented else f"{who} does not implement it"
    if not implemented:
        return f"{who} claims it but does not implement it"
    lacks = []
    if options.activation_dtype not in claim.dtypes:
        have = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in claim.dtypes))
        lacks.append(f"dtype {str(options.activation_dtype).removeprefix('torch.')} (has {have})")
    if options.numerics not in claim.numerics:
        lacks.append(f"numerics {options.numerics!r} (has {', '.join(sorted(claim.numerics))})")
    if options.kv_cache_dtype not in claim.kv_formats:
        lacks.append(f"cache format {options.kv_cache_dtype!r} (has {', '.join(sorted(claim.kv_formats))})")
    if options.batch_invariant and claim.repeatability < Repeatability.BATCH_INVARIANT:
        lacks.append(f"batch invariance R2 (claims R{int(claim.repeatability)})")
    return f"{who} lacks {', '.join(lacks)}" if lacks else ""


def _bind(
    driver: AcceleratorDriver,
    reference: AcceleratorDriver | None,
    options: OpOptions,
    refusals: Mapping[str, str],
    absent: Collection[str],
    features: tuple[Feature, ...],
) -> Plan:
    own = driver.op_groups(options)
    spare = reference.op_groups(options) if reference is not None and refusals else {}
    rows: list[PlanRow] = []
    bound: dict[str, OpGroup] = {}
    for group_type in OP_GROUPS:
        sources: dict[str, OpGroup] = {}
        for name in group_type.op_names():
            identifier = f"{group_type.group}.{name}"
            if identifier in absent:
                continue
            if identifier in refusals and reference is not None:
                claim = reference.capabilities().ops[identifier]
                sources[name] = spare[group_type.group]
                note = refusals[identifier]
                rows.append(PlanRow(identifier, reference.name, "fallback", _in_force(claim, options), note))
            else:
                claim = driver.capabilities().ops[identifier]
                sources[name] = own[group_type.group]
                rows.append(PlanRow(identifier, driver.name, claim.provider, _in_force(claim, options), ""))
        bound[group_type.group] = _compose(group_type, sources)
    # Each value is an instance of the group class that its key names: OP_GROUPS and the fields of Ops are one list.
    ops = Ops(**cast("dict[str, object]", bound))  # type: ignore[arg-type]
    return Plan(driver.name, options, tuple(rows), ops, features, dict(driver.runtime_variables()))


def _in_force(claim: OpCapability, options: OpOptions) -> Repeatability:
    """Return the level that ops built for ``options`` keep: what is claimed, but R2 and above only on demand."""
    return claim.repeatability if options.batch_invariant else min(claim.repeatability, Repeatability.RUN_TO_RUN)


def _compose(group_type: type[OpGroup], sources: Mapping[str, OpGroup]) -> OpGroup:
    """Return one group whose ops come from ``sources``; the driver's own object when all come from it."""
    distinct = {id(source): source for source in sources.values()}
    if len(distinct) == 1 and len(sources) == len(group_type.op_names()):
        return next(iter(distinct.values()))
    members = {name: staticmethod(getattr(source, name)) for name, source in sources.items()}
    composed: OpGroup = type(f"Planned{group_type.__name__}", (group_type,), members)()
    return composed
