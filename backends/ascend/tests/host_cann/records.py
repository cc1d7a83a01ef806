"""What was asked of the device, one frozen value per request, in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from host_cann.descriptors import Argument, TensorArgument


class Phase(Enum):
    """When a request's work is done."""

    EXECUTED = 0
    CAPTURED = 1
    REPLAYED = 2


class Direction(Enum):
    """aclrtMemcpyKind."""

    HOST_TO_HOST = 0
    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 3


@dataclass(frozen=True, slots=True)
class _Request:
    phase: Phase
    device: int
    stream: int
    """Number of the stream; -1 for a call without one."""


@dataclass(frozen=True, slots=True)
class OperatorCall(_Request):
    """One aclnn call; names of arguments are those of the prototype, or numbers where there is none."""

    operator: str
    arguments: tuple[tuple[str, Argument], ...]
    has_kernel: bool

    def __getitem__(self, name: str) -> Argument:
        """Return the argument called ``name``."""
        return dict(self.arguments)[name]

    def tensor(self, name: str) -> TensorArgument:
        """Return the tensor argument called ``name``."""
        found = self[name]
        if not isinstance(found, TensorArgument):
            raise TypeError(f"argument {name!r} of {self.operator} is {found!r}, not a tensor")
        return found

    @property
    def tensors(self) -> tuple[TensorArgument, ...]:
        """All tensors, those in lists included, in order."""
        flat: list[TensorArgument] = []
        for _, value in self.arguments:
            flat.extend(
                item for item in (value if isinstance(value, tuple) else (value,)) if isinstance(item, TensorArgument)
            )
        return tuple(flat)


@dataclass(frozen=True, slots=True)
class Copy(_Request):
    """A copy; ``is_pinned`` is None where no host memory takes part."""

    direction: Direction
    nbytes: int
    destination: int
    source: int
    is_asynchronous: bool
    is_pinned: bool | None


@dataclass(frozen=True, slots=True)
class Fill(_Request):
    """aclrtMemset."""

    value: int
    nbytes: int
    address: int


@dataclass(frozen=True, slots=True)
class EventRecord(_Request):
    """An event is recorded on a stream."""

    event: int


@dataclass(frozen=True, slots=True)
class EventWait(_Request):
    """A stream waits for an event."""

    event: int


@dataclass(frozen=True, slots=True)
class CaptureBegin(_Request):
    """Capture of a graph starts."""

    graph: int
    mode: int


@dataclass(frozen=True, slots=True)
class CaptureEnd(_Request):
    """Capture of a graph ends with so many nodes."""

    graph: int
    nodes: int


@dataclass(frozen=True, slots=True)
class Replay(_Request):
    """A graph runs; its requests follow with phase REPLAYED."""

    graph: int
    nodes: int


@dataclass(frozen=True, slots=True)
class Allocate(_Request):
    """aclrtMalloc."""

    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Release(_Request):
    """aclrtFree."""

    address: int
    nbytes: int


COLLECTIVES = (
    "?", "all_reduce", "broadcast", "reduce_scatter", "scatter", "all_gather", "all_to_all", "reduce", "send",
    "receive", "barrier", "all_gather_v", "reduce_scatter_v", "all_to_all_v", "host_gather",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Collective(_Request):
    """A call of HCCL; numbers are those of its header."""

    operation: str
    count: int
    data_type: int
    reduction: int
    root: int
    ranks: int


@dataclass(frozen=True, slots=True)
class Synchronise(_Request):
    """The host waits for: a stream, the device, an event; or a host function runs."""

    what: str


@dataclass(frozen=True, slots=True)
class Refused(_Request):
    """A runtime function without an emulation was called."""

    function: str


Record: TypeAlias = (
    OperatorCall | Copy | Fill | EventRecord | EventWait | CaptureBegin | CaptureEnd | Replay | Allocate | Release
    | Collective | Synchronise | Refused
)  # fmt: skip
SYNCHRONISED = ("stream", "device", "event", "host function")
