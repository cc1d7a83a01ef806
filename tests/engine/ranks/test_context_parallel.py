"""Prompts whose rows several ranks compute: the answers of one rank to the bit, on every rank of the group."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer import LLM, SamplingParams, StructuredOutputs
from deepinfer.engine.build import build_engine
from deepinfer.engine.options import EngineOptions
from deepinfer.engine.ranks.launched import LaunchedEngine
from deepinfer.errors import ArgumentError
from deepinfer.parallel.ranks.groups import free_port
from deepinfer.settings import LaunchedRank, Settings
from deepinfer_cpu_ref import Driver as ReferenceDriver

Together = Callable[..., list[Any]]
SIZES: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "batch_invariant": True}
PARAMS = SamplingParams(max_tokens=4, seed=3, logprobs=3, prompt_logprobs=2, ignore_eos=True)
# Shorter than two pieces a rank, longer than the window ring, and an image across the pieces.
PROMPTS = [[5], [8, 9, 30], [(7 * place) % 90 + 2 for place in range(45)], [4] * 13]
IMAGES = [(), (), (), ((4, 9),)]


def fill(engine: Any, prompts: list[list[int]], params: SamplingParams) -> dict[str, Any]:
    rows = torch.randn(13, 64, generator=torch.Generator().manual_seed(1))
    last = {}
    for number, prompt in enumerate(prompts):
        spans = IMAGES[number] if params.prompt_logprobs is not None else ()
        embeddings = rows if spans else None
        engine.add_request(str(number), prompt, params, image_spans=spans, embeddings=embeddings)
    while engine.has_unfinished_requests():
        last.update({record.request_id: record for record in engine.step()})
    engine.check_invariants()
    return {name: record.as_json() for name, record in last.items()}


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {}),
        (3, {"max_num_batched_tokens": 16, "expert_parallel_size": 3, "spread_ngram_tables": True}),
        (2, {"numerics": "served", "async_scheduling": True, "max_num_batched_tokens": 14}),
    ],
)
def test_answers_are_those_of_one_rank_to_the_bit(
    together: Together, tiny_directory: Path, world: int, options: dict[str, Any]
) -> None:
    def act(seat: Any) -> Any:
        return fill(seat.engine, PROMPTS, PARAMS), seat.recorder.calls

    found = together(world, act, ReferenceDriver, batch_invariant=True, context_parallel_size=world, **options)
    alone = {"numerics": "portable", **options, **SIZES}
    alone = {
        name: value for name, value in alone.items() if name not in ("expert_parallel_size", "spread_ngram_tables")
    }
    engine = build_engine(tiny_directory, "cpu_ref", EngineOptions(**alone), Settings())
    expected = fill(engine, PROMPTS, PARAMS)
    context = "context group of ranks " + ", ".join(map(str, range(world)))
    shared = [call for call in found[0][1] if call.group == context]
    assert shared
    assert {call.op for call in shared} == {"all_gather"}
    for answers, calls in found:
        assert answers == expected
        assert [call for call in calls if call.group == context] == shared


def test_drafts_read_the_context_of_all_rows(together: Together) -> None:
    options = {"num_speculative_tokens": 2, "max_model_len": 48, "num_blocks": 49}
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    prompts = [[65, 66, 67, 68, 69, 70, 71, 72, 73]]

    def act(seat: Any) -> Any:
        return fill(seat.engine, prompts, params), seat.engine.stats().accepted_tokens

    found = together(2, act, ReferenceDriver, None, batch_invariant=True, context_parallel_size=2, **options)
    engine = build_engine(None, "cpu_ref", EngineOptions(**{**SIZES, **options}), Settings())
    assert found == [(fill(engine, prompts, params), engine.stats().accepted_tokens)] * 2


def test_a_context_group_serves_a_request_as_one_rank_does(tiny_directory: Path) -> None:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    alone = LLM(tiny_directory, "cpu_ref", **SIZES).generate(PROMPTS, params, use_tqdm=False)
    with contextlib.closing(LLM(tiny_directory, "cpu_ref", context_parallel_size=2, **SIZES)) as llm:
        ranks = llm.ranks
        assert ranks is not None
        assert ranks.world_size == 2
        found = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [each.as_json()["outputs"] for each in found] == [each.as_json()["outputs"] for each in alone]
        ranks.add_request("a", PROMPTS[2], params)
        ranks.add_request("b", PROMPTS[3], params)
        ranks.step()
        ranks.fork_request("a", "c", SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
        assert ranks.abort_request("b")
        last = {}
        while ranks.has_unfinished_requests():
            last.update({record.request_id: record.outputs[0] for record in ranks.step()})
        assert {name: answer.finish_reason for name, answer in last.items()} == {
            "a": "length",
            "b": "abort",
            "c": "length",
        }
        assert last["c"].token_ids == alone[2].outputs[0].token_ids[1:3]
        (form,) = llm.generate([[5]], SamplingParams(structured_outputs=StructuredOutputs(regex="a")), use_tqdm=False)
        assert form.outputs[0].finish_reason == "ignored"
        assert "use context_parallel_size=1" in str(form.outputs[0].message)
        first, second = ranks.stats()
        assert first == second
        assert first.free_blocks == first.usable_blocks


def test_launched_context_groups_share_requests_out_and_find_the_same_records(tiny_directory: Path) -> None:
    port, finished = free_port(), threading.Barrier(4)
    options = EngineOptions(**SIZES, data_parallel_size=4, context_parallel_size=2, rank_deadline_s=20)
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)

    def one(rank: int) -> Any:
        place = LaunchedRank(rank, 4, rank, 4, "127.0.0.1", port)
        try:
            engine = LaunchedEngine(place, tiny_directory, "cpu_ref", options, Settings())
            for number, prompt in enumerate(PROMPTS):
                engine.add_request(str(number), prompt, params)
            assert engine.abort_request("1")
            records = []
            while engine.has_unfinished_requests():
                records += [record for record in engine.step() if record.finished]
            served = engine.stats().emitted_tokens
            return served, sorted((record.request_id, record.outputs[0].token_ids) for record in records)
        finally:
            finished.wait(60)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(one, range(4)))
    alone = LLM(tiny_directory, "cpu_ref", **SIZES).generate(PROMPTS, params, use_tqdm=False)
    expected = [(str(number), () if number == 1 else each.outputs[0].token_ids) for number, each in enumerate(alone)]
    assert [records for _, records in found] == [expected] * 4
    assert [served for served, _ in found] == [4, 4, 2, 2]


def test_what_a_context_group_cannot_do_is_refused_at_once() -> None:
    with pytest.raises(ArgumentError) as refused:
        LLM(
            data_parallel_size=3,
            context_parallel_size=2,
            truncated_prefill="compact",
            max_num_batched_tokens=3,
            num_speculative_tokens=1,
            variable_verification=True,
        )
    text = str(refused.value)
    for words in (
        "context_parallel_size=2 does not divide the 3 ranks",
        "truncated_prefill='compact' leaves rows out",
        "max_num_batched_tokens=3 is below 4",
        "variable_verification=True",
    ):
        assert words in text


def test_what_the_environment_asks_for_is_passed_over() -> None:
    settings = Settings(yoco_prefill_truncation_mode="compact", enable_mtp_varlen=True)
    options = EngineOptions(context_parallel_size=2, num_speculative_tokens=1).under(settings)
    assert (options.truncated_prefill, options.variable_verification) == ("off", False)
