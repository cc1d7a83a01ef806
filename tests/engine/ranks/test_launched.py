"""Ranks that a launcher has started, when one of them fails: every request ends, on every rank that is left."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.accelerator import LostRanksError
from deepinfer.engine.options import EngineOptions
from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.ranks.launched import LaunchedEngine
from deepinfer.errors import DuplicateRequestError, RankFailedError
from deepinfer.parallel.ranks.groups import free_port
from deepinfer.settings import LaunchedRank, Settings

SIZES: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "async_scheduling": False}
DEADLINE_S = 2.0
GRACE_S = 8.0  # what a busy machine may add

Launched = Callable[..., list[Any]]


@pytest.fixture
def launched(tiny_directory: Path) -> Launched:
    """Let two ranks, threads of this process, build their engines and act; return what each gave, in rank order."""

    def run(act: Callable[[LaunchedEngine], Any], **options: Any) -> list[Any]:
        port, finished = free_port(), threading.Barrier(2)
        chosen = EngineOptions(**{**SIZES, "rank_deadline_s": DEADLINE_S, **options})

        def one(rank: int) -> Any:
            place = LaunchedRank(rank, 2, rank, 2, "127.0.0.1", port)
            try:
                return act(LaunchedEngine(place, tiny_directory, "cpu_ref", chosen, Settings()))
            finally:
                finished.wait(60)  # nobody's membership is dropped while others still look at it

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, range(2)))

    return run


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def strike_at(engine: LaunchedEngine, strike: Any, where: str, how: str) -> None:
    """Let something go wrong on this rank in its next step."""
    groups, right = engine._groups, engine.engine.step

    def stepped() -> list[RequestOutput]:
        records = right()
        strike(groups.host, "all_gather", how)
        return records

    def failing(*arguments: Any) -> Any:
        raise strike.error("the driver failed")

    if where == "has-work":
        engine.engine.step = stepped
    elif where == "layers":
        engine.engine.worker.run = failing
    else:
        strike(getattr(groups, {"vote": "host", "dispatch": "experts"}[where]), "all_gather", how)


@pytest.mark.parametrize(
    ("where", "how", "expert_parallel_size"),
    [
        ("has-work", "raises", 1),
        ("has-work", "is silent", 1),
        ("vote", "raises", 1),
        ("dispatch", "is silent", 2),
        ("layers", "raises", 2),
    ],
)
def test_every_request_ends_on_every_rank_with_what_it_got_there(
    launched: Launched, strike: Any, where: str, how: str, expert_parallel_size: int
) -> None:
    def act(engine: LaunchedEngine) -> Any:
        # Dealt out in turns: "a" and "c" are rank 0's, "b" and "d" rank 1's.
        for name, most in (("a", 3), ("b", 20), ("c", 20), ("d", 1)):
            engine.add_request(name, [5, 6, 7], params(most))
        engine.step()
        engine.step()
        if engine.rank == 1:
            strike_at(engine, strike, where, how)
        begun_s = time.monotonic()
        with pytest.raises((LostRanksError, strike.error)) as failed:
            engine.step()
        took_s = time.monotonic() - begun_s
        strike.end()
        assert engine.has_unfinished_requests()
        with pytest.raises(RankFailedError, match="rank 1"):
            engine.abort_request("c")
        records = engine.step()
        assert not engine.has_unfinished_requests()
        assert engine.step() == []
        with pytest.raises(RankFailedError, match="rank 1"):
            engine.add_request("a", [5], params(1))
        engine.close()
        return failed.value, took_s, records

    (lost, took_s, first), (fault, _, second) = launched(act, expert_parallel_size=expert_parallel_size)
    assert isinstance(lost, LostRanksError)
    assert lost.missing == (1,)
    group = "host" if where in ("has-work", "vote") else "expert"
    assert f"{group} group of ranks 0, 1" in str(lost)
    assert took_s < DEADLINE_S + GRACE_S
    assert isinstance(fault, strike.error)
    # What the failed call computed before the vote is not lost; "d" had ended, and rank 1 had told so.
    got = 3 if where == "has-work" else 2
    tokens = [{record.request_id: len(record.outputs[0].token_ids) for record in each} for each in (first, second)]
    assert tokens == [{"a": got, "b": 0, "c": got, "d": 0}, {"a": 0, "b": got, "c": 0}]
    for record in (*first, *second):
        (answer,) = record.outputs
        assert record.finished
        if where == "has-work" and record is first[0]:
            assert answer.finish_reason == "length"
        else:
            assert answer.finish_reason == "abort"
            is_own_step = record in second and where in ("dispatch", "layers") and record.request_id == "b"
            assert ("the step failed: StageError" if is_own_step else "rank 1") in str(answer.message)


def test_a_fault_of_a_driver_ends_the_requests_of_its_rank_and_the_others_hear_of_them(launched: Launched) -> None:
    def act(engine: LaunchedEngine) -> Any:
        for name in ("a", "b"):
            engine.add_request(name, [5, 6, 7], params(3))
        records, faults, right, votes = engine.step(), 0, engine.engine.worker.run, []

        def failing(*arguments: Any) -> Any:
            engine.engine.worker.run = right
            raise ZeroDivisionError("the driver failed")

        if engine.rank == 1:
            engine.engine.worker.run = failing
        while engine.has_unfinished_requests():
            try:
                records += engine.step()
            except ZeroDivisionError:
                faults += 1
            votes.append(engine._groups.votes.cast)  # nobody leaves out one that the others have cast
        ends = {record.request_id: record.outputs[0].finish_reason for record in records if record.finished}
        return faults, ends, votes

    first, second = launched(act)
    assert (first[0], second[0]) == (0, 1)
    assert first[1] == second[1] == {"a": "length", "b": "abort"}
    assert first[2] == second[2]


def test_an_id_is_refused_on_every_rank_or_on_none(launched: Launched) -> None:
    def act(engine: LaunchedEngine) -> Any:
        engine.add_request("a", [5], replace(params(2), n=2))
        engine.add_request("b", [5], params(2))
        for taken in ("a", "a/1"):
            with pytest.raises(DuplicateRequestError):
                engine.add_request(taken, [5], params(2))
        engine.add_request("c", [5], params(2))
        records: list[RequestOutput] = []
        while engine.has_unfinished_requests():
            records += engine.step()
        served = engine.stats().emitted_tokens
        return served, sorted(record.request_id for record in records if record.finished)

    assert launched(act) == [(6, ["a", "b", "c"]), (2, ["a", "b", "c"])]


@pytest.mark.parametrize(("call", "cut_off"), [("generate", True), ("stream", False)])
def test_a_call_raises_what_went_wrong_and_the_next_one_that_nobody_is_left(
    launched: Launched, call: str, *, cut_off: bool
) -> None:
    class GoneError(Exception):
        pass

    error = KeyboardInterrupt if cut_off else GoneError

    def act(engine: LaunchedEngine) -> Any:
        right = engine._groups.votes.any_rank

        def failing(*, says_yes: bool) -> bool:
            if engine.steps_left == 0:
                raise error
            engine.steps_left -= 1
            return right(says_yes=says_yes)

        llm: Any = LLM.from_engine(engine)
        prompts, caught = [[5, 6, 7], [8, 9]], []
        if engine.rank == 1:
            engine.steps_left = 3
            engine._groups.votes.any_rank = failing
        for _ in range(2):
            try:
                found = llm.generate(prompts, params(9), use_tqdm=False) if call == "generate" else None
                found = list(llm.stream(prompts, params(9))) if found is None else found
            except BaseException as raised:  # noqa: BLE001 - Ctrl-C too
                caught.append(raised)
        assert not engine.has_unfinished_requests()
        llm.close()
        return caught

    # Where no layer waits for other ranks, a call that was cut off has left out a vote all the same.
    (lost, gone), (fault, over) = launched(act, expert_parallel_size=1 if cut_off else 2)
    assert (type(lost), type(fault)) == (LostRanksError, error)
    for each in (gone, over):
        assert isinstance(each, RankFailedError)
        assert each.ranks == (1,)


PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
import mortal
mortal.arm({rank}, {fate!r})
from deepinfer.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("mortal", [1, 0])  # rank 0 holds the store in which the others look for who is missing
def test_a_process_that_dies_is_named_by_the_one_that_is_left(tiny_directory: Path, mortal: int) -> None:
    deadline_s, port, started = 30, free_port(), []
    program = PROGRAM.format(folder=str(Path(__file__).parent), rank=mortal, fate="engine.stepped host.all_gather")
    arguments = [
        *("generate", "--prompt-ids", "5,6,7", "--prompt-ids", "8,9", "--max-tokens", "9", "--ignore-eos"),
        *("--model", str(tiny_directory), "--accelerator", "cpu_ref", "--block-size", "4", "--num-blocks", "64"),
        *("--max-num-seqs", "8", "--rank-deadline-s", str(deadline_s)),
    ]
    for rank in range(2):
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", **{name: str(said) for name, said in places.items()}}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, "-c", program, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environment, **pipes))
    dead, left = started[mortal], started[1 - mortal]
    try:
        assert dead.wait(100) == -9
        died_s = time.monotonic()
        words = left.communicate(timeout=deadline_s)[1]
        took_s = time.monotonic() - died_s
    finally:
        for each in started:
            each.kill()
            each.communicate()
    assert left.returncode == 1
    assert took_s < deadline_s
    assert f"error: rank {1 - mortal}, host group of ranks 0, 1: " in words
    assert f"rank {mortal} did not join" in words
    assert "Traceback" not in words
