"""L1: values against float64, within derived bounds; bytes, integers and copies exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepinfer.accelerator import PreparedWeight, StoredExpert, StoredWeight
from deepinfer_conformance.bench import Bench, Effects, invoke
from deepinfer_conformance.bounds import bounds_of
from deepinfer_conformance.case import Case
from deepinfer_conformance.checks.comparison import bit_finding, bound_finding
from deepinfer_conformance.checks.ordering import routing, selection
from deepinfer_conformance.data.call import OpCall, tensors
from deepinfer_conformance.data.layouts import copied
from deepinfer_conformance.outcomes import Finding

_JUDGES = {"selection.top_entries": selection, "experts.route": routing}


def numerics(bench: Bench, case: Case) -> Sequence[Finding]:
    """Compare every part of a call's result, and everything it wrote, with the float64 yardstick."""
    call = case.inputs()
    got = bench.run(call, case.options)
    exact = bench.yardstick(call, case.options)
    peer = bench.peer(call, case.options)
    judge = _JUDGES.get(case.op)
    if judge is not None:
        return judge(call, case.options, got, exact, peer, is_exact=bool(case.facts.get("exact")))
    return compared(call, case, got, exact, peer)


def compared(call: OpCall, case: Case, got: Effects, exact: Effects, peer: Effects) -> list[Finding]:
    """Return a finding for every part: bounded where a bound exists, bit-exact otherwise."""
    bounds = bounds_of(call, case.options, exact)
    missing = sorted(set(peer) - set(got))
    if missing:
        return [Finding("missing parts", float(len(missing)), 0.0, f"the result has no {', '.join(missing)}")]
    findings = []
    for part, own in peer.items():
        if part in bounds:
            findings.append(bound_finding(part, got[part], exact[part], bounds[part], own))
        else:
            findings.append(bit_finding(part, got[part], exact[part].to(own.dtype)))
    return findings


def prepared(bench: Bench, case: Case) -> Sequence[Finding]:
    """A prepared weight must carry the stored name and say how many bytes it holds."""
    call = case.inputs()
    weight = invoke(bench.groups(bench.driver, case.options), call.op, dict(call.arguments), bench.driver)
    if not isinstance(weight, PreparedWeight):
        return [Finding("is a PreparedWeight", 1.0, 0.0, f"{call.op} returned a {type(weight).__qualname__}")]
    problems = []
    names = _stored_names(call.arguments)
    if weight.name not in names:
        problems.append(f"name is {weight.name!r}; the stored weights are called {', '.join(names[:3])}")
    if not isinstance(weight.nbytes, int) or weight.nbytes <= 0:
        problems.append(f"nbytes is {weight.nbytes!r}; the weight holds memory")
    return [Finding("wrong attributes", float(len(problems)), 0.0, "; ".join(problems))]


def _stored_names(value: object) -> list[str]:
    """Return the names of all stored weights in a value, however deep."""
    if isinstance(value, StoredWeight):
        return [value.name]
    if isinstance(value, StoredExpert):
        return [value.w1.name, value.w2.name, value.w3.name]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [name for each in value for name in _stored_names(each)]
    return []


def refusal(bench: Bench, case: Case) -> Sequence[Finding]:
    """Ask for what lies outside the claims; whoever computes it all the same has failed, whatever comes out."""
    call = case.inputs()
    if case.op.endswith(("prepare", "prepare_grouped", "prepare_shared")):
        invoke(bench.groups(bench.driver, case.options), call.op, dict(call.arguments), bench.driver)
    else:
        bench.run(call, case.options)
    return [Finding("computed", 0.0, 0.0)]


def read_only(bench: Bench, case: Case) -> Sequence[Finding]:
    """Arguments that the contract does not name as written must come back bit for bit."""
    call = bench.prepared(case.inputs(), case.options)
    arguments = bench.placed(bench.driver, call, case.options)
    before = {name: copied(tensor, torch.device("cpu")) for name, tensor in tensors(arguments)}
    invoke(bench.groups(bench.driver, case.options), call.op, arguments, bench.driver)
    written = {
        name.removeprefix("argument.")
        for name in bench.peer(case.inputs(), case.options)
        if name.startswith("argument.")
    }
    return [
        bit_finding(name, tensor.cpu(), before[name], "after the call ")
        for name, tensor in tensors(arguments)
        if name not in written
    ] or [Finding("arguments", 0.0, 0.0)]


def unwritten(bench: Bench, case: Case) -> Sequence[Finding]:
    """Results must not contain memory that nobody wrote: the same call, with fresh memory full of NaN."""
    call = bench.prepared(case.inputs(), case.options)
    plain = bench.run(call, case.options)
    before = torch.get_deterministic_debug_mode()
    switch: Any = torch.utils.deterministic
    filled = switch.fill_uninitialized_memory
    try:
        # With deterministic algorithms on, torch fills what it allocates with NaN, or the largest integer.
        switch.fill_uninitialized_memory = True
        torch.set_deterministic_debug_mode("warn")
        poisoned = bench.run(call, case.options)
    finally:
        torch.set_deterministic_debug_mode(before)
        switch.fill_uninitialized_memory = filled
    # Where no input holds NaN, none can be meant: fresh memory of the plain call may hold one by chance.
    may_be_nan = any(tensor.is_floating_point() and bool(tensor.isnan().any()) for _, tensor in tensors(call.arguments))
    return [_unwritten_finding(part, poisoned[part], plain[part], may_be_nan=may_be_nan) for part in plain]


def _unwritten_finding(part: str, poisoned: torch.Tensor, plain: torch.Tensor, *, may_be_nan: bool) -> Finding:
    if poisoned.dtype.is_floating_point:
        fresh = poisoned.isnan() & ~plain.isnan() if may_be_nan else poisoned.isnan()
    elif poisoned.dtype == torch.bool:
        fresh = poisoned != plain
    else:
        fresh = (poisoned != plain) & (poisoned == torch.iinfo(poisoned.dtype).max)
    count = int(fresh.sum())
    detail = f"{part} holds {count} elements of memory that the op never wrote" if count else ""
    return Finding("unwritten elements", float(count), 0.0, detail, part=part)
