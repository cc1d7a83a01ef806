"""Votes of ranks that are threads of one process."""

from __future__ import annotations

import threading

DEADLINE_S = 60.0


class Ballot:
    """Where the ranks of a group meet; every vote waits for all of them."""

    def __init__(self, ranks: int) -> None:
        """Prepare for so many ranks."""
        self._barrier = threading.Barrier(ranks, timeout=DEADLINE_S)
        # Two rows of answers, used in turn: nobody can be two votes ahead of a rank that still reads.
        self._answers = ([False] * ranks, [False] * ranks)

    def give_up(self) -> None:
        """Let every rank that waits, or will wait, raise BrokenBarrierError."""
        self._barrier.abort()

    def of_rank(self, rank: int) -> RankVotes:
        """Return the votes as one rank casts them."""
        return RankVotes(self._barrier, self._answers, rank)


class RankVotes:
    """One rank's side of a ballot."""

    def __init__(self, barrier: threading.Barrier, answers: tuple[list[bool], list[bool]], rank: int) -> None:
        """Share the barrier and the answers with all other ranks."""
        self._barrier, self._answers, self._rank = barrier, answers, rank
        self._turn = 0

    def any_rank(self, *, says_yes: bool) -> bool:
        """Return whether at least one rank says yes."""
        return any(self._meet(says_yes=says_yes))

    def every_rank(self, *, says_yes: bool) -> bool:
        """Return whether all ranks say yes."""
        return all(self._meet(says_yes=says_yes))

    def _meet(self, *, says_yes: bool) -> list[bool]:
        answers = self._answers[self._turn]
        self._turn = 1 - self._turn
        answers[self._rank] = says_yes
        self._barrier.wait()
        return answers
