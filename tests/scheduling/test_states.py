"""The states: one table of moves, one table of places, and no other way to change either."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

import deepinfer.scheduling
from deepinfer.errors import InvariantError
from deepinfer.scheduling.sequence import Sequence, StopRules
from deepinfer.scheduling.states import ALLOWED_MOVES, ALLOWED_PLACES, FINISH_REASONS, Place, Status, move

ENDS = [status for status in Status if status.is_finished]


def in_state(status: Status) -> Sequence:
    sequence = Sequence("a", [5], StopRules(1))
    sequence.status = status
    return sequence


def test_the_statuses_are_the_ten_of_the_specification() -> None:
    assert [status.name for status in Status] == [
        "WAITING",
        "RUNNING",
        "FINISHED_STOPPED",
        "FINISHED_LENGTH_CAPPED",
        "FINISHED_ABORTED",
        "FINISHED_PREEMPTED",
        "FINISHED_GRAMMAR_FAILED",
        "FINISHED_IMAGE_FAILED",
        "FINISHED_INVALID",
        "FINISHED_IGNORED",
    ]


def test_every_end_has_one_word_for_the_user_and_no_two_share_it() -> None:
    assert set(FINISH_REASONS) == set(ENDS)
    assert len(set(FINISH_REASONS.values())) == len(ENDS) == 8


@pytest.mark.parametrize("status", Status)
def test_a_move_outside_the_tables_is_refused_and_changes_nothing(status: Status) -> None:
    for target, place in product(Status, Place):
        sequence = in_state(status)
        if target in ALLOWED_MOVES[status] and place in ALLOWED_PLACES[target]:
            move(sequence, target, place)
            assert (sequence.status, sequence.place) == (target, place)
        else:
            with pytest.raises(InvariantError, match="cannot"):
                move(sequence, target, place)
            assert (sequence.status, sequence.place) == (status, Place.NOWHERE)


def test_nothing_leaves_an_end_except_a_length_cap_that_turns_out_to_be_a_stop() -> None:
    assert {status: ALLOWED_MOVES[status] for status in ENDS if ALLOWED_MOVES[status]} == {
        Status.FINISHED_LENGTH_CAPPED: frozenset({Status.FINISHED_STOPPED})
    }


def test_a_finished_request_is_in_no_queue() -> None:
    assert all(ALLOWED_PLACES[status] == {Place.NOWHERE} for status in ENDS)


def test_only_the_move_function_assigns_a_status_or_a_place() -> None:
    room = Path(deepinfer.scheduling.__file__).parent
    assigning = {
        path.name
        for path in room.glob("*.py")
        if any(f".{name} = " in path.read_text() for name in ("status", "place"))
    }
    assert assigning == {"states.py", "sequence.py"}  # the latter only where a new request begins
