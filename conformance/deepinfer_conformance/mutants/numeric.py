"""Mutants of values: one element off by twice its bound, or one bit where nothing may differ."""

from __future__ import annotations

import dataclasses
import math

import torch

from deepinfer_conformance.bench import Bench, Effects
from deepinfer_conformance.bounds import bounds_of
from deepinfer_conformance.case import Case
from deepinfer_conformance.checks.ordering import routed_weights
from deepinfer_conformance.data.call import OpCall
from deepinfer_conformance.data.layouts import same_bits
from deepinfer_conformance.drivers import Calls, Fault, FaultKind

_STRUCK_ARGUMENTS = {
    "codec.store_window": ("records_Tb", FaultKind.BIT),
    "codec.store_entries": ("x_TC", FaultKind.VALUE),
    "codec.store_index_keys": ("x_TC", FaultKind.VALUE),
    "sampling.adjust": ("adjustments", FaultKind.STALE),
    "moves.copy": ("source_n", FaultKind.STALE),
    "moves.zero": ("target_n", FaultKind.STALE),
    "moves.restore": ("data_nb", FaultKind.BIT),
}
"""Ops that only write: what is struck is what they write."""


def value_faults(bench: Bench, case: Case) -> list[Fault]:
    """Return one fault per part of the result that can be struck; none where a case has nothing to strike (no rows)."""
    call = case.inputs()
    if case.op in _STRUCK_ARGUMENTS:
        name, kind = _STRUCK_ARGUMENTS[case.op]
        found = call.arguments[name]
        empty = isinstance(found, torch.Tensor) and found.numel() == 0
        if kind is FaultKind.STALE:
            return [Fault(op=case.op, kind=kind)] if _writes_something(bench, case, call) else []
        return (
            []
            if empty
            else [Fault(op=case.op, kind=kind, part=name, element=_first_stored(call), row=None, amount=8.0)]
        )
    exact = bench.yardstick(call, case.options)
    peer = bench.peer(call, case.options)
    limits = dict(bounds_of(call, case.options, exact))
    if case.op == "experts.route":
        limits["result.weights_Tk"] = routed_weights(call, case.options, exact["result.experts_Tk"])[1]
    return [
        fault
        for part in peer
        if part.startswith("result")
        for fault in _part_faults(case.op, part, peer, exact, limits.get(part))
    ]


def _writes_something(bench: Bench, case: Case, call: OpCall) -> bool:
    written = bench.peer(call, case.options)
    return any(
        not bool(same_bits(tensor, call.tensor(part.removeprefix("argument."))).all())
        for part, tensor in written.items()
        if part.startswith("argument.")
    )


def _first_stored(call: OpCall) -> int:
    """Return a flat element of the first row that is stored."""
    if "slot_T" not in call.arguments:
        return 0
    stored = (call.tensor("slot_T") >= 0).nonzero()
    width = call.tensor("records_Tb" if "records_Tb" in call.arguments else "x_TC").shape[1]
    return int(stored[0]) * width if len(stored) else 0


def _part_faults(op: str, part: str, peer: Effects, exact: Effects, limit: torch.Tensor | None) -> list[Fault]:
    own = peer[part]
    if own.numel() == 0:
        return []
    if limit is None or not bool((limit > 0).any()):
        element = _sound_element(own, torch.ones(own.shape, dtype=torch.bool))
        kind = FaultKind.VALUE if own.dtype == torch.bool else FaultKind.BIT
        return [Fault(op=op, kind=kind, part=part, element=element)] if element is not None else []
    usable = limit.isfinite() & (limit > 0) & exact[part].to(torch.float64).isfinite()
    element = _sound_element(own, usable)
    if element is None:
        return []
    off = 2 * float(limit.flatten()[element])
    value, truth = float(own.flatten()[element]), float(exact[part].flatten()[element])
    amount = math.copysign(off + abs(value - truth), value if value else 1.0)
    if own.dtype == torch.bfloat16:  # what is added must survive the rounding of the sum
        amount = math.copysign(max(abs(amount), 2.0**-6 * abs(value)), amount)
    if not own.dtype.is_floating_point:
        amount = float(math.ceil(off) + 1)
    return [Fault(op=op, kind=FaultKind.VALUE, part=part, element=element, amount=amount)]


def _sound_element(own: torch.Tensor, usable: torch.Tensor) -> int | None:
    """Return the element of largest size among the usable ones: where a bound is widest in absolute terms."""
    sound = usable.flatten()
    if own.dtype.is_floating_point:
        sound = sound & own.flatten().isfinite()
    if not bool(sound.any()):
        return None
    size = own.flatten().to(torch.float64).abs().masked_fill(~sound, -1.0)
    return int(size.argmax())


def late_bit(bench: Bench, case: Case) -> list[Fault]:
    """Return a fault that flips one bit of one row from the second call on: what invariance checks compare."""
    if case.op in _STRUCK_ARGUMENTS:
        return [dataclasses.replace(fault, calls=Calls(first=2)) for fault in value_faults(bench, case)]
    peer = bench.peer(case.inputs(), case.options)
    for part, own in peer.items():
        if part.startswith("result") and own.numel():
            first_row = own[0] if own.dim() else own
            sound = _sound_element(first_row, torch.ones(first_row.shape, dtype=torch.bool))
            if sound is not None:
                return [Fault(op=case.op, kind=FaultKind.BIT, calls=Calls(first=2), part=part, row=0, element=sound)]
    return []
