"""The states of a request: one table of allowed moves, one function that moves."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Protocol

from deepinfer.errors import InvariantError


class Status(StrEnum):
    """What a request is doing, as its user would see it."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED_STOPPED = "finished_stopped"
    FINISHED_LENGTH_CAPPED = "finished_length_capped"
    FINISHED_ABORTED = "finished_aborted"
    FINISHED_PREEMPTED = "finished_preempted"
    FINISHED_GRAMMAR_FAILED = "finished_grammar_failed"
    FINISHED_IMAGE_FAILED = "finished_image_failed"
    FINISHED_INVALID = "finished_invalid"
    FINISHED_IGNORED = "finished_ignored"

    @property
    def is_finished(self) -> bool:
        """Whether a request in this state has ended for good."""
        return self in FINISH_REASONS


class Place(StrEnum):
    """Where the scheduler keeps a request; a request is in exactly one place."""

    NOWHERE = "nowhere"
    WAITING = "waiting"
    PROMPTED = "prompted"  # forks and received requests whose state is computed, waiting for decode admission
    RUNNING = "running"
    IN_FLIGHT = "in_flight"  # its prompt chunk was handed to a step whose result has not been read


FINISH_REASONS: Final[dict[Status, str]] = {
    Status.FINISHED_STOPPED: "stop",
    Status.FINISHED_LENGTH_CAPPED: "length",
    Status.FINISHED_ABORTED: "abort",
    Status.FINISHED_PREEMPTED: "insufficient_system_resource",
    Status.FINISHED_GRAMMAR_FAILED: "grammar_failed",
    Status.FINISHED_IMAGE_FAILED: "image_failed",
    Status.FINISHED_INVALID: "invalid",
    Status.FINISHED_IGNORED: "ignored",
}
"""The word that an output carries for each way to end; the original says ``prompt_length_exceeded`` for ``ignored``."""

_FINISHED: Final = frozenset(FINISH_REASONS)

ALLOWED_MOVES: Final[dict[Status, frozenset[Status]]] = {
    # A request can be refused, aborted, or fail in preparation without ever having run; a fork that waits can be
    # preempted; a stop string can be found in the text of a request that was preempted meanwhile.
    Status.WAITING: frozenset({Status.WAITING, Status.RUNNING}) | (_FINISHED - {Status.FINISHED_LENGTH_CAPPED}),
    Status.RUNNING: frozenset({Status.RUNNING, Status.WAITING}) | (_FINISHED - {Status.FINISHED_IGNORED}),
    # A stop string is found after the tokens were committed; at the position of the length cap, stop wins.
    Status.FINISHED_LENGTH_CAPPED: frozenset({Status.FINISHED_STOPPED}),
    **{status: frozenset() for status in _FINISHED - {Status.FINISHED_LENGTH_CAPPED}},
}

ALLOWED_PLACES: Final[dict[Status, frozenset[Place]]] = {
    Status.WAITING: frozenset({Place.WAITING, Place.PROMPTED, Place.IN_FLIGHT}),
    # RUNNING and nowhere: handed over to another engine.
    Status.RUNNING: frozenset({Place.RUNNING, Place.IN_FLIGHT, Place.NOWHERE}),
    **{status: frozenset({Place.NOWHERE}) for status in _FINISHED},
}


class Stateful(Protocol):
    """A thing with a status and a place, changed by ``move`` alone."""

    request_id: str
    status: Status
    place: Place


def move(request: Stateful, status: Status, place: Place) -> None:
    """Change the status and the place of ``request`` together, or raise InvariantError and change neither."""
    if status not in ALLOWED_MOVES[request.status]:
        raise InvariantError(f"request {request.request_id!r} cannot move from {request.status.name} to {status.name}")
    if place not in ALLOWED_PLACES[status]:
        raise InvariantError(f"request {request.request_id!r} cannot be {status.name} in place {place.name}")
    request.status = status
    request.place = place
