"""Exchanges between ranks over HCCL: exact bytes, sums in rank order, and an end when a rank is missing.

Tensors travel as bytes, so that every dtype keeps its bits, and sums are added here in rank order: HCCL's own
reductions choose their order by size. HCCL enqueues an exchange on a stream and returns; what a missing rank leaves
behind is a stream that never moves. So every call here waits on the host until the exchange is done or the deadline is
over. That costs a wait a call, and is why no exchange may be recorded into a graph.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

import torch
from torch._C._distributed_c10d import Store

from deepinfer.accelerator.collectives import Collectives, RankPlace
from deepinfer.accelerator.roll_call import RollCall
from deepinfer.errors import DeepInferError, OpRefusedError
from deepinfer_ascend import runtime

MakeTransport = Callable[[Store, RankPlace], Any]
_BUSY_POLL_S: Final = 20e-6


def hccl(store: Store, place: RankPlace) -> Any:
    """Return torch-npu's process group over HCCL; its own watchdog is given the same deadline."""
    group_type = runtime.load()._C._distributed_c10d.ProcessGroupHCCL
    options = group_type.Options()
    options.is_high_priority_stream = False
    options._timeout = datetime.timedelta(seconds=place.deadline_s)
    options.global_ranks_in_group = list(range(place.world_size))
    options.group_id = place.address
    return group_type(store, place.rank, place.world_size, options)


class HcclCollectives(Collectives):
    """One rank's membership of a group; any number of groups may live in a process."""

    def __init__(self, place: RankPlace, transport: MakeTransport = hccl) -> None:
        """Join: returns when every rank has, raises LostRanksError within the deadline otherwise.

        Args:
            place: where the group meets.
            transport: makes the process group; tests put Gloo in HCCL's place.
        """
        self._place = place
        self._name = f"HCCL group of {place.world_size} ranks at {place.address}"
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
                    raise self._broken
                time.sleep(_BUSY_POLL_S)
            work.wait()
        except RuntimeError as error:
            self._broken = self._roll_call.failure(what, error)
            raise self._broken from error


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.detach().contiguous().flatten().view(torch.uint8)
