"""Who is blamed when a rank fails, and what a rank does with an error. The processes and the engine are stand-ins."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import threading
from collections import deque
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer.accelerator import LostRanksError
from deepinfer.engine.ranks import processes
from deepinfer.engine.ranks.child import FAILED, serve
from deepinfer.engine.ranks.messages import Reply, portable
from deepinfer.engine.ranks.processes import RankProcess, RankProcesses
from deepinfer.errors import ArgumentError, DeepInferError, InvariantError, RankFailedError
from deepinfer.parallel.ranks.groups import RankGroups
from deepinfer.settings import LaunchedRank

LOST = LostRanksError("rank 0, host group of ranks 0, 1", (1,), "all_gather")


class Ended:
    """A process that has ended, or is frozen until it is killed."""

    pid = 0

    def __init__(self, status: int | None) -> None:
        self.status = status or 0
        self.is_frozen = status is None

    def poll(self) -> int | None:
        return None if self.is_frozen else self.status

    def wait(self, timeout: float | None = None) -> int:
        if self.is_frozen and timeout is not None:
            raise subprocess.TimeoutExpired("a rank", timeout)
        return self.status

    def kill(self) -> None:
        self.is_frozen = False


def ranks_that_say(*said: Reply | int | None, has_started: bool = True) -> RankProcesses:
    """Each rank has answered, or has ended with a status, or is silent."""
    ranks = RankProcesses([], deadline_s=0.2)
    ranks._has_started = has_started
    for rank, each in enumerate(said):
        ours, theirs = multiprocessing.Pipe()
        if isinstance(each, Reply):
            theirs.send(each)
        if isinstance(each, int):
            theirs.close()
        process: Any = Ended(0 if isinstance(each, Reply) else each)
        ranks._ranks.append(RankProcess(rank, process, ours, deque(["step"])))
        process.theirs = theirs  # open as long as the process is there
    return ranks


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 0.2)


@pytest.mark.parametrize(
    ("said", "ranks", "words"),
    [
        ((Reply([]), -9), (1,), "rank 1 died: it was ended by signal 9"),
        ((Reply([]), 3), (1,), "rank 1 died: it ended with status 3"),
        ((Reply(error=LOST, is_fatal=True), -9), (1,), "signal 9"),
        ((Reply(error=LOST, is_fatal=True), None), (1,), "rank 1 did not answer 'step' in time"),
        ((Reply([]), None), (1,), "rank 1 did not answer 'step' in time"),
        (
            (Reply(error=LOST, is_fatal=True), Reply(error=InvariantError("of two minds"), is_fatal=True)),
            (1,),
            "rank 1 raised InvariantError: of two minds",
        ),
        ((Reply(error=LOST, is_fatal=True), Reply(error=LOST, is_fatal=True)), (1,), "all_gather"),
    ],
)
def test_the_rank_at_fault_is_named_and_not_who_noticed(said: Any, ranks: tuple[int, ...], words: str) -> None:
    with pytest.raises(RankFailedError, match=words) as failed:
        ranks_that_say(*said).collect()
    assert failed.value.ranks == ranks


def test_an_error_at_the_start_is_raised_as_it_is() -> None:
    wrong = ArgumentError("engine options", ["no"])
    with pytest.raises(ArgumentError, match="no"):
        ranks_that_say(Reply(error=LOST, is_fatal=True), Reply(error=wrong, is_fatal=True), has_started=False).collect()


def test_errors_that_are_not_fatal_are_answers() -> None:
    error = ArgumentError("fork", ["no"])
    found = ranks_that_say(Reply([]), Reply(error=error)).collect()
    assert [(rank, name) for rank, name, _ in found] == [(0, "step"), (1, "step")]
    assert str(found[1][2].error) == str(error)


def test_a_rank_that_is_asked_alone_must_answer_within_the_deadline() -> None:
    ranks = ranks_that_say(Reply(), None)
    ranks._ranks[0].due.clear()
    with pytest.raises(RankFailedError, match="rank 1 did not answer 'step' in time"):
        ranks.collect()


def test_answers_that_came_before_an_interruption_are_taken_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(pipes: list[Connection[Any, Any]], left: float | None) -> list[Any]:
        if len(pipes) == 1:
            monkeypatch.setattr(processes, "wait", multiprocessing.connection.wait)
            raise KeyboardInterrupt
        return [pipes[0]]

    ranks = ranks_that_say(Reply("first"), Reply("second"))
    monkeypatch.setattr(processes, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ranks.collect()
    assert ranks.has_due()
    assert [(rank, reply.value) for rank, _, reply in ranks.collect()] == [(0, "first"), (1, "second")]
    assert not ranks.has_due()


def test_a_rank_that_gave_up_before_an_interruption_is_named_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(pipes: list[Connection[Any, Any]], left: float | None) -> list[Any]:
        monkeypatch.setattr(processes, "wait", multiprocessing.connection.wait)
        raise KeyboardInterrupt

    ranks = ranks_that_say(Reply(error=ValueError("no"), is_fatal=True), None)
    ranks._receive(ranks._ranks[0], {})
    monkeypatch.setattr(processes, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ranks.collect()
    with pytest.raises(RankFailedError, match="rank 0 raised ValueError: no") as failed:
        ranks.collect()
    assert failed.value.ranks == (0,)


@pytest.mark.parametrize(
    "error",
    [
        ArgumentError("fork", ["a", "b"]),
        LOST,
        RankFailedError((2, 1), "why"),
        ValueError("plain"),
    ],
)
def test_errors_come_through_a_pipe_as_they_were(error: Exception) -> None:
    there = pickle.loads(pickle.dumps(portable(error)))  # noqa: S301 - made here
    assert type(there) is type(error)
    assert str(there) == str(error)
    assert getattr(there, "missing", None) == getattr(error, "missing", None)


def test_an_error_that_cannot_travel_says_the_same_in_our_words() -> None:
    class Stubborn(Exception):  # noqa: N818 - of a driver's making
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    there = portable(Stubborn(1, 2))
    assert type(there) is DeepInferError
    assert str(there) == "Stubborn: 1 and 2"


@pytest.mark.parametrize(
    ("error", "spread", "broken", "is_fatal"),
    [
        (RuntimeError("driver"), False, False, False),
        (RuntimeError("driver"), True, False, True),
        (RuntimeError("gloo"), False, True, True),
        (LOST, False, False, True),
        (RankFailedError((0,), "torn"), False, False, True),
    ],
)
def test_a_rank_ends_when_the_others_wait_for_it_in_vain(
    error: Exception, *, spread: bool, broken: bool, is_fatal: bool
) -> None:
    class Engine:
        closed = False

        def step(self) -> list[Any]:
            raise error

        def close(self) -> None:
            self.closed = True

        abort_request = discard_requests = stats = check_invariants = step

    ours, theirs = multiprocessing.Pipe()
    sound: Any = SimpleNamespace(is_broken=False)
    host: Any = SimpleNamespace(is_broken=broken)
    votes: Any = None
    place = LaunchedRank(1, 2, 1, 2, "127.0.0.1", 1)
    groups = RankGroups(place, host, votes, sound if spread else None, deadline_s=1.0)
    engine: Any = Engine()
    status: list[int] = []

    def run(pipe: Connection[Any, Any]) -> None:
        status.append(serve(pipe, engine, groups))

    thread = threading.Thread(target=run, args=(theirs,))
    thread.start()
    ours.send(("step", None))
    reply = ours.recv()
    assert (type(reply.error), reply.is_fatal) == (type(error), is_fatal)
    if not is_fatal:
        ours.send(("close", None))
        assert ours.recv() == Reply()
    thread.join(10)
    assert status == [FAILED if is_fatal else 0]
    assert engine.closed is not is_fatal


def test_a_rank_that_raises_when_it_is_closed_says_so_and_ends_as_failed() -> None:
    def close() -> None:
        raise ZeroDivisionError("no end")

    ours, theirs = multiprocessing.Pipe()
    engine: Any = SimpleNamespace(close=close, abort_request=None)
    groups: Any = None
    ours.send(("close", None))
    assert serve(theirs, engine, groups) == FAILED
    reply = ours.recv()
    assert reply.is_fatal
    assert type(reply.error) is ZeroDivisionError


def closing(*said: Reply | int | None, owing: bool) -> RankProcesses:
    """As :func:`ranks_that_say`, with answers to "close"; ``owing``: they still owe one to the call before it."""
    ranks = ranks_that_say(*said)
    for each in ranks._ranks:
        each.due = deque(["step"] if owing else [])
    return ranks


@pytest.mark.parametrize(
    ("said", "ranks", "words"),
    [
        ((Reply(), -9), (1,), "rank 1 died: it was ended by signal 9"),
        ((Reply(), 3), (1,), "rank 1 died: it ended with status 3"),
        ((Reply(error=LOST, is_fatal=True), -9), (1,), "signal 9"),
        ((Reply(error=LOST, is_fatal=True), Reply()), (1,), "all_gather"),
        ((Reply(error=ValueError("no"), is_fatal=True), -9), (0, 1), "rank 0 raised ValueError: no; rank 1 died"),
        ((None, Reply()), (0,), r"rank 0 did not end within 0\.2 s of being told to"),
    ],
)
def test_who_does_not_end_in_order_is_named_unless_it_was_left_in_the_midst_of_a_call(
    monkeypatch: pytest.MonkeyPatch, said: Any, ranks: tuple[int, ...], words: str
) -> None:
    monkeypatch.setattr(processes, "_CLOSING_S", 0.2)
    with pytest.raises(RankFailedError, match=words) as failed:
        closing(*said, owing=False).close()
    assert failed.value.ranks == ranks
    closing(*said, owing=True).close()
