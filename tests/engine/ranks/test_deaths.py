"""Ranks that die in the midst of an exchange, as processes: who is left raises in time, and leaves nothing behind."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.engine.ranks import processes
from deepinfer.engine.ranks.front import LocalRanks
from deepinfer.errors import DeepInferError, RankFailedError

OPTIONS: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "rank_deadline_s": 20}
MOVING = {"expert_balancing": "greedy", "expert_balancing_interval": 1, "expert_balancing_window": 1}
PARAMS = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
CLOSED = "the ranks were closed; build another LLM"

SHARED = Path("/dev/shm")  # noqa: S108 - looked at, not written to

Mortals = Callable[..., LLM]


@pytest.fixture
def mortals(tiny_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Mortals:
    """Build an LLM whose rank 1 has a fate, see `mortal.py`."""

    def build(world: int, fate: str, driver: str = "cpu_ref", how: dict[str, Any] | None = None, **options: Any) -> LLM:
        armed = f"import mortal; mortal.arm(1, {fate!r}, **{how or {}!r})"
        paths = f"sys.path[:] = [{str(Path(__file__).parent)!r}, *json.loads(sys.argv[1])]"
        main = "from deepinfer.engine.ranks.child import main; main(int(sys.argv[2]))"
        monkeypatch.setattr(processes, "_PROGRAM", f"import json, sys; {paths}; {armed}; {main}")
        return LLM(tiny_directory, driver, **{**OPTIONS, "data_parallel_size": world, **options})

    return build


def drain(ranks: LocalRanks) -> None:
    while ranks.has_unfinished_requests():
        ranks.step()


def are_gone(pids: tuple[int, ...]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(
    ("world", "fate", "how", "options"),
    [
        (2, "engine.step host.all_gather", {}, {}),  # a vote, with whole experts everywhere
        (2, "engine.step expert.all_gather", {}, {"expert_parallel_size": 2}),  # how many rows go where
        (2, "engine.step expert.all_to_all", {}, {"expert_parallel_size": 2}),  # rows to their experts
        (2, "engine.step expert.all_to_all expert.all_to_all", {}, {"expert_parallel_size": 2}),  # outputs back
        (2, "engine.step experts.move expert.all_to_all", {}, {"expert_parallel_size": 2, **MOVING}),
        # In the midst: one of two others has heard what is called; then both have, and no rows came.
        (3, "engine.step expert.all_to_all", {"notes": 1}, {"expert_parallel_size": 3}),
        (3, "engine.step expert.all_to_all", {"notes": 2}, {"expert_parallel_size": 3}),
    ],
)
def test_a_rank_that_dies_in_an_exchange_is_named_in_time(
    mortals: Mortals, world: int, fate: str, how: dict[str, Any], options: dict[str, Any]
) -> None:
    llm = mortals(world, fate, how=how, **options)
    ranks = llm.ranks
    assert ranks is not None
    names = [f"request {number}" for number in range(world + 1)]
    for number, name in enumerate(names):
        ranks.add_request(name, [5, 6, 7 + number], PARAMS)
    begun_s = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 died: it was ended by signal 9") as failed:
        drain(ranks)
    assert time.monotonic() - begun_s < OPTIONS["rank_deadline_s"]
    assert failed.value.ranks == (1,)
    assert are_gone(ranks.pids)
    records = ranks.step()
    assert [record.request_id for record in records] == names
    for record in records:
        assert record.finished
        assert record.outputs[0].finish_reason == "abort"
        assert "rank 1 died" in str(record.outputs[0].message)
    assert not ranks.has_unfinished_requests()
    llm.close()  # what failed has been said


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({}, "rank 1 died: it was ended by signal 9"),
        ({"raises": True}, "rank 1 raised RuntimeError: this rank's time has come"),
    ],
)
def test_a_rank_that_fails_when_all_are_closed_is_named(mortals: Mortals, how: dict[str, Any], words: str) -> None:
    llm = mortals(2, "engine.close", "null", how)
    ranks = llm.ranks
    assert ranks is not None
    ranks.add_request("a", [5])
    with pytest.raises(RankFailedError, match=words) as failed:
        llm.close()
    assert failed.value.ranks == (1,)
    assert are_gone(ranks.pids)
    assert [record.outputs[0].message for record in ranks.step()] == [CLOSED]
    llm.close()
    with pytest.raises(DeepInferError, match=CLOSED):
        llm.generate([[5]], use_tqdm=False)


def opened(pids: tuple[int, ...]) -> set[str]:
    """Return the names of what processes have open."""
    folders = [Path(f"/proc/{pid}/fd") for pid in pids if Path(f"/proc/{pid}").exists()]
    return {str(each.readlink()) for folder in folders for each in folder.iterdir() if each.is_symlink()}


def listening(pids: tuple[int, ...]) -> set[int]:
    """Return the ports at which processes listen."""
    held = opened(pids)
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return {
        int(words[1].rpartition(":")[2], 16) for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in held
    }


def shared_memory(pids: tuple[int, ...]) -> set[str]:
    """Return the names of what processes have open or mapped of shared memory, and of what is named after them."""
    maps = [Path(f"/proc/{pid}/maps") for pid in pids if Path(f"/proc/{pid}").exists()]
    names = opened(pids).union(*(each.read_text().split() for each in maps))
    named = {each.name for each in SHARED.iterdir() if any(str(pid) in each.name for pid in pids)}
    return named | {Path(name).name for name in names if name.startswith(f"{SHARED}/")}


def test_nothing_is_left_of_ranks_that_failed_in_an_exchange(mortals: Mortals) -> None:
    llm = mortals(2, "engine.stepped engine.step expert.all_to_all", expert_parallel_size=2, spread_ngram_tables=True)
    ranks = llm.ranks
    assert ranks is not None
    for number in range(2):
        ranks.add_request(str(number), [5, 6, 7], PARAMS)
    ranks.step()
    ports, shared = listening(ranks.pids), shared_memory(ranks.pids)
    assert len(ports) >= 3  # where the host group, the table group and the expert group meet
    with pytest.raises(RankFailedError, match="rank 1 died"):
        drain(ranks)
    assert are_gone(ranks.pids)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert not {str(pid) for pid in ranks.pids} & set(children)
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ended connections may linger, no listener
            probe.bind(("", port))
            probe.listen()
    assert not shared & {each.name for each in SHARED.iterdir()}
    assert not shared_memory(ranks.pids)
