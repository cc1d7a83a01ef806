"""The processes of the ranks of this machine: started, spoken to, watched, and ended."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from deepinfer.accelerator import LostRanksError
from deepinfer.engine.ranks.messages import Beginning, Reply
from deepinfer.errors import RankFailedError

_PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from deepinfer.engine.ranks.child import main; "
    "main(int(sys.argv[2]))"
)
GRACE_S: Final = 1.0
"""How long the other ranks may take to say what they saw, once one of them has failed."""
_STARTING_S: Final = 60.0
_CLOSING_S: Final = 5.0


@dataclass(slots=True, eq=False)
class RankProcess:
    """One rank.

    Attributes:
        rank: its number.
        process: its process.
        pipe: our end.
        due: the commands that it has not answered, oldest first.
        answers: what it has answered, and nobody has taken yet: a wait for other ranks may be interrupted.
    """

    rank: int
    process: subprocess.Popen[bytes]
    pipe: Connection[Any, Any]
    due: deque[str] = field(default_factory=deque)
    answers: list[tuple[int, str, Reply]] = field(default_factory=list)

    @classmethod
    def start(cls, beginning: Beginning) -> RankProcess:
        """Start the process and tell it where it stands.

        It is a fresh interpreter, not a copy of this one: a script needs no guard around its own first lines.
        """
        ours, theirs = multiprocessing.Pipe()
        try:
            arguments = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(theirs.fileno())]
            process = subprocess.Popen(  # noqa: S603 - this interpreter, and a program of our own
                arguments,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for this process to act on
            )
        finally:
            theirs.close()
        started = cls(beginning.place.rank, process, ours, deque(["begin"]))
        ours.send(beginning)
        return started

    def send(self, name: str, argument: object = None) -> None:
        """Send a command; a rank that has died is found out when its answer is awaited."""
        self.due.append(name)
        try:
            self.pipe.send((name, argument))
        except (BrokenPipeError, ConnectionResetError):
            return

    def kill(self) -> None:
        """End it now."""
        self.pipe.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class RankProcesses:
    """All ranks of this machine."""

    def __init__(self, beginnings: Iterable[Beginning], deadline_s: float) -> None:
        """Start them; :meth:`collect` gives what each says when it is ready."""
        self._deadline_s = deadline_s
        self._has_started = False
        self._ranks: list[RankProcess] = []
        try:
            for beginning in beginnings:
                self._ranks.append(RankProcess.start(beginning))
        except BaseException:
            self.kill()
            raise

    def __len__(self) -> int:
        return len(self._ranks)

    def started(self) -> list[Any]:
        """Wait until all ranks are ready and return what each says; raises what the first that failed has raised."""
        self.collect(max(self._deadline_s, _STARTING_S))
        self.send(range(len(self)), "join")
        replies = self.collect()
        self._has_started = True
        return [reply.value for _, _, reply in replies]

    @property
    def pids(self) -> tuple[int, ...]:
        """Their process ids, by rank."""
        return tuple(each.process.pid for each in self._ranks)

    def has_due(self) -> bool:
        """Say whether there are answers to be collected to commands whose caller was interrupted."""
        return any(each.due or each.answers for each in self._ranks)

    def send(self, ranks: Iterable[int], name: str, argument: object = None) -> None:
        """Send a command to some ranks."""
        for rank in ranks:
            self._ranks[rank].send(name, argument)

    def collect(self, deadline_s: float | None = None) -> list[tuple[int, str, Reply]]:
        """Return every answer that is due, as (rank, command, reply), in rank order.

        Ranks step together: once one owes nothing, the others may be as far behind as the deadline says.

        Raises:
            RankFailedError: a rank has died, fell silent, or said that it cannot go on. The ranks are of no use then.
        """
        fatal = {each.rank: _reason(reply) for each in self._ranks for _, _, reply in each.answers if reply.is_fatal}
        until: float | None = None
        while waiting := [each for each in self._ranks if each.due and each.rank not in fatal]:
            if fatal:
                until = min(until or time.monotonic() + GRACE_S, time.monotonic() + GRACE_S)
            elif until is None and any(not each.due for each in self._ranks):
                until = time.monotonic() + (deadline_s or self._deadline_s) + GRACE_S
            left = None if until is None else max(0.0, until - time.monotonic())
            ready = wait([each.pipe for each in waiting], left)
            if not ready:
                break
            for each in waiting:
                if each.pipe in ready:
                    self._receive(each, fatal)
        silent = [each for each in self._ranks if each.due and each.rank not in fatal]
        if fatal or silent:
            raise self._failure(fatal, silent)
        found = [answer for each in self._ranks for answer in each.answers]
        for each in self._ranks:
            each.answers.clear()
        return found

    def close(self) -> None:
        """End all ranks in order, those that do not follow by force.

        Ranks that still owe an answer, because the call that wants it was interrupted, are not blamed for anything:
        nobody knows how far they are behind.

        Raises:
            RankFailedError: a rank had died, raised, or did not end in time. All processes are gone nevertheless.
        """
        owing = {each.rank for each in self._ranks if each.due}
        try:
            self.send(range(len(self)), "close")
            fatal, silent = self._closed(time.monotonic() + _CLOSING_S)
        finally:
            self.kill()
        fatal = {rank: error for rank, error in fatal.items() if rank not in owing}
        words = self._causes(fatal)
        for rank in silent - owing - fatal.keys():
            words[rank] = f"rank {rank} did not end within {_CLOSING_S:g} s of being told to"
        if words:
            raise RankFailedError(words, "; ".join(words[rank] for rank in sorted(words)))
        if fatal:
            raise self._failure(fatal, [])

    def _closed(self, until: float) -> tuple[dict[int, BaseException], set[int]]:
        """Wait for the ends of all ranks; return what ranks raised or died of, and which did not end."""
        fatal: dict[int, BaseException] = {}
        while waiting := [each for each in self._ranks if each.due and each.rank not in fatal]:
            ready = wait([each.pipe for each in waiting], max(0.0, until - time.monotonic()))
            if not ready:
                break
            for each in waiting:
                if each.pipe in ready:
                    self._receive(each, fatal)
        silent: set[int] = set()
        for each in self._ranks:
            if each.rank in fatal and each.process.poll() is not None:
                continue
            try:
                status = each.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                silent.add(each.rank)
            else:
                if status and each.rank not in fatal:
                    fatal[each.rank] = EOFError(self._how_it_ended(each))
        return fatal, silent

    def kill(self) -> None:
        """End all ranks now."""
        for each in self._ranks:
            each.kill()

    def _receive(self, each: RankProcess, fatal: dict[int, BaseException]) -> None:
        try:
            reply: Reply = each.pipe.recv()
        except (EOFError, ConnectionResetError):
            fatal[each.rank] = EOFError(self._how_it_ended(each))
            return
        each.answers.append((each.rank, each.due.popleft(), reply))
        if reply.is_fatal:
            fatal[each.rank] = _reason(reply)

    def _how_it_ended(self, each: RankProcess) -> str:
        try:
            status = each.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        return f"it was ended by signal {-status}" if status < 0 else f"it ended with status {status}"

    @staticmethod
    def _causes(fatal: Mapping[int, BaseException]) -> dict[int, str]:
        """Return who died or raised, in rank order, and how; not who noticed that others had."""
        return {
            rank: f"rank {rank} died: {error}"
            if isinstance(error, EOFError)
            else f"rank {rank} raised {type(error).__name__}: {error}"
            for rank, error in sorted(fatal.items())
            if not isinstance(error, LostRanksError)
        }

    def _failure(self, fatal: Mapping[int, BaseException], silent: Sequence[RankProcess]) -> BaseException:
        """Return what is to be raised: who is at fault, not who noticed."""
        noticed = {rank: error for rank, error in fatal.items() if isinstance(error, LostRanksError)}
        if not self._has_started:
            for rank, error in sorted(fatal.items()):
                if rank not in noticed and not isinstance(error, EOFError):
                    return error  # a wrong directory is the same error with one rank and with many
        if causes := self._causes(fatal):
            return RankFailedError(causes, "; ".join(causes.values()))
        missing = {rank for error in noticed.values() for rank in error.missing} | {each.rank for each in silent}
        words = [f"rank {each.rank} did not answer {each.due[0]!r} in time" for each in silent]
        words += [str(error) for _, error in sorted(noticed.items())[:1]]
        return RankFailedError(missing, "; ".join(words))


def _reason(reply: Reply) -> BaseException:
    """Return why a rank has given up."""
    return reply.error or EOFError("it gave up and did not say why")
