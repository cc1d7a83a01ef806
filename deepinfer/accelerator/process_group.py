"""Exchanges between ranks over one of torch's process groups that enqueue: exact bytes, sums in rank order, deadlines.

For drivers whose device has such a group (NCCL, HCCL). Tensors travel as bytes, so that every dtype keeps its bits, and
sums are added here in rank order: these libraries' own reductions choose their order by size. They enqueue an exchange
on a stream and return; what a missing rank leaves behind is a stream that never moves. So every call here waits on the
host until the exchange is done or the deadline is over. That costs a wait a call, and is why no exchange may be
recorded into a graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # public, not re-exported

from deepinfer.accelerator.collectives import Collectives, RankPlace
from deepinfer.accelerator.roll_call import RollCall
from deepinfer.errors import DeepInferError, OpRefusedError

MakeTransport = Callable[[Store, RankPlace], Any]
"""Makes a process group that meets in a store."""

_BUSY_POLL_S: Final = 20e-6


class ProcessGroupCollectives(Collectives):
    """One rank's membership of a group; any number of groups may live in a process."""

    def __init__(self, place: RankPlace, library: str, transport: MakeTransport) -> None:
        """Join: returns when every rank has, raises LostRanksError within the deadline otherwise.

        Args:
            place: where the group meets.
            library: who carries the bytes, for messages.
            transport: makes the process group; tests put Gloo in its place.
        """
        self._place = place
        self._name = f"{library} group of {place.world_size} ranks at {place.address}"
        self._broken: DeepInferError | None = None
        self._roll_call = RollCall(place, self._name)
        self._roll_call.join()
        try:
            self._group = transport(self._roll_call.keys("transport"), place)
        except RuntimeError as error:
            raise self._roll_call.failure("connecting the ranks", error) from error

    @property
    def rank(self) -> int:
        """This rank."""
        return self._place.rank

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return self._place.world_size

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Gather, then add in rank order."""
        gathered = self.all_gather(values)
        total = gathered[0].clone()
        for rank in range(1, self.world_size):
            total = total + gathered[rank]
        return total

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the ranks' tensors stacked, by one exchange of equally long byte rows."""
        mine = _bytes(values)
        found = mine.new_empty(self.world_size * mine.numel())
        if mine.numel():
            self._exchange("all_gather", lambda: self._group._allgather_base(found, mine))
        else:
            self.barrier()
        return found.view(values.dtype).view(self.world_size, *values.shape)

    def all_to_all(self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> torch.Tensor:
        """Exchange row ranges with uneven counts."""
        counts = (*send_counts, *receive_counts)
        wrong_length = len(send_counts) != self.world_size or len(receive_counts) != self.world_size
        if rows.dim() == 0 or wrong_length or min(counts) < 0 or sum(send_counts) != rows.shape[0]:
            raise OpRefusedError(
                f"all_to_all of a tensor {tuple(rows.shape)} in a {self._name}: give {self.world_size} counts of 0 or "
                f"more each way, and send counts whose sum is its rows; got send {list(send_counts)} and receive "
                f"{list(receive_counts)}"
            )
        row_bytes = prod(rows.shape[1:]) * rows.element_size()
        sent, sent_splits = _bytes(rows), [count * row_bytes for count in send_counts]
        found_splits = [count * row_bytes for count in receive_counts]
        found = sent.new_empty(sum(found_splits))
        self._exchange("all_to_all", lambda: self._group.alltoall_base(found, sent, found_splits, sent_splits))
        return found.view(rows.dtype).view(sum(receive_counts), *rows.shape[1:])

    def broadcast(self, values: torch.Tensor, source: int) -> torch.Tensor:
        """Return the source's tensor, by a gather: one exchange for all bytes of all ranks, never a tree of sums."""
        if not 0 <= source < self.world_size:
            raise OpRefusedError(f"broadcast from rank {source} in a {self._name}: there is no such rank")
        return self.all_gather(values)[source].clone()

    def barrier(self) -> None:
        """Wait for all."""
        self._exchange("barrier", lambda: self._group.barrier())

    def _exchange(self, what: str, start: Callable[[], Any]) -> None:
        if self._broken is not None:
            raise self._broken
        until = self._roll_call.deadline()
        try:
            work = start()
            while not work.is_completed():
                if time.monotonic() >= until:
                    self._broken = self._roll_call.failure(what, f"not done within {self._place.deadline_s:g} s")
                    self._give_up()
                    raise self._broken
                time.sleep(_BUSY_POLL_S)
            work.wait()
        except RuntimeError as error:
            self._broken = self._roll_call.failure(what, error)
            raise self._broken from error

    def _give_up(self) -> None:
        """Clear away what an exchange that missed its deadline left on the device; nothing, where nothing is left."""


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.detach().contiguous().flatten().view(torch.uint8)
