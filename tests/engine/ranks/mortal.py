"""Ranks that end at a chosen call. The process of a rank imports this before it starts, and calls :func:`arm`.

What a rank does is seen as a row of words: ``engine.step`` where a step with work begins, ``engine.stepped`` where it
has come back, ``engine.close``, ``experts.move`` where experts begin to change places, and PURPOSE.OP for each exchange
of a group, ``expert.all_to_all`` for one. A fate is a few of these words: the rank ends at the last of them, once it
has met the others in their order, whatever lies between them.
"""

from __future__ import annotations

import datetime
import functools
import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from deepinfer.engine.engine import Engine
from deepinfer.parallel.ranks.moving import MovingExperts
from deepinfer.parallel.ranks.recording import NamedGroup

EXCHANGES = ("all_reduce_sum", "all_gather", "all_to_all", "broadcast", "barrier")


def arm(rank: int, fate: str, *, notes: int | None = None, raises: bool = False) -> None:
    """Let this process end if it is that rank, in the instant before the last word of its fate.

    Args:
        rank: of the process that is to end, in the world.
        fate: words, parted by blanks.
        notes: end within the exchange instead, when so many of its messages have reached other ranks; the first ones
            say what is called, and rows come after them.
        raises: raise an error instead, and live.
    """
    words, lock = deque(fate.split()), threading.Lock()

    def has_come(word: str) -> bool:
        with lock:  # a device's queue is another thread
            if os.environ["RANK"] != str(rank) or not words or words[0] != word:
                return False
            words.popleft()
            return not words

    def end(group: NamedGroup | None = None) -> None:
        if raises:
            raise RuntimeError("this rank's time has come")
        if notes is None or group is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            inner: Any = group._inner
            inner._pairs = _Interrupted(inner._pairs, notes)

    def watch(kind: type, name: str, word: Callable[[Any], str | None], then: str = "") -> None:
        right = getattr(kind, name)

        @functools.wraps(right)
        def watched(self: Any, *arguments: Any, **more: Any) -> Any:
            met = word(self)
            if met is not None and has_come(met):
                end(self if kind is NamedGroup else None)
            found = right(self, *arguments, **more)
            if then and has_come(then):
                end()
            return found

        setattr(kind, name, watched)

    for op in EXCHANGES:
        watch(NamedGroup, op, lambda group, op=op: f"{group.name.split()[0]}.{op}")
    watch(Engine, "step", lambda engine: "engine.step" if engine.has_unfinished_requests() else None, "engine.stepped")
    watch(Engine, "close", lambda _: "engine.close")
    watch(MovingExperts, "_move", lambda _: "experts.move")


class _Interrupted:
    """The messages of an exchange, in the midst of which the process ends."""

    def __init__(self, pairs: Any, left: int) -> None:
        self._pairs, self._left = pairs, left
        self.recv = pairs.recv

    def send(self, *arguments: Any) -> Any:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        work = self._pairs.send(*arguments)
        work.wait(datetime.timedelta(seconds=30))
        return work
