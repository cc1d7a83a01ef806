"""A group under its name in this engine: errors say which group and which ranks of the world; calls can be recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from deepinfer.accelerator import Collectives, LostRanksError


class RecordedCall(NamedTuple):
    """One exchange as every rank of its group must have made it.

    Attributes:
        group: the group's name, its ranks included.
        op: what was called.
        shape: of the tensor; of one row, where ranks send as many rows as they have.
        dtype: of the tensor.
    """

    group: str
    op: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(slots=True)
class Recorder:
    """The exchanges of one rank, in the order in which it began them.

    Attributes:
        calls: of all its groups. Within a group the order is that of all its ranks; how calls of two groups lie between
            each other may differ from rank to rank, where a device's queue makes those of one and the host the others.
    """

    calls: list[RecordedCall] = field(default_factory=list)

    def note(self, group: str, op: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Append a call."""
        self.calls.append(RecordedCall(group, op, tuple(shape), str(dtype).removeprefix("torch.")))


class NamedGroup(Collectives):
    """Collectives that know who they are.

    Attributes:
        name: what the group is for, and its ranks.
        members: the numbers in the world of its ranks, in their order in the group.
        is_broken: an exchange has failed, and the group is of no use any more.
    """

    is_broken = False

    def __init__(
        self, inner: Collectives, purpose: str, members: Sequence[int], recorder: Recorder | None = None
    ) -> None:
        """Wrap ``inner``; its rank r is rank ``members[r]`` of the world."""
        self.name = f"{purpose} group of ranks {', '.join(map(str, members))}"
        self.members = tuple(members)
        self._inner = inner
        self._recorder = recorder

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._inner.rank

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return self._inner.world_size

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks."""
        return self._called("all_reduce_sum", values, lambda: self._inner.all_reduce_sum(values))

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the ranks' tensors stacked."""
        return self._called("all_gather", values, lambda: self._inner.all_gather(values))

    def all_to_all(self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> torch.Tensor:
        """Exchange row ranges."""
        if self._recorder is not None:
            self._recorder.note(self.name, "all_to_all", rows.shape[1:], rows.dtype)
        with self._naming():
            return self._inner.all_to_all(rows, send_counts, receive_counts)

    def broadcast(self, values: torch.Tensor, source: int) -> torch.Tensor:
        """Return the tensor of rank ``source`` of the group."""
        return self._called(f"broadcast from {source}", values, lambda: self._inner.broadcast(values, source))

    def barrier(self) -> None:
        """Wait for all."""
        if self._recorder is not None:
            self._recorder.note(self.name, "barrier", (), torch.uint8)
        with self._naming():
            self._inner.barrier()

    def _called(self, op: str, values: torch.Tensor, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._recorder is not None:
            self._recorder.note(self.name, op, values.shape, values.dtype)
        with self._naming():
            return call()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except LostRanksError as error:
            self.is_broken = True
            missing = [self.members[rank] for rank in error.missing]
            raise LostRanksError(f"rank {self.members[self.rank]}, {self.name}", missing, str(error)) from error
        except BaseException:
            self.is_broken = True
            raise
