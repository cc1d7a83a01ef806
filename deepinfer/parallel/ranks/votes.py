"""What the host group agrees on: yes or no, and the smallest or largest of the ranks' numbers.

Every call is one exchange of a few bytes between hosts; no device is waited for. Ranks make the same calls in the same
order, because what decides whether a call is made was agreed on by the calls before it.
"""

from __future__ import annotations

import torch

from deepinfer.accelerator import Collectives


class HostVotes:
    """One rank's side of the votes; it has the shape of :class:`deepinfer.scheduling.votes.VoteGroup`.

    Attributes:
        cast: votes so far.
    """

    def __init__(self, group: Collectives) -> None:
        """Vote among the ranks of ``group``, a group between hosts."""
        self._group = group
        self.cast = 0

    def any_rank(self, *, says_yes: bool) -> bool:
        """Return whether at least one rank says yes."""
        return bool(self._ask(torch.tensor([says_yes], dtype=torch.uint8)).any())

    def every_rank(self, *, says_yes: bool) -> bool:
        """Return whether all ranks say yes."""
        return bool(self._ask(torch.tensor([says_yes], dtype=torch.uint8)).all())

    def least(self, *numbers: int) -> tuple[int, ...]:
        """Return the smallest of the ranks' numbers, place by place."""
        return tuple(self._ask(torch.tensor(numbers, dtype=torch.int64)).amin(dim=0).tolist())

    def most(self, *numbers: int) -> tuple[int, ...]:
        """Return the largest of the ranks' numbers, place by place."""
        return tuple(self._ask(torch.tensor(numbers, dtype=torch.int64)).amax(dim=0).tolist())

    def _ask(self, answer: torch.Tensor) -> torch.Tensor:
        self.cast += 1
        return self._group.all_gather(answer)
