"""What happens to an engine, and what has become of its requests: enough to let the same happen to another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deepinfer.sampling.params import SamplingParams
from deepinfer.sim.faults import FaultPlace


class Arrival(NamedTuple):
    """A request is added before a step."""

    step: int
    request_id: str
    prompt: Sequence[int]
    params: SamplingParams


class Fork(NamedTuple):
    """A request continues from another one."""

    step: int
    request_id: str
    parent_id: str
    params: SamplingParams


class Abort(NamedTuple):
    """A request is aborted; it may have ended."""

    step: int
    request_id: str


class Fault(NamedTuple):
    """The device will fail."""

    step: int
    place: FaultPlace


Event = Arrival | Fork | Abort | Fault


class EndedRequest(NamedTuple):
    """A request that has ended.

    Attributes:
        prompt: its prompt; of a fork, what its parent held.
        answers: tokens and reason of each answer.
    """

    prompt: tuple[int, ...]
    answers: tuple[tuple[tuple[int, ...], str], ...]
