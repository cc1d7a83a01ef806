# ruff: noqa: ARG002 - the contract declares the arguments
"""Drivers whose ranks exchange wrongly, one mistake each; ranks make them by their class."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from deepinfer.accelerator import Collectives, LostRanksError, RankPlace
from deepinfer_conformance.mutants.hosts import Borrowed


class _Group(Collectives):
    """The reference's group, for subclasses that change one exchange of it."""

    def __init__(self, inner: Collectives) -> None:
        self._inner = inner

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def world_size(self) -> int:
        return self._inner.world_size

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        return self._inner.all_reduce_sum(values)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        return self._inner.all_gather(values)

    def all_to_all(self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> torch.Tensor:
        return self._inner.all_to_all(rows, send_counts, receive_counts)

    def broadcast(self, values: torch.Tensor, source: int) -> torch.Tensor:
        return self._inner.broadcast(values, source)

    def barrier(self) -> None:
        self._inner.barrier()


class _Backwards(_Group):
    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        return self.all_gather(values).flip(0).cumsum(0, dtype=values.dtype)[-1]


class _OneRankLate(_Group):
    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        return super().all_gather(values).roll(1, 0)


class _SwappedRows(_Group):
    def all_to_all(self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> torch.Tensor:
        return super().all_to_all(rows, send_counts, receive_counts).flip(0)


class _AlwaysFromZero(_Group):
    def broadcast(self, values: torch.Tensor, source: int) -> torch.Tensor:
        return super().broadcast(values, 0)


class _Impatient(_Group):
    def barrier(self) -> None:
        return


class _Widened(_Group):
    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        return super().all_gather(values.to(torch.float32)).to(torch.float32)


class _Lossy(_Group):
    """Bytes go through a number format on their way, which keeps all codes but those of NaN."""

    def all_to_all(self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> torch.Tensor:
        received = super().all_to_all(rows, send_counts, receive_counts)
        if rows.dtype != torch.uint8:
            return received
        return (
            received.view(torch.float8_e4m3fn).float().nan_to_num(nan=448.0).to(torch.float8_e4m3fn).view(torch.uint8)
        )


class _Alone(_Group):
    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()


class _Mistaken(_Group):
    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        try:
            return super().all_reduce_sum(values)
        except LostRanksError as error:
            raise LostRanksError("a group", (0,), "blames the wrong rank") from error


class _GroupDriver(Borrowed):
    group: type[_Group]

    def join_group(self, place: RankPlace) -> Collectives:
        """Join wrongly."""
        return self.group(super().join_group(place))


class BackwardsDriver(_GroupDriver):
    """Adds in the opposite order of ranks."""

    group = _Backwards


class OneRankLateDriver(_GroupDriver):
    """Gathers with every rank's tensor in the next one's place."""

    group = _OneRankLate


class SwappedRowsDriver(_GroupDriver):
    """Returns received rows in the wrong order."""

    group = _SwappedRows


class AlwaysFromZeroDriver(_GroupDriver):
    """Broadcasts from rank 0 whoever is the source."""

    group = _AlwaysFromZero


class ImpatientDriver(_GroupDriver):
    """Passes barriers without waiting."""

    group = _Impatient


class WidenedDriver(_GroupDriver):
    """Returns everything in float32."""

    group = _Widened


class LossyDriver(_GroupDriver):
    """Does not carry bytes as bytes."""

    group = _Lossy


class AloneDriver(_GroupDriver):
    """Does not notice that another rank is gone."""

    group = _Alone


class MistakenDriver(_GroupDriver):
    """Blames a rank that is there."""

    group = _Mistaken


class PatientDriver(Borrowed):
    """Waits three times as long as it may."""

    def join_group(self, place: RankPlace) -> Collectives:
        """Join with another deadline."""
        return super().join_group(dataclasses.replace(place, deadline_s=3 * place.deadline_s))


class NamelessDriver(Borrowed):
    """Says that somebody is missing, and not who."""

    def join_group(self, place: RankPlace) -> Collectives:
        """Join, or complain in general."""
        try:
            return super().join_group(place)
        except LostRanksError as error:
            raise LostRanksError("a group", (), "somebody is missing") from error
