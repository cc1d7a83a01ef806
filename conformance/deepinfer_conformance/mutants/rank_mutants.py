# ruff: noqa: ARG002 - the contract declares the arguments
"""Drivers whose ranks exchange wrongly, one mistake each; ranks make them by their class."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer.accelerator import Collectives
from deepinfer_conformance.mutants.hosts import RankedDriver
from deepinfer_conformance.ranks.gloo import GlooCollectives


class _Backwards(GlooCollectives):
    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        return super().all_gather(values).flip(0).cumsum(0, dtype=values.dtype)[-1]


class _OneRankLate(GlooCollectives):
    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        return super().all_gather(values).roll(1, 0)


class _SwappedRows(GlooCollectives):
    def all_to_all(self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> torch.Tensor:
        return super().all_to_all(rows, send_counts, receive_counts).flip(0)


class _AlwaysFromZero(GlooCollectives):
    def broadcast(self, values: torch.Tensor, source: int) -> torch.Tensor:
        return super().broadcast(values, 0)


class _Impatient(GlooCollectives):
    def barrier(self) -> None:
        return


class _Widened(GlooCollectives):
    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        return super().all_gather(values.to(torch.float32)).to(torch.float32)


class _Alone(GlooCollectives):
    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    def barrier(self) -> None:
        return


class BackwardsDriver(RankedDriver):
    """Adds in the opposite order of ranks."""

    def collectives(self, world_size: int) -> Collectives:
        """Join wrongly."""
        return _Backwards(world_size)


class OneRankLateDriver(RankedDriver):
    """Gathers with every rank's tensor in the next one's place."""

    def collectives(self, world_size: int) -> Collectives:
        """Join wrongly."""
        return _OneRankLate(world_size)


class SwappedRowsDriver(RankedDriver):
    """Returns received rows in the wrong order."""

    def collectives(self, world_size: int) -> Collectives:
        """Join wrongly."""
        return _SwappedRows(world_size)


class AlwaysFromZeroDriver(RankedDriver):
    """Broadcasts from rank 0 whoever is the source."""

    def collectives(self, world_size: int) -> Collectives:
        """Join wrongly."""
        return _AlwaysFromZero(world_size)


class ImpatientDriver(RankedDriver):
    """Passes barriers without waiting."""

    def collectives(self, world_size: int) -> Collectives:
        """Join wrongly."""
        return _Impatient(world_size)


class WidenedDriver(RankedDriver):
    """Returns everything in float32."""

    def collectives(self, world_size: int) -> Collectives:
        """Join wrongly."""
        return _Widened(world_size)


class AloneDriver(RankedDriver):
    """Does not notice that another rank is gone."""

    def collectives(self, world_size: int) -> Collectives:
        """Join wrongly."""
        return _Alone(world_size)
