"""The votes by which a group of ranks agrees on one kind of step, and the clock that says when prefill may be tried."""

from __future__ import annotations

from typing import Protocol


class VoteGroup(Protocol):
    """A host-side group of ranks that answer one question together.

    Every rank asks the same questions in the same order; a vote must not wait for a device.
    """

    def any_rank(self, *, says_yes: bool) -> bool:
        """Return whether at least one rank says yes."""
        ...

    def every_rank(self, *, says_yes: bool) -> bool:
        """Return whether all ranks say yes."""
        ...


class SoloVotes:
    """A group of one rank: its own answer decides."""

    def any_rank(self, *, says_yes: bool) -> bool:
        """Return the only answer."""
        return says_yes

    def every_rank(self, *, says_yes: bool) -> bool:
        """Return the only answer."""
        return says_yes


class StepClock:
    """Counts decode steps since the last prompt step; equal on all ranks of a group because kinds of steps are."""

    def __init__(self, prefill_attempt_interval: int, prefill_any_attempt_interval: int) -> None:
        self._all_interval = prefill_attempt_interval
        self._any_interval = prefill_any_attempt_interval
        self.decode_step = 0

    def prefill_is_tried(self, votes: VoteGroup, *, wants: bool, can_decode: bool) -> bool:
        """Vote on whether the group tries a prompt step now.

        The chances come 0, 70, 100, 140, 200, 210 ... decode steps after the last prompt step: at an ALL point every
        rank must want it, at an ANY point one is enough, and a group with nothing to decode may always try.
        """
        at_any_point = self.decode_step != 0 and self.decode_step % self._any_interval == 0
        at_all_point = self.decode_step % self._all_interval == 0
        group_is_idle = votes.every_rank(says_yes=not can_decode)
        if at_any_point or group_is_idle:
            return votes.any_rank(says_yes=wants)
        if at_all_point:
            return votes.every_rank(says_yes=wants)
        return False

    def count_prompt_step(self) -> None:
        """Restart the count; a rank whose own prompt step was empty restarts too."""
        self.decode_step = 0

    def count_decode_step(self) -> None:
        """Count one decode step, empty ones included."""
        self.decode_step += 1
