"""Processes that train one model together: each makes its own half of a step's sequences, gradients are averaged.

Two processes of one thread are faster than one of two: most operators of so small a model are too short to be parted.
Averages over two processes have the same bits in any order, so that a run can be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed


@dataclass(frozen=True)
class Team:
    """This process's place: number ``rank`` of ``size``. Alone, nothing is exchanged."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, rank: int, size: int, meeting: Path) -> Team:
        """Wait until all processes have come to the file ``meeting``, which must not exist before."""
        if size > 1:
            distributed.init_process_group(
                "gloo", init_method=f"file://{meeting.absolute()}", rank=rank, world_size=size
            )
        return cls(rank, size)

    @property
    def leads(self) -> bool:
        """The one that saves, measures and speaks."""
        return self.rank == 0

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor by its average over the team."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        distributed.all_reduce(flat)
        flat /= self.size
        for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def agreed(self, value: Any) -> Any:
        """Return the leader's value in every process."""
        if self.size == 1:
            return value
        held = [value]
        distributed.broadcast_object_list(held)
        return held[0]

    def leave(self) -> None:
        """End the exchange."""
        if self.size > 1:
            distributed.destroy_process_group()
