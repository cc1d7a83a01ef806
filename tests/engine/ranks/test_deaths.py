"""Ranks that die in the midst of an exchange, as processes: who is left raises in time, and leaves nothing behind."""

from __future__ import annotations

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
    """Build an LLM some of whose ranks have fates, see `mortal.py`."""

    def build(world: int, driver: str, *fates: dict[str, Any], **options: Any) -> LLM:
        armed = "; ".join(f"mortal.arm(**{fate!r})" for fate in fates)
        paths = f"sys.path[:] = [{str(Path(__file__).parent)!r}, *json.loads(sys.argv[1])]"
        main = "from deepinfer.engine.ranks.child import main; main(int(sys.argv[2]))"
        monkeypatch.setattr(processes, "_PROGRAM", f"import json, sys; {paths}; import mortal; {armed}; {main}")
        return LLM(tiny_directory, driver, **{**OPTIONS, "data_parallel_size": world, **options})

    return build


def drain(ranks: LocalRanks) -> None:
    while ranks.has_unfinished_requests():
        ranks.step()


def are_gone(pids: tuple[int, ...]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


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


SPREAD = {"expert_parallel_size": 2}


@pytest.mark.parametrize(
    ("world", "fate", "options"),
    [
        (2, {"fate": "engine.step host.all_gather"}, {}),  # a vote
        (2, {"fate": "engine.step expert.all_gather"}, SPREAD),  # how many rows go where
        (2, {"fate": "engine.step expert.all_to_all"}, SPREAD),  # rows to their experts
        (2, {"fate": "engine.step expert.all_to_all expert.all_to_all"}, SPREAD),  # outputs back
        (2, {"fate": "engine.step experts.move expert.all_to_all"}, SPREAD | MOVING),
        # In the midst: one of the two others has heard what is called, the other has not, and no rows have come.
        (
            3,
            {"fate": "engine.step expert.all_to_all", "notes": 1},
            {"expert_parallel_size": 3, "spread_ngram_tables": True},
        ),
    ],
)
def test_a_rank_that_dies_in_an_exchange_is_named_in_time_and_nothing_is_left(
    mortals: Mortals, world: int, fate: dict[str, Any], options: dict[str, Any]
) -> None:
    llm = mortals(world, "cpu_ref", {"rank": 1, **fate}, **options)
    ranks = llm.ranks
    assert ranks is not None
    pids = ranks.pids
    names = [f"request {number}" for number in range(world + 1)]
    for number, name in enumerate(names):
        ranks.add_request(name, [5, 6, 7 + number], PARAMS)
    ports, shared = listening(pids), shared_memory(pids)
    # Where groups meet: the host group, that of the experts, and that of the tables.
    assert len(ports) >= 1 + ("expert_parallel_size" in options) + ("spread_ngram_tables" in options)
    begun_s = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 died: it was ended by signal 9") as failed:
        drain(ranks)
    assert time.monotonic() - begun_s < OPTIONS["rank_deadline_s"]
    assert failed.value.ranks == (1,)

    assert are_gone(pids)
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ended connections may linger, no listener
            probe.bind(("", port))
            probe.listen()
    assert not shared & {each.name for each in SHARED.iterdir()}
    assert not shared_memory(pids)

    records = ranks.step()
    assert [record.request_id for record in records] == names
    for record in records:
        assert record.finished
        assert record.outputs[0].finish_reason == "abort"
        assert "rank 1 died" in str(record.outputs[0].message)
    assert not ranks.has_unfinished_requests()
    llm.close()  # what failed has been said


def test_ranks_that_die_or_raise_when_all_are_closed_are_named(mortals: Mortals) -> None:
    dies, raises = {"rank": 1, "fate": "engine.close"}, {"rank": 0, "fate": "engine.close", "raises": True}
    llm = mortals(2, "null", dies, raises)
    ranks = llm.ranks
    assert ranks is not None
    ranks.add_request("a", [5])
    with pytest.raises(RankFailedError) as failed:
        llm.close()
    assert failed.value.ranks == (0, 1)
    assert (
        "rank 0 raised RuntimeError: this rank's time has come; rank 1 died: it was ended by signal 9"
        in failed.value.why
    )
    assert are_gone(ranks.pids)
    assert [record.outputs[0].message for record in ranks.step()] == [CLOSED]
    llm.close()
    with pytest.raises(DeepInferError, match=CLOSED):
        llm.generate([[5]], use_tqdm=False)
