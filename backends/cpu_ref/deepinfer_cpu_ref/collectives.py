"""Collectives over Gloo between processes of any hosts: exact bytes, sums in rank order, missing ranks by name.

Every exchange begins with a note from each rank to each other one: what it calls, and how much it sends and awaits.
So every exchange waits for every rank, and ranks that call different things are told so instead of hanging. Gloo never
says which rank it missed; `deepinfer.accelerator.roll_call` finds out.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, cast

import torch
from torch.distributed import ProcessGroupGloo

from deepinfer.accelerator.collectives import Collectives, RankPlace
from deepinfer.accelerator.roll_call import RollCall, time_left
from deepinfer.errors import DeepInferError, OpRefusedError

_NOTE_BYTES: Final = 256


class _Work(Protocol):
    def wait(self, timeout: datetime.timedelta) -> bool: ...


class _Pairs(Protocol):
    """What is used of torch's ProcessGroupGloo, whose own stub leaves it out."""

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> _Work: ...

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> _Work: ...


class GlooCollectives(Collectives):
    """One rank's membership of a group; any number of groups may live in a process."""

    def __init__(self, place: RankPlace) -> None:
        """Join the group: returns when every rank has, raises LostRanksError within the deadline otherwise."""
        self._place = place
        self._name = f"gloo group of {place.world_size} ranks at {place.address}"
        self._others = tuple(rank for rank in range(place.world_size) if rank != place.rank)
        self._number = 0
        self._broken: DeepInferError | None = None
        self._roll_call = RollCall(place, self._name)
        until = self._roll_call.join()
        try:
            group: Any = ProcessGroupGloo(self._roll_call.keys("pairs"), place.rank, place.world_size, time_left(until))
        except RuntimeError as error:
            raise self._roll_call.failure("connecting the ranks", error) from error
        self._pairs = cast("_Pairs", group)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._place.rank

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return self._place.world_size

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Gather, then add in rank order: Gloo's own reduction chooses its order by size."""
        gathered = self._gathered("all_reduce_sum", values)
        total = gathered[0].clone()
        for rank in range(1, self.world_size):
            total = total + gathered[rank]
        return total

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the ranks' tensors stacked."""
        return self._gathered("all_gather", values)

    def all_to_all(self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> torch.Tensor:
        """Exchange row ranges with uneven counts; pairs of ranks without rows exchange their notes alone."""
        if (
            rows.dim() == 0
            or sum(send_counts) != rows.shape[0]
            or len(send_counts) != self.world_size
            or len(receive_counts) != self.world_size
            or min(*send_counts, *receive_counts) < 0
        ):
            raise OpRefusedError(
                f"all_to_all of a tensor {tuple(rows.shape)} in a {self._name}: give {self.world_size} counts of 0 or "
                f"more each way, and send counts whose sum is its rows; got send {list(send_counts)} and receive "
                f"{list(receive_counts)}"
            )
        row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
        sent = torch.split(_bytes(rows), [count * row_bytes for count in send_counts])
        found = [sent[0].new_empty(count * row_bytes) for count in receive_counts]
        if send_counts[self.rank] != receive_counts[self.rank]:
            raise OpRefusedError(
                f"all_to_all in a {self._name}: rank {self.rank} sends itself {send_counts[self.rank]} rows and "
                f"awaits {receive_counts[self.rank]}"
            )
        found[self.rank].copy_(sent[self.rank])
        what = f"all_to_all of {_dtype(rows)} rows of {tuple(rows.shape[1:])}"
        self._exchange(what, dict(enumerate(sent)), dict(enumerate(found)))
        return torch.cat(found).view(rows.dtype).view(sum(receive_counts), *rows.shape[1:])

    def broadcast(self, values: torch.Tensor, source: int) -> torch.Tensor:
        """Return the source's tensor."""
        if not 0 <= source < self.world_size:
            raise OpRefusedError(f"broadcast from rank {source} in a {self._name}: there is no such rank")
        carried = _bytes(values).clone()
        is_source = source == self.rank
        self._exchange(
            f"broadcast of {_dtype(values)} {tuple(values.shape)} from rank {source}",
            dict.fromkeys(self._others, carried) if is_source else {},
            {} if is_source else {source: carried},
        )
        return carried.view(values.dtype).view(values.shape)

    def barrier(self) -> None:
        """Wait for all."""
        self._exchange("barrier", {}, {})

    # --- exchanges -------------------------------------------------------------------------------------------------

    def _gathered(self, name: str, values: torch.Tensor) -> torch.Tensor:
        mine = _bytes(values)
        found = [mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.world_size)]
        what = f"{name} of {_dtype(values)} {tuple(values.shape)}"
        self._exchange(what, dict.fromkeys(self._others, mine), dict(enumerate(found)))
        return torch.cat(found).view(values.dtype).view(self.world_size, *values.shape)

    def _exchange(self, what: str, sent: Mapping[int, torch.Tensor], found: Mapping[int, torch.Tensor]) -> None:
        """Send bytes to ranks and fill the tensors of others, after everybody has said the same ``what``."""
        if self._broken is not None:
            raise self._broken
        self._number += 1
        until = self._roll_call.deadline()
        try:
            self._try_exchange(f"call {self._number}, {what}", sent, found, until)
        except RuntimeError as error:
            self._broken = self._roll_call.failure(what, error)
            raise self._broken from error

    def _try_exchange(
        self, what: str, sent: Mapping[int, torch.Tensor], found: Mapping[int, torch.Tensor], until: float
    ) -> None:
        notes = {other: torch.zeros(_NOTE_BYTES, dtype=torch.uint8) for other in self._others}
        mine = {other: _note(what, _size(sent, other), _size(found, other)) for other in self._others}
        arriving = {other: self._pairs.recv([notes[other]], other, 0) for other in self._others}
        leaving = [self._pairs.send([mine[other]], other, 0) for other in self._others]
        leaving += [self._pairs.send([sent[other]], other, 0) for other in self._others if _size(sent, other)]
        for other in self._others:
            arriving[other].wait(time_left(until))
        problems = [problem for other in self._others for problem in self._disagreements(other, what, notes, mine)]
        if problems:
            self._broken = OpRefusedError(f"{self._name}, rank {self.rank}: {'; '.join(problems)}")
            self._roll_call.report(str(self._broken))
            raise self._broken
        incoming = [self._pairs.recv([found[other]], other, 0) for other in self._others if _size(found, other)]
        for work in (*incoming, *leaving):
            work.wait(time_left(until))

    def _disagreements(
        self, other: int, what: str, notes: Mapping[int, torch.Tensor], mine: Mapping[int, torch.Tensor]
    ) -> Iterable[str]:
        theirs, their_sent, their_awaited = _read_note(notes[other])
        text, my_sent, my_awaited = _read_note(mine[other])
        if theirs != text:
            yield f"this rank is at {what}, rank {other} at {theirs}"
        elif (their_sent, their_awaited) != (my_awaited, my_sent):
            yield (
                f"{what}: this rank sends {my_sent} bytes to rank {other} and awaits {my_awaited}; rank {other} "
                f"awaits {their_awaited} and sends {their_sent}"
            )


def _dtype(values: torch.Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.detach().contiguous().flatten().view(torch.uint8)


def _size(tensors: Mapping[int, torch.Tensor], rank: int) -> int:
    return tensors[rank].numel() if rank in tensors else 0


def _note(what: str, sent_bytes: int, awaited_bytes: int) -> torch.Tensor:
    numbers = f"|{sent_bytes}|{awaited_bytes}"
    text = what[: _NOTE_BYTES - len(numbers)] + numbers
    return torch.frombuffer(bytearray(text.encode("ascii").ljust(_NOTE_BYTES, b"\0")), dtype=torch.uint8)


def _read_note(note: torch.Tensor) -> tuple[str, int, int]:
    text, sent, awaited = bytes(note.numpy()).rstrip(b"\0").decode("ascii").rsplit("|", 2)
    return text, int(sent), int(awaited)
