"""The driver's side of the contract: device, capabilities, ops, collectives, determinism.

A vendor subclasses :class:`AcceleratorDriver`, registers it in the entry-point group ``deepinfer.accelerators``
and overrides what its chip has. Importing the module that holds the class must be cheap and must not import the
vendor's runtime; :meth:`AcceleratorDriver.availability` is the first call that may.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from deepinfer.accelerator.capabilities import Capabilities, KvCacheDtype, Numerics, Repeatability
from deepinfer.accelerator.collectives import Collectives, RankPlace, SoloCollectives
from deepinfer.accelerator.ops.base import OpGroup
from deepinfer.errors import DeterminismError, OpRefusedError

INTERFACE_VERSION: tuple[int, int] = (1, 1)
"""1.1 adds ``join_group``, ``RankPlace``, ``runtime_variables``, ``serving``, ``expert_slots`` of prepared weights, and
of streams ``enqueue``, ``to_host``, ``close`` and ``elapsed_s``."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a driver cannot run here, and what the user can do about it."""

    problem: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a driver can run on this machine; every reason at once when it cannot.

    Attributes:
        reasons: empty if and only if the driver is available.
        device_name: human name of the device, empty when there is none.
        runtime: versions of what the driver stands on, for example ``"torch 2.13.0, CANN 9.0"``.
    """

    reasons: tuple[Reason, ...] = ()
    device_name: str = ""
    runtime: str = ""

    @property
    def available(self) -> bool:
        """True when nothing stands in the way."""
        return not self.reasons


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Device memory in bytes. ``reserved_bytes`` is what the driver keeps for itself."""

    total_bytes: int
    free_bytes: int
    reserved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class OpOptions:
    """How ops are to compute, fixed for the life of an engine.

    Attributes:
        activation_dtype: dtype of activations between ops.
        numerics: "portable" or "served" (model.md section 18).
        kv_cache_dtype: "released" records or unquantised "float32" ones (index queries follow).
        batch_invariant: keep R2 (engine.md section 7) whatever it costs.
    """

    activation_dtype: torch.dtype = torch.float32
    numerics: Numerics = "portable"
    kv_cache_dtype: KvCacheDtype = "released"
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One matrix product that the model will run: the determinism self-check tries each of them."""

    in_features: int
    out_features: int
    dtype: torch.dtype


class AcceleratorDriver(ABC):
    """One accelerator behind the contract. The core constructs it without arguments, once per engine.

    Attributes:
        name: the name under which the entry point is registered.
        interface_version: the contract version that the driver was written for; same major and a minor not above
            the core's load.
        version: the driver's own version, for reports.
    """

    name: ClassVar[str]
    interface_version: ClassVar[tuple[int, int]]
    version: ClassVar[str] = "0"

    @classmethod
    @abstractmethod
    def availability(cls) -> Availability:
        """Say whether the driver can run here. Must not raise for an absent runtime: absence is a reason."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The torch device on which tensors of this driver live."""

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Return the device's memory as it is now."""

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Return the driver's claims; the same value each time."""

    @abstractmethod
    def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
        """Return the driver's implementations by group name, built for ``options``.

        A group that is absent, or an op of a group that is not overridden, is not implemented.
        """

    def runtime_variables(self) -> Mapping[str, str]:
        """Return the variables of the vendor's runtime with the values in force, for the plan; interface 1.1.

        Name those that decide about results or order, an empty text for one that is not set. The default has none.
        """
        return {}

    def serving(self, device: torch.device) -> AcceleratorDriver:
        """Return a driver like this one whose ops take tensors of ``device``; interface 1.1.

        The plan asks the reference for it, whose ops then stand in for another driver's. The default is this driver,
        whatever the device.
        """
        del device
        return self

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor on the device: its contents may be anything, NaN included."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def synchronize(self) -> None:
        """Wait until everything that was enqueued on the device has finished. The default device is synchronous."""
        return

    def new_stream(self) -> Stream:
        """Return a new queue of work. The default runs everything at once, in the caller's thread."""
        return ImmediateStream()

    def new_graph(self) -> Graph:
        """Return an empty recorded graph; refused unless ``capabilities().graphs`` is claimed."""
        raise OpRefusedError(
            f"driver {self.name!r} does not support recorded graphs (capability 'graphs' is not claimed)"
        )

    def collectives(self, world_size: int) -> Collectives:
        """Return a group of ``world_size`` ranks, as interface 1.0 had it: it never said how ranks meet.

        A driver with ranks overrides :meth:`join_group` instead, which is what the core calls.
        """
        if world_size != 1:
            raise OpRefusedError(
                f"driver {self.name!r} offers no collectives for {world_size} ranks by their number alone; run one "
                f"rank, or call join_group on a driver whose capability 'collectives' is not empty."
            )
        return SoloCollectives()

    def join_group(self, place: RankPlace) -> Collectives:
        """Join the device group at ``place`` and return its exchanges, once every rank has joined; interface 1.1.

        A rank joins any number of groups, each at an address of its own. The default, and so every driver of
        interface 1.0, has groups of one rank only.

        Raises:
            LostRanksError: others did not join within ``place.deadline_s``; it names them where that can be known.
            OpRefusedError: the driver has no collectives for that many ranks.
        """
        if place.world_size != 1:
            raise OpRefusedError(
                f"driver {self.name!r} {self.version} cannot join a group of {place.world_size} ranks: it has groups "
                f"of one. Run one rank, or a driver whose capability 'collectives' is not empty (interface 1.1)."
            )
        return self.collectives(1)

    def set_determinism(self, level: Repeatability, shapes: Sequence[LinearShape]) -> None:
        """Prove on this machine that ``level`` holds for ``shapes``, or raise DeterminismError.

        Called once, before weights are loaded, with every matrix shape of the model.
        """
        if level > Repeatability.NONE:
            raise DeterminismError(
                f"driver {self.name!r} proves no repeatability level; asked for R{int(level)} of {len(shapes)} shapes. "
                f"Unset DEEPINFER_BATCH_INVARIANT or choose a driver that claims it."
            )


class Stream(ABC):
    """A queue of device work in which calls run in the order of submission."""

    @abstractmethod
    def record_event(self) -> Event:
        """Return an event that is done once everything submitted so far has finished."""

    @abstractmethod
    def wait_event(self, event: Event) -> None:
        """Make later work of this stream wait for ``event``, without blocking the host."""

    def enqueue(self, work: Callable[[], None]) -> Event:
        """Run ``work``, which calls ops, behind everything submitted so far; interface 1.1.

        The event is done when all that ``work`` computes has finished. An exception of ``work`` comes out of the
        event's ``wait``, with its type; the stream goes on with later work. What is no ``Exception`` (Ctrl-C) and is
        raised in the caller's thread comes out of this call.

        The default calls ``work`` at once, in the caller's thread: right for ops that have finished, or are in order by
        themselves, when they return. A driver whose ops go to the current stream of its runtime makes this one current
        meanwhile; one that computes on the host may hand ``work`` to a thread.
        """
        begun = time.perf_counter()
        try:
            work()
        except Exception as error:  # noqa: BLE001  # it is the event's to raise
            return _FailedEvent(error)
        return _WorkedEvent(self.record_event(), time.perf_counter() - begun)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor`` for the host, for use in :meth:`enqueue`; interface 1.1.

        It may be read once the event of the work that asked for it has been waited for. The default waits for it.
        """
        return tensor.cpu()

    def close(self) -> None:
        """Wait for everything and let go of what the stream holds (a thread); interface 1.1. It may be called again."""
        self.record_event().wait()


class Event(ABC):
    """A mark in a stream."""

    @property
    def elapsed_s(self) -> float | None:
        """Seconds that the device was busy with the work of :meth:`Stream.enqueue`, None where nobody knows.

        To be asked when the event is done; interface 1.1.
        """
        return None

    @abstractmethod
    def done(self) -> bool:
        """Return True when the work before the mark has finished; never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Block the host until the work before the mark has finished."""


class Graph(ABC):
    """A recorded step that can be replayed with the same addresses."""

    @abstractmethod
    def capture_begin(self) -> None:
        """Start recording everything that is enqueued on the current stream."""

    @abstractmethod
    def capture_end(self) -> None:
        """Stop recording."""

    @abstractmethod
    def replay(self) -> None:
        """Enqueue the recorded work once more."""


class _DoneEvent(Event):
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class _FailedEvent(Event):
    def __init__(self, error: Exception) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        raise self._error


class _WorkedEvent(Event):
    """The end of work that was called at once; how long it took says something if it was finished with the call."""

    def __init__(self, end: Event, called_s: float) -> None:
        self._end = end
        self._elapsed_s = called_s if end.done() else None

    @property
    def elapsed_s(self) -> float | None:
        return self._elapsed_s

    def done(self) -> bool:
        return self._end.done()

    def wait(self) -> None:
        self._end.wait()


class ImmediateStream(Stream):
    """The stream of a synchronous device: work has finished when the call returns."""

    def record_event(self) -> Event:
        """Return an event that is already done."""
        return _DoneEvent()

    def wait_event(self, event: Event) -> None:
        """Wait on the host, since there is no queue to hold back."""
        event.wait()
