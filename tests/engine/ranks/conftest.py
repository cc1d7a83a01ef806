"""Ranks as threads of this process, each with an engine and memberships of its own; no driver is shared."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer.accelerator import AcceleratorDriver, LostRanksError
from deepinfer.engine.build import build_engine_on
from deepinfer.engine.engine import Engine
from deepinfer.engine.options import EngineOptions
from deepinfer.engine.worker import Worker
from deepinfer.parallel.loads import LoadWindow
from deepinfer.parallel.placement import Layout
from deepinfer.parallel.ranks.groups import RankGroups, free_port, join_groups
from deepinfer.parallel.ranks.recording import Recorder
from deepinfer.settings import LaunchedRank, Settings
from deepinfer_conformance.drivers import NullDriver

SIZES = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "async_scheduling": False, "rank_deadline_s": 20.0}


class Turning:
    """Moves every expert of every layer at every plan, whatever the load; a layer's experts turn by its number."""

    name = "turning"

    def __init__(self) -> None:
        self.windows: list[LoadWindow] = []

    def plan(self, window: LoadWindow, layout_LS: Layout, ranks: int) -> Layout:
        self.windows.append(window)
        return np.stack([np.roll(slots, layer + 1) for layer, slots in enumerate(layout_LS)])


class Seat:
    """What one rank has in its hands."""

    def __init__(self, engine: Engine, groups: RankGroups, recorder: Recorder) -> None:
        self.engine, self.groups, self.recorder = engine, groups, recorder

    @property
    def spread(self) -> Any:
        """The experts that this rank holds with others."""
        return self.engine.worker._transformer.weights.spread

    def turn_experts(self) -> Turning:
        """Let a policy plan from now on that always moves."""
        self.spread._balancer._policy = turning = Turning()
        return turning


class StageError(Exception):
    """What goes wrong on the rank at fault."""


class Strike:
    """Something that goes wrong at an exchange of one rank, while the others wait for it."""

    error = StageError

    def __init__(self) -> None:
        self._is_over = threading.Event()

    def __call__(self, group: Any, stage: str, how: str, *, nth: int = 1) -> None:
        """Let the nth exchange of that kind raise from now on, or never begin until :meth:`end`."""
        inner, calls = group._inner, itertools.count(1)
        right = getattr(inner, stage)

        def struck(*arguments: Any) -> Any:
            if next(calls) < nth:
                return right(*arguments)
            setattr(inner, stage, right)
            if how == "is silent":
                self._is_over.wait(60)
            raise StageError(f"struck at {stage}")

        setattr(inner, stage, struck)

    def end(self) -> None:
        """Wake who is silent: nobody waits for it any more."""
        self._is_over.set()


@pytest.fixture
def strike() -> Strike:
    """See :class:`Strike`."""
    return Strike()


@pytest.fixture
def together(tiny_directory: Path) -> Callable[..., list[Any]]:
    """Let every rank of a group build an engine and act; return what each gave, in rank order."""

    def run(
        world: int,
        act: Callable[[Seat], Any],
        driver: Callable[[], AcceleratorDriver] = NullDriver,
        model: Path | None = tiny_directory,
        worker_type: type[Worker] = Worker,
        **options: Any,
    ) -> list[Any]:
        port, finished = free_port(), threading.Barrier(world)
        chosen = EngineOptions(**{**SIZES, **options})
        errors: list[Exception] = []  # raised; an act may return one that it has caught

        def one(rank: int) -> Any:
            recorder = Recorder()
            try:
                own = driver()
                groups = join_groups(
                    LaunchedRank(rank, world, rank, world, "127.0.0.1", port),
                    own,
                    expert_parallel_size=chosen.expert_parallel_size,
                    deadline_s=chosen.rank_deadline_s,
                    context_parallel_size=chosen.context_parallel_size,
                    spreads_tables=chosen.spread_ngram_tables,
                    recorder=recorder,
                )
                engine = build_engine_on(own, model, chosen, Settings(), worker_type=worker_type, ranks=groups)
                return act(Seat(engine, groups, recorder))
            except Exception as error:  # noqa: BLE001 - raised below, by who is at fault
                errors.append(error)
                return None
            finally:
                finished.wait(60)  # nobody's membership is dropped while others still look at it

        with ThreadPoolExecutor(world) as pool:
            found = list(pool.map(one, range(world)))
        # Who was waited for in vain has the reason; those who waited only say so.
        for error in sorted(errors, key=lambda each: isinstance(each, LostRanksError)):
            raise error
        return found

    return run
