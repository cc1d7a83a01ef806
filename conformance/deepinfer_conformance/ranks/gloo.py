"""Collectives over torch.distributed's Gloo, in rank order and with exact counts: the suite's own yardstick.

A driver for the host may use it as it is; the tests prove the checks of L3 with it.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from deepinfer.accelerator import Collectives
from deepinfer.errors import OpRefusedError

DEADLINE_S = 60.0


class GlooCollectives(Collectives):
    """A group that the launcher's variables describe. Tensors travel as bytes, so that every dtype keeps its bits."""

    def __init__(self, world_size: int, deadline_s: float = DEADLINE_S) -> None:
        """Join the group; raises within the deadline if the others do not."""
        self._name = f"gloo group of {world_size} ranks"
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
                rank=int(os.environ["RANK"]),
                world_size=world_size,
                timeout=datetime.timedelta(seconds=deadline_s),
            )

    @property
    def rank(self) -> int:
        """This rank."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return dist.get_world_size()

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Gather, then add in rank order: Gloo's own reduction chooses its order by size."""
        gathered = self.all_gather(values)
        total = gathered[0].clone()
        for rank in range(1, self.world_size):
            total = total + gathered[rank]
        return total

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the ranks' tensors stacked."""
        mine = _bytes(values)
        found = [torch.empty_like(mine) for _ in range(self.world_size)]
        if mine.numel():
            self._exchange(lambda: dist.all_gather(found, mine))
        else:
            self.barrier()
        return torch.cat(found).view(values.dtype).view(self.world_size, *values.shape)

    def all_to_all(self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> torch.Tensor:
        """Exchange row ranges with uneven counts; every pair of ranks with rows has a message of its own."""
        if (
            sum(send_counts) != rows.shape[0]
            or len(send_counts) != self.world_size
            or len(receive_counts) != self.world_size
        ):
            raise OpRefusedError(
                f"all_to_all with {rows.shape[0]} rows in a {self._name}: give {self.world_size} counts each way, and "
                f"send counts of that sum; got send {list(send_counts)} and receive {list(receive_counts)}"
            )
        sent = list(torch.split(_flat_rows(rows), list(send_counts)))
        found = [sent[0].new_empty((count, sent[0].shape[1])) for count in receive_counts]
        found[self.rank].copy_(sent[self.rank])
        self._exchange(lambda: self._send_and_receive(sent, found))
        received = torch.cat(found)
        return received.view(rows.dtype).view(sum(receive_counts), *rows.shape[1:])

    def broadcast(self, values: torch.Tensor, source: int) -> torch.Tensor:
        """Return the source's tensor."""
        carried = _bytes(values).clone()
        if carried.numel():
            self._exchange(lambda: dist.broadcast(carried, source))
        else:
            self.barrier()
        return carried.view(values.dtype).view(values.shape)

    def barrier(self) -> None:
        """Wait for all."""
        self._exchange(dist.barrier)

    def _send_and_receive(self, sent: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> None:
        others = [other for other in range(self.world_size) if other != self.rank]
        works = [dist.irecv(found[other], other) for other in others if found[other].numel()]
        works += [dist.isend(sent[other].contiguous(), other) for other in others if sent[other].numel()]
        for work in works:
            if work is not None:
                work.wait()

    def _exchange(self, exchange: object) -> None:
        if not callable(exchange):
            raise TypeError("an exchange is a function")
        try:
            exchange()
        except RuntimeError as error:
            raise OpRefusedError(f"{self._name}, rank {self.rank}: a rank did not answer: {error}") from error


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().flatten().view(torch.uint8)


def _flat_rows(rows: torch.Tensor) -> torch.Tensor:
    count = rows.shape[0]
    width = rows[0].numel() if count else int(torch.tensor(rows.shape[1:]).prod()) if rows.dim() > 1 else 1
    return (
        rows.contiguous().view(count, width).view(torch.uint8)
        if count
        else rows.new_empty((0, width)).view(torch.uint8)
    )
