"""Many cases over a few children: results in the order of the cases, whatever happens to one of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from deepinfer.accelerator import registry
from deepinfer_conformance.case import Case
from deepinfer_conformance.outcomes import CaseResult, Outcome
from deepinfer_conformance.report.plain import result_from_json
from deepinfer_conformance.runner.process import Child, ChildDiedError, ChildHungError, Order

Watcher = Callable[[Case, CaseResult], None]


@dataclass(frozen=True, slots=True)
class PoolRun:
    """What a run gave: results in the order of the cases, and what the first child said of the driver."""

    results: tuple[CaseResult, ...]
    facts: Mapping[str, Any]


def run_in_children(cases: Sequence[Case], order: Order, *, jobs: int = 1, watcher: Watcher | None = None) -> PoolRun:
    """Run cases in ``jobs`` child processes.

    A crash or a hang is the outcome of its case; a new child goes on with the next one.

    Raises:
        DriverLoadError: the driver cannot be started at all.
    """
    if order.driver not in registry.installed_names():
        registry.load(order.driver)  # raises with the names that are installed, without starting anything
    first = Child(order)
    facts = first.facts
    waiting: SimpleQueue[int] = SimpleQueue()
    for number in range(len(cases)):
        waiting.put(number)
    run = _Run(cases, order, waiting, watcher)
    workers = [
        threading.Thread(target=run.work, args=(first if number == 0 else None,)) for number in range(max(1, jobs))
    ]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    except BaseException:
        run.stop()
        for worker in workers:
            worker.join()
        raise
    if run.failure is not None:
        raise run.failure
    return PoolRun(tuple(run.results[number] for number in range(len(cases))), facts)


class _Run:
    def __init__(self, cases: Sequence[Case], order: Order, waiting: SimpleQueue[int], watcher: Watcher | None) -> None:
        self._cases = cases
        self._order = order
        self._waiting = waiting
        self._watcher = watcher
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.results: dict[int, CaseResult] = {}
        self.failure: Exception | None = None

    def stop(self) -> None:
        self._stopped.set()

    def work(self, child: Child | None) -> None:
        try:
            while not self._stopped.is_set():
                try:
                    number = self._waiting.get_nowait()
                except Empty:
                    return
                if child is None:
                    child = Child(self._order)
                case = self._cases[number]
                started = time.perf_counter()
                try:
                    result = result_from_json(child.run(case.id, case.timeout_s))
                except (ChildDiedError, ChildHungError) as error:
                    child.close()
                    child = None
                    result = lost(case, error, time.perf_counter() - started)
                with self._lock:
                    self.results[number] = result
                    if self._watcher is not None:
                        self._watcher(case, result)
        except Exception as error:  # noqa: BLE001 - carried to the caller's thread
            self.failure = error
            self.stop()
        finally:
            if child is not None:
                child.close()


def lost(case: Case, error: ChildDiedError | ChildHungError, seconds: float) -> CaseResult:
    """Return the result of a case that took its process down or hung."""
    return CaseResult(
        id=case.id,
        op=case.op,
        level=case.level,
        check=case.check,
        dtype=str(case.options.activation_dtype).removeprefix("torch."),
        numerics=case.options.numerics,
        kv_cache_dtype=case.options.kv_cache_dtype,
        how="device",
        outcome=Outcome.TIMEOUT if isinstance(error, ChildHungError) else Outcome.CRASH,
        metric="",
        value=None,
        bound=None,
        reference_error=None,
        seed=case.seed,
        input_sha256="",
        seconds=round(seconds, 4),
        detail=str(error),
    )
