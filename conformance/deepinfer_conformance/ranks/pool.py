"""A group of rank processes: started, given one exchange, watched; the parent names the rank that died."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from deepinfer.accelerator import AcceleratorDriver, RankPlace

START_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 30.0
_BEGIN = "begin"


@dataclass(frozen=True, slots=True)
class RankReport:
    """What became of one rank.

    Attributes:
        rank: its number.
        problems: what it found wrong, in words.
        died: exit status of a rank that ended without an answer, else None.
        seconds: from the word to begin, which comes when every rank has its driver, to its answer.
    """

    rank: int
    problems: tuple[str, ...]
    died: int | None
    seconds: float


def maker_of(driver: AcceleratorDriver) -> str:
    """Return "module:class" by which a rank can make the same driver; it is constructed without arguments."""
    return f"{type(driver).__module__}:{type(driver).__qualname__}"


def run_ranks(maker: str, world: int, check: str, *, deadline_s: float) -> list[RankReport]:
    """Run one exchange on a fresh group of ``world`` ranks and return a report a rank.

    Ranks begin together once each has its driver, so that the group's deadline measures the group and not the start of
    processes. A rank that has answered stays alive until all have.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "deepinfer_conformance.ranks.exchanges"])
    with tempfile.TemporaryDirectory() as folder:
        address = f"127.0.0.1:{_free_port()}"
        pipes: list[Connection] = []
        processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            place = RankPlace(rank, world, address, deadline_s)
            arguments = (place, maker, check, folder, theirs)
            process = context.Process(target=_serve, args=arguments, name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            started = _collect(pipes, processes, START_TIMEOUT_S)
            if any(report.problems or report.died is not None for report in started):
                return started
            for pipe in pipes:
                pipe.send(_BEGIN)
            return _collect(pipes, processes, deadline_s + _ANSWER_TIMEOUT_S)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join(10)
            for pipe in pipes:
                pipe.close()


def _collect(pipes: Sequence[Connection], processes: Sequence[Any], limit_s: float) -> list[RankReport]:
    """Return one message of every rank, or what became of it."""
    begun = time.monotonic()
    reports: dict[int, RankReport] = {}
    while len(reports) < len(pipes) and time.monotonic() - begun < limit_s:
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in reports]
        for ready in wait(open_pipes, timeout=max(0.0, limit_s - (time.monotonic() - begun))):
            rank = next(number for number, pipe in enumerate(pipes) if pipe is ready)
            try:
                problems = pipes[rank].recv()
            except EOFError:
                processes[rank].join(5)
                status = processes[rank].exitcode
                reports[rank] = RankReport(rank, (), status, time.monotonic() - begun)
            else:
                reports[rank] = RankReport(rank, tuple(problems), None, time.monotonic() - begun)
    for rank in range(len(pipes)):
        if rank not in reports:
            reports[rank] = RankReport(rank, (f"no answer within {limit_s:g} s",), None, limit_s)
    return [reports[rank] for rank in range(len(pipes))]


def _serve(place: RankPlace, maker: str, check: str, folder: str, pipe: Connection) -> None:
    os.environ.update(
        RANK=str(place.rank),
        LOCAL_RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        MASTER_ADDR=place.host,
        MASTER_PORT=str(place.port),
        GLOO_SOCKET_IFNAME="lo",
    )
    import torch

    from deepinfer_conformance.ranks.exchanges import ACTS, Seat

    torch.set_num_threads(1)
    try:
        module, _, name = maker.partition(":")
        driver: AcceleratorDriver = getattr(importlib.import_module(module), name)()
        pipe.send([])
        pipe.recv()
        seat = Seat(driver, place, Path(folder))
        problems = ACTS[check](seat)
    except Exception as error:  # noqa: BLE001 - a rank's error is its report
        problems = [f"{type(error).__name__}: {error}"]
    pipe.send(problems)
    with contextlib.suppress(EOFError):
        pipe.recv()
    # No orderly end of the group: after a dead rank there is none, and the answer is out.
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
