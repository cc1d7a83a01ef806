# ruff: noqa: ARG001, ARG005 - all makers share one signature
"""For every check a driver that it must catch. A check without a mutant does not land: a test walks all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from deepinfer.accelerator import (
    AcceleratorDriver,
    Event,
    Graph,
    ImmediateStream,
    LinearShape,
    MemoryInfo,
    PreparedWeight,
    Repeatability,
    Stream,
)
from deepinfer.accelerator.wrapped import OpFunction
from deepinfer.errors import DeterminismError
from deepinfer_conformance.bench import Bench, parameters_of
from deepinfer_conformance.case import Case
from deepinfer_conformance.data.call import mapped, tensors
from deepinfer_conformance.drivers import Calls, Fault, FaultKind, FaultyDriver
from deepinfer_conformance.mutants import rank_mutants
from deepinfer_conformance.mutants.hosts import GraphDriver, GraphlessDriver, RecordedGraph
from deepinfer_conformance.mutants.numeric import late_bit, value_faults
from deepinfer_conformance.mutants.rewiring import RewiredDriver

Make = Callable[[Bench, Case], Sequence[AcceleratorDriver]]
"""Makes the mutants of one case around the bench's driver; none where the case has nothing that could be wrong."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """What a check must catch.

    Attributes:
        says: the mistake, in words.
        make: makes drivers with it.
        host: the driver on which the check can be shown, where cpu_ref does not claim what it needs.
    """

    says: str
    make: Make
    host: Callable[[], AcceleratorDriver] | None = None


# --- faults by data ------------------------------------------------------------------------------------------------


def _faulty(faults: Callable[[Bench, Case], Sequence[Fault]]) -> Make:
    def make(bench: Bench, case: Case) -> Sequence[AcceleratorDriver]:
        return [FaultyDriver.wrapping(bench.driver, [fault]) for fault in faults(bench, case)]

    return make


def _always(*faults: Fault) -> Make:
    return lambda bench, case: [FaultyDriver.wrapping(bench.driver, faults)]


def _late_part(bench: Bench, case: Case) -> Sequence[AcceleratorDriver]:
    part = {"experts.local": "experts.combine", "sampling.sample": "sampling.draw"}[case.op]
    return [FaultyDriver.wrapping(bench.driver, [Fault(op=part, kind=FaultKind.BIT, element=0)])]


# --- rewired ops ---------------------------------------------------------------------------------------------------


def _op(rewire: Callable[[Case, OpFunction], OpFunction]) -> Make:
    return lambda bench, case: [RewiredDriver(bench.driver, {case.op: partial(rewire, case)})]


def _writes_an_input(case: Case, original: OpFunction) -> OpFunction:
    names = parameters_of(case.op)

    def call(*args: object, **keywords: object) -> object:
        result = original(*args, **keywords)
        given = {**dict(zip(names, args, strict=False)), **keywords}
        for name, tensor in tensors(given):
            if tensor.numel() and name not in _WRITTEN and not name.startswith(("cache.", "pending.")):
                tensor.view(-1)[0] = tensor.view(-1)[0] + 1 if tensor.dtype != torch.bool else ~tensor.view(-1)[0]
                break
        return result

    return call


_WRITTEN: Final = ("pool_Nb", "logits_BV")


def _unwritten(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory that nobody wrote: full of torch's poison where that is switched on, else zeros.

    What a plain call finds is chance. It may be what a poisoned call has left there, and then no check can see it.
    """
    fresh = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return fresh if torch.are_deterministic_algorithms_enabled() else fresh.zero_()


def _leaves_memory_unwritten(case: Case, original: OpFunction) -> OpFunction:
    def spoilt(tensor: torch.Tensor, _: str) -> torch.Tensor:
        spoilt = _unwritten(tensor)
        spoilt.view(-1)[1:] = tensor.reshape(-1)[1:]
        return spoilt

    def call(*args: object, **keywords: object) -> object:
        result = original(*args, **keywords)
        if result is not None:
            return mapped(result, spoilt)
        # Ops that return nothing: a temporary of theirs reaches what they write.
        given = {**dict(zip(parameters_of(case.op), args, strict=False)), **keywords}
        for name, tensor in tensors(given):
            if (
                name in ("pool_Nb", "logits_BV", "cache.bytes_ZRb", "cache.bytes_NEb", "cache.bytes_Nb")
                and tensor.numel()
            ):
                tensor[0] = _unwritten(tensor[0])
        return result

    return call


def _forgets_bytes(case: Case, original: OpFunction) -> OpFunction:
    def call(*args: object, **keywords: object) -> object:
        weight: Any = original(*args, **keywords)
        if isinstance(weight, PreparedWeight):
            weight.nbytes = 0
        return weight

    return call


def _leaves_a_part_behind(bench: Bench, case: Case) -> Sequence[AcceleratorDriver]:
    """Move all tensors of an expert but the last, as if scales were forgotten."""

    def rewire(original: OpFunction) -> OpFunction:
        def call(*args: object, **keywords: object) -> object:
            weight: Any = original(*args, **keywords)
            right = weight.expert_slots
            weight.expert_slots = lambda: tuple(
                dataclasses.replace(slot, tensors=slot.tensors[:-1]) for slot in right()
            )
            return weight

        return call

    return [RewiredDriver(bench.driver, {"experts.prepare": rewire})]


def _computes_what_it_does_not_claim(bench: Bench, case: Case) -> Sequence[AcceleratorDriver]:
    """Serve float16 by way of float32, unasked."""
    plain = dataclasses.replace(case.options, activation_dtype=torch.float32)

    def rewire(original: OpFunction) -> OpFunction:
        def widen(tensor: torch.Tensor, _: str) -> torch.Tensor:
            return tensor.to(torch.float32) if tensor.dtype == torch.float16 else tensor

        return lambda *args, **keywords: original(
            *(mapped(each, widen) for each in args), **{name: mapped(each, widen) for name, each in keywords.items()}
        )

    parts = {"op_groups": lambda options: bench.driver.op_groups(plain)}
    return [RewiredDriver(bench.driver, {case.op: rewire}, parts)]


# --- parts of the driver -------------------------------------------------------------------------------------------


def _part(name: str, replace: Callable[[AcceleratorDriver], Any]) -> Make:
    return lambda bench, case: [RewiredDriver(bench.driver, parts={name: replace(bench.driver)})]


class _UntoldVersion(RewiredDriver):
    version = "0"


def _claims_too_much(driver: AcceleratorDriver) -> Any:
    claims = driver.capabilities()
    ops = {op: claim for op, claim in claims.ops.items() if op != "norm.rms"}
    return lambda: dataclasses.replace(claims, ops=ops)


def _one_buffer(_: AcceleratorDriver) -> Any:
    storage = torch.zeros(4096)

    def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = int(torch.tensor(shape).prod()) if len(shape) else 1
        return storage.view(torch.uint8)[: count * dtype.itemsize].view(dtype).view(tuple(shape))

    return allocate


def _refuses_its_claim(_: AcceleratorDriver) -> Any:
    def set_determinism(level: Repeatability, shapes: Sequence[LinearShape]) -> None:
        if level > Repeatability.NONE:
            raise DeterminismError("no level is proved here")

    return set_determinism


class _NeverDone(Event):
    def done(self) -> bool:
        return False

    def wait(self) -> None:
        return


class _LostEvents(ImmediateStream):
    def record_event(self) -> Event:
        return _NeverDone()


class _StaleGraph(RecordedGraph):
    def replay(self) -> None:
        return


def _stale_graphs(bench: Bench, case: Case) -> Sequence[AcceleratorDriver]:
    def new_graph() -> Graph:
        return _StaleGraph()

    return [RewiredDriver(bench.driver, parts={"new_graph": new_graph})]


def _lost_events(_: AcceleratorDriver) -> Any:
    def new_stream() -> Stream:
        return _LostEvents()

    return new_stream


def _too_much_memory(_: AcceleratorDriver) -> Any:
    return lambda: MemoryInfo(total_bytes=2**30, free_bytes=2**31)


def _ranks(*drivers: type[AcceleratorDriver], least: int = 2) -> Make:
    return lambda bench, case: [each() for each in drivers] if int(str(case.facts["ranks"])) >= least else []


def _blind(bench: Bench, case: Case) -> Sequence[AcceleratorDriver]:
    def rewire(original: OpFunction) -> OpFunction:
        def sparse(query_THC: Any, own_Tb: Any, window: Any, long_range: Any, *rest: Any) -> object:
            return original(query_THC, own_Tb, window, None, *rest)

        return sparse

    return [RewiredDriver(bench.driver, {"attention.sparse": rewire})]


_LATE_BIT = Mutant("one bit of one row flips from the second call on", _faulty(late_bit))
_STALE_STORE = Fault(op="codec.store_window", kind=FaultKind.STALE, calls=Calls(first=60, every=5))

MUTANTS: Final[Mapping[str, Mutant]] = {
    "L0/identity": Mutant("does not tell its version", lambda bench, case: [_UntoldVersion(bench.driver)]),
    "L0/claims": Mutant("implements an op that it does not claim", _part("capabilities", _claims_too_much)),
    "L0/memory": Mutant("has more free memory than memory", _part("memory", _too_much_memory)),
    "L0/allocation": Mutant("hands out the same memory twice", _part("allocate", _one_buffer)),
    "L0/unclaimed": Mutant(
        "gives a graph without claiming graphs", _part("new_graph", lambda _: RecordedGraph), GraphlessDriver
    ),
    "L0/determinism": Mutant("refuses to prove what every op claims", _part("set_determinism", _refuses_its_claim)),
    "L1/numerics": Mutant("one element is off by twice its bound, or by one bit", _faulty(value_faults)),
    "L1/prepared": Mutant("says that a weight holds no bytes", _op(_forgets_bytes)),
    "L1/moved": Mutant("leaves a part of an expert behind", _leaves_a_part_behind),
    "L1/refusal": Mutant("computes in a dtype that it does not claim", _computes_what_it_does_not_claim),
    "L1/read_only": Mutant("writes one element of an input", _op(_writes_an_input)),
    "L1/unwritten": Mutant("returns one element that nobody wrote", _op(_leaves_memory_unwritten)),
    "L2/repetition": _LATE_BIT,
    "L2/batch_size": _LATE_BIT,
    "L2/row_order": _LATE_BIT,
    "L2/neighbours": _LATE_BIT,
    "L2/strides": _LATE_BIT,
    "L2/threads": _LATE_BIT,
    "L2/company": _LATE_BIT,
    "L2/placement": _LATE_BIT,
    "L2/chunking": _LATE_BIT,
    "L2/rows_at_once": _LATE_BIT,
    "L2/step_threads": _LATE_BIT,
    "L2/parts": Mutant("one of the parts differs by a bit", _late_part),
    "L3/all_reduce": Mutant("adds in the opposite order", _ranks(rank_mutants.BackwardsDriver, least=3)),
    "L3/all_gather": Mutant("stacks one rank late", _ranks(rank_mutants.OneRankLateDriver)),
    "L3/all_to_all": Mutant("returns rows in the wrong order", _ranks(rank_mutants.SwappedRowsDriver)),
    "L3/broadcast": Mutant("always sends from rank 0", _ranks(rank_mutants.AlwaysFromZeroDriver)),
    "L3/barrier": Mutant("does not wait", _ranks(rank_mutants.ImpatientDriver)),
    "L3/dtypes": Mutant(
        "returns everything in float32, or bytes that are not the same",
        _ranks(rank_mutants.WidenedDriver, rank_mutants.LossyDriver),
    ),
    "L3/dead_rank": Mutant(
        "does not notice a dead rank, or blames another", _ranks(rank_mutants.AloneDriver, rank_mutants.MistakenDriver)
    ),
    "L3/silent_rank": Mutant("waits three times as long as it may", _ranks(rank_mutants.PatientDriver)),
    "L3/absent_rank": Mutant("says that somebody is missing, and not who", _ranks(rank_mutants.NamelessDriver)),
    "L4/order": Mutant("events are never done", _part("new_stream", _lost_events)),
    "L4/graph": Mutant("a replay runs nothing", _stale_graphs, GraphDriver),
    "L5/logits": Mutant(
        "every second layer's attention is that of the layer before",
        _always(Fault(op="attention.sparse", kind=FaultKind.STALE, calls=Calls(first=2, every=2))),
    ),
    "L5/tokens": Mutant(
        "one element of one attention output jumps in the second answer",
        _always(
            Fault(op="norm.rms", kind=FaultKind.VALUE, calls=Calls(first=400, every=3), row=0, element=0, amount=40.0)
        ),
    ),
    "L5/records": Mutant(
        "one value of one stored record is wrong",
        _always(Fault(op="codec.encode", kind=FaultKind.VALUE, part="x_TC", row=0, element=0, amount=9.0)),
    ),
    "L5/skills": Mutant("attention overlooks the selected entries", _blind),
    "L6/abort": Mutant("some window records are not stored", _always(_STALE_STORE)),
    "L6/preemption": Mutant("some window records are not stored", _always(_STALE_STORE)),
    "L6/fork": Mutant("state is not copied", _always(Fault(op="moves.copy", kind=FaultKind.STALE))),
    "L6/leaks": Mutant(
        "an op raises once in a while, and requests end by it",
        _always(Fault(op="experts.local", kind=FaultKind.RAISE, calls=Calls(first=200, every=97))),
    ),
    "L7/soak": Mutant("some window records are not stored", _always(_STALE_STORE)),
}


__all__ = ["MUTANTS", "Make", "Mutant"]
