"""Collectives on the device group: every rank joins every exchange in the same order with the same shapes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from deepinfer.errors import OpRefusedError


class Collectives(ABC):
    """The exchanges of one group of ranks.

    Every call raises within the group's deadline when a rank does not join, naming the group. Tensors are dense;
    results are new tensors unless the docstring says otherwise.
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
