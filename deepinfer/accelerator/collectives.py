"""Collectives on the device group: every rank joins every exchange in the same order with the same shapes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from deepinfer.errors import ArgumentError, DeepInferError, OpRefusedError

DEADLINE_S: Final = 60.0
_LAST_PORT: Final = 65535


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank stands in a group, and how it finds the others; interface 1.1.

    The same value but for ``rank`` is given to every rank of the group. Nothing else, the environment included, tells
    a driver how to join.

    Attributes:
        rank: this rank's number, from 0.
        world_size: ranks in the group.
        address: "host:port" at which rank 0 listens while the group lives and the others find it; the port is free.
            An IPv6 host stands in brackets.
        deadline_s: seconds within which the others must join the group, and every exchange after that.
    """

    rank: int
    world_size: int
    address: str
    deadline_s: float = DEADLINE_S

    def __post_init__(self) -> None:
        """Refuse a place that cannot be, with everything that is wrong."""
        problems = []
        if self.world_size < 1:
            problems.append(f"world_size {self.world_size!r}: a group has one rank or more")
        elif not 0 <= self.rank < self.world_size:
            problems.append(f"rank {self.rank!r}: a group of {self.world_size} has ranks 0 to {self.world_size - 1}")
        host, colon, port = self.address.rpartition(":")
        if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) <= _LAST_PORT):
            problems.append(f"address {self.address!r}: write host:port with a port from 1 to {_LAST_PORT}")
        if not (math.isfinite(self.deadline_s) and self.deadline_s > 0):
            problems.append(f"deadline_s {self.deadline_s!r}: write a number of seconds above 0")
        if problems:
            raise ArgumentError("place of a rank", problems)

    @property
    def host(self) -> str:
        """The host of the address, without brackets."""
        return self.address.rpartition(":")[0].removeprefix("[").removesuffix("]")

    @property
    def port(self) -> int:
        """The port of the address."""
        return int(self.address.rpartition(":")[2])


class LostRanksError(DeepInferError):
    """Ranks did not join a group, or an exchange of it, within the deadline.

    Attributes:
        missing: their numbers, ascending; empty where it cannot be known, and the message then says why.
        group: the group's name.
        what: what they did not join, and how that was seen.
    """

    def __init__(self, group: str, missing: Iterable[int], what: str) -> None:
        self.missing = tuple(sorted(missing))
        self.group, self.what = group, what
        who = ", ".join(f"rank {rank}" for rank in self.missing) or "a rank that cannot be told"
        super().__init__(
            f"{group}: {what}: {who} did not join. Look at the log of that rank, then start the group anew."
        )

    def __reduce__(self) -> tuple[type[LostRanksError], tuple[str, tuple[int, ...], str]]:
        """Come out of another process as what went in."""
        return type(self), (self.group, self.missing, self.what)


class Collectives(ABC):
    """The exchanges of one group of ranks.

    Every call raises :class:`LostRanksError` within the group's deadline when a rank does not join, with the ranks
    that are missing wherever that can be known; the group is of no use after that. Tensors are dense; results are
    new tensors unless the docstring says otherwise. Bytes arrive as they were: a dtype that an exchange does not know
    travels as its ``view(torch.uint8)``.
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """This rank's number in the group."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks in the group."""

    @abstractmethod
    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the elementwise sum over ranks, added in rank order."""

    @abstractmethod
    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the ranks' equally shaped tensors stacked along a new first dimension, in rank order."""

    @abstractmethod
    def all_to_all(self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> torch.Tensor:
        """Send ``send_counts[r]`` consecutive rows to rank r and return the received rows in rank order.

        Counts may be zero and uneven; ``sum(send_counts)`` must be the number of rows.
        """

    @abstractmethod
    def broadcast(self, values: torch.Tensor, source: int) -> torch.Tensor:
        """Return the tensor of rank ``source``."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""


class SoloCollectives(Collectives):
    """The group of one rank: every exchange is with itself."""

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def world_size(self) -> int:
        """Always 1."""
        return 1

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy."""
        return values.clone()

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy with a first dimension of one."""
        return values.unsqueeze(0).clone()

    def all_to_all(self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> torch.Tensor:
        """Return a copy of ``rows`` after checking that the counts describe it."""
        if list(send_counts) != [rows.shape[0]] or list(receive_counts) != [rows.shape[0]]:
            raise OpRefusedError(
                f"all_to_all in a group of one with {rows.shape[0]} rows: both counts must be [{rows.shape[0]}], "
                f"got send {list(send_counts)} and receive {list(receive_counts)}"
            )
        return rows.clone()

    def broadcast(self, values: torch.Tensor, source: int) -> torch.Tensor:
        """Return a copy; the only source is rank 0."""
        if source != 0:
            raise OpRefusedError(f"broadcast from rank {source} in a group of one: the only rank is 0")
        return values.clone()

    def barrier(self) -> None:
        """Return at once."""
