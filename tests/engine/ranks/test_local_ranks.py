"""Two ranks of this machine behind one LLM: the answers of one, and every way in which a rank can fail."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.engine.build import build_engine
from deepinfer.engine.options import EngineOptions
from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.ranks import processes
from deepinfer.errors import ArgumentError, ConfigurationError, DeepInferError, DuplicateRequestError, RankFailedError
from deepinfer.settings import Settings

OPTIONS: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "batch_invariant": True}
PROMPTS = [[5, 6, 7], [8, 9], [10] * 11, [3, 200, 5], [4, 4, 4, 4]]
PARAMS = [
    SamplingParams(max_tokens=6, ignore_eos=True),
    SamplingParams(max_tokens=3, temperature=0, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=5, n=3, ignore_eos=True),
    SamplingParams(),
    SamplingParams(max_tokens=9, seed=4, ignore_eos=True),
]


@pytest.fixture(scope="module")
def llm(tiny_directory: Path) -> Iterator[LLM]:
    with contextlib.closing(LLM(tiny_directory, "cpu_ref", data_parallel_size=2, **OPTIONS)) as llm:
        yield llm


def as_json(records: list[RequestOutput]) -> list[list[Any]]:
    return [record.as_json()["outputs"] for record in records]


def drain(llm: LLM) -> dict[str, RequestOutput]:
    assert llm.ranks is not None
    last = {}
    while llm.ranks.has_unfinished_requests():
        last.update({record.request_id: record for record in llm.ranks.step()})
    return last


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_answers_are_those_of_one_rank(llm: LLM, tiny_directory: Path) -> None:
    alone = LLM(tiny_directory, "cpu_ref", **OPTIONS).generate(PROMPTS, PARAMS, use_tqdm=False)
    records = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert as_json(records) == as_json(alone)
    assert [record.outputs[0].finish_reason for record in records] == ["length"] * 3 + ["ignored", "length"]
    assert llm.ranks is not None
    llm.ranks.check_invariants()
    assert all(each.emitted_tokens for each in llm.ranks.stats())
    assert len(set(llm.ranks.votes())) == 1
    assert llm.ranks.expert_balance() == (None, None)  # every rank holds all experts


def test_a_stream_grows_on_every_rank(llm: LLM) -> None:
    records = list(llm.stream(PROMPTS[:2], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)))
    assert [len(record.outputs[0].token_ids) for record in records] == [1, 1, 2, 2, 3, 3]


def test_experts_move_between_processes_and_no_answer_shows_it(tiny_directory: Path) -> None:
    alone = LLM(tiny_directory, "cpu_ref", **OPTIONS).generate(PROMPTS, PARAMS, use_tqdm=False)
    moving = {"expert_balancing": "greedy", "expert_balancing_interval": 2, "redundant_experts": 1}
    with contextlib.closing(LLM(tiny_directory, "cpu_ref", expert_parallel_size=2, **moving, **OPTIONS)) as llm:
        assert as_json(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == as_json(alone)
        assert llm.ranks is not None
        first, second = llm.ranks.expert_balance()
    assert first is not None
    assert second is not None
    assert first.changes > 0
    assert first.moved_experts > 0
    assert first.moved_bytes > 0
    assert dataclasses.replace(first, seconds=0.0) == dataclasses.replace(second, seconds=0.0)


def test_forks_and_aborts_find_their_rank(llm: LLM) -> None:
    ranks = llm.ranks
    assert ranks is not None
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    for name in ("a", "b"):
        ranks.add_request(name, [5, 6, 7], params)
    with pytest.raises(DuplicateRequestError, match="'b'"):
        ranks.add_request("b", [1], params)
    ranks.step()
    with pytest.raises(ArgumentError, match=r"the ranks still have 2 unfinished .* run llm\.ranks\.step\(\)"):
        llm.generate([[5]], use_tqdm=False)
    ranks.step()
    ranks.fork_request("b", "c", SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    with pytest.raises(ArgumentError, match="no living request 'nobody'"):
        ranks.fork_request("nobody", "d")
    assert ranks.abort_request("a")
    assert not ranks.abort_request("a")
    last = drain(llm)
    assert last["a"].outputs[0].finish_reason == "abort"
    assert last["b"].outputs[0].token_ids[2:] == last["c"].outputs[0].token_ids
    assert all(each.free_blocks == each.usable_blocks for each in ranks.stats())


def test_images_reach_the_rank_that_serves_them(llm: LLM, tiny_directory: Path) -> None:
    rows = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, prompt_logprobs=1)
    answers = []
    alone = LLM(tiny_directory, "cpu_ref", **OPTIONS).engine
    for engine in (alone, llm.ranks):
        assert engine is not None
        engine.add_request("a", [5, 99, 99, 99, 7, 8], params, image_spans=[(1, 4)], embeddings=rows)
        records = []
        while engine.has_unfinished_requests():
            records += engine.step()
        answers.append(records[-1])
    assert answers[0] == answers[1]


def test_a_call_that_is_interrupted_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    expected = as_json(llm.generate(PROMPTS[:2], params, use_tqdm=False))
    right, calls = processes.wait, iter(range(1000))

    def interrupted(*arguments: Any) -> Any:
        if next(calls) in (1, 5):  # while the second request is added, and in the middle of a step
            raise KeyboardInterrupt
        return right(*arguments)

    monkeypatch.setattr(processes, "wait", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert as_json(llm.generate(PROMPTS[:2], params, use_tqdm=False)) == expected
    assert llm.ranks is not None
    assert [each.num_unfinished for each in llm.ranks.stats()] == [0, 0]
    assert len(set(llm.ranks.votes())) == 1


def test_an_engine_alone_refuses_to_be_many(tiny_directory: Path) -> None:
    with pytest.raises(ArgumentError, match="one engine is one rank"):
        build_engine(tiny_directory, "cpu_ref", EngineOptions(data_parallel_size=2), Settings())


def test_what_one_rank_refuses_to_start_with_is_what_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as alone:
        LLM(tmp_path, "cpu_ref", **OPTIONS)
    with pytest.raises(ConfigurationError) as many:
        LLM(tmp_path, "cpu_ref", data_parallel_size=2, **OPTIONS)
    assert str(many.value) == str(alone.value)


def test_the_engine_of_many_ranks_is_not_one(llm: LLM) -> None:
    with pytest.raises(ArgumentError, match=r"llm\.ranks drives them"):
        _ = llm.engine
    with pytest.raises(ArgumentError, match="one rank"):
        llm.logits([5, 6])


def test_a_rank_that_hangs_ends_all_of_them(tiny_directory: Path) -> None:
    llm = LLM(tiny_directory, "cpu_ref", data_parallel_size=3, rank_deadline_s=5, **OPTIONS)
    ranks = llm.ranks
    assert ranks is not None
    for name in ("a", "b", "c", "d"):
        ranks.add_request(name, [5, 6, 7], SamplingParams(max_tokens=50, temperature=0, ignore_eos=True))
    ranks.step()
    os.kill(ranks.pids[1], signal.SIGSTOP)
    with pytest.raises(RankFailedError, match="rank 1") as failed:
        ranks.step()
    assert failed.value.ranks == (1,)
    assert not any(is_alive(pid) for pid in ranks.pids)
    records = ranks.step()
    assert [record.request_id for record in records] == ["a", "b", "c", "d"]
    for record in records:
        assert record.finished
        assert record.outputs[0].finish_reason == "abort"
        assert "rank 1" in str(record.outputs[0].message)
    assert not ranks.has_unfinished_requests()
    with pytest.raises(RankFailedError, match="rank 1"):
        llm.generate([[5]], use_tqdm=False)
    llm.close()


def test_a_request_that_could_not_be_added_gives_no_record(tiny_directory: Path) -> None:
    llm = LLM(tiny_directory, "null", data_parallel_size=2, **{**OPTIONS, "batch_invariant": None})
    assert llm.ranks is not None
    llm.ranks.add_request("a", [5])
    os.kill(llm.ranks.pids[1], signal.SIGKILL)
    with pytest.raises(RankFailedError, match="rank 1 died"):
        llm.ranks.add_request("b", [5])
    assert [record.request_id for record in llm.ranks.step()] == ["a"]
    assert not llm.ranks.has_unfinished_requests()


def test_a_rank_that_does_not_follow_when_all_are_closed_is_ended_and_named(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_CLOSING_S", 1.0)
    llm = LLM(tiny_directory, "null", data_parallel_size=2, **{**OPTIONS, "batch_invariant": None})
    assert llm.ranks is not None
    os.kill(llm.ranks.pids[1], signal.SIGSTOP)
    with pytest.raises(RankFailedError, match="rank 1 did not end within 1 s") as failed:
        llm.close()
    assert failed.value.ranks == (1,)
    assert not any(is_alive(pid) for pid in llm.ranks.pids)


def test_nothing_is_left_of_ranks_that_were_closed(tiny_directory: Path) -> None:
    llm = LLM(tiny_directory, "null", data_parallel_size=2, **{**OPTIONS, "batch_invariant": None})
    assert llm.ranks is not None
    llm.ranks.add_request("a", [5])
    llm.close()
    assert not any(is_alive(pid) for pid in llm.ranks.pids)
    answers = [record.outputs[0] for record in llm.ranks.step()]
    assert [(answer.finish_reason, answer.message) for answer in answers] == [
        ("abort", "the ranks were closed; build another LLM")
    ]
    with pytest.raises(DeepInferError, match="were closed"):
        llm.generate([[5]], use_tqdm=False)
