"""A group of threads that exchange through shared lists: as many ranks as wanted, at no cost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from deepinfer.accelerator import Collectives


class ThreadGroup(Collectives):
    """One thread's membership; results are copies, as between processes."""

    rank = 0  # type: ignore[assignment]  # set per instance
    world_size = 1  # type: ignore[assignment]

    def __init__(self, rank: int, world_size: int, boards: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, world_size  # type: ignore[misc]
        self._boards, self._barrier = boards, barrier

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._shown(values))

    def all_to_all(self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> torch.Tensor:
        parts = torch.split(rows, list(send_counts))
        found = [shown[self.rank] for shown in self._shown(parts)]
        assert [len(part) for part in found] == list(receive_counts)
        return torch.cat(found)

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        return self.all_gather(values).sum(0)

    def broadcast(self, values: torch.Tensor, source: int) -> torch.Tensor:
        return torch.as_tensor(self._shown(values)[source]).clone()

    def barrier(self) -> None:
        self._barrier.wait(20)

    def _shown(self, value: Any) -> list[Any]:
        self._boards[self.rank] = value
        self._barrier.wait(20)
        found = list(self._boards)
        self._barrier.wait(20)
        return found


@pytest.fixture
def in_threads() -> Callable[[int, Callable[[Collectives], Any]], list[Any]]:
    """Let every rank of a group act; return what each gave, in rank order."""

    def run(world: int, act: Callable[[Collectives], Any]) -> list[Any]:
        boards: list[Any] = [None] * world
        barrier = threading.Barrier(world)

        def one(rank: int) -> Any:
            try:
                return act(ThreadGroup(rank, world, boards, barrier))
            except BaseException:
                barrier.abort()
                raise

        with ThreadPoolExecutor(world) as pool:
            return list(pool.map(one, range(world)))

    return run
