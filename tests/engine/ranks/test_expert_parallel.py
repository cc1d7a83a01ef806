"""Experts spread over ranks: the answers of one rank to the bit, and the same calls on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.errors import ArgumentError
from deepinfer.parallel.ranks.recording import RecordedCall
from deepinfer_cpu_ref import Driver as ReferenceDriver

Together = Callable[..., list[Any]]
PROMPTS = [[5, 6, 7, 60, 61], [8, 9], [10] * 11, [4, 4, 4, 4], [70]]
PARAMS = SamplingParams(max_tokens=5, seed=3, logprobs=3, prompt_logprobs=2, ignore_eos=True)


def serve(prompts_of: Callable[[int], list[list[int]]], params: SamplingParams = PARAMS) -> Callable[[Any], Any]:
    """Serve a rank's prompts; return its answers as JSON, its calls, and the bytes of its weights."""

    def act(seat: Any) -> Any:
        engine, last = seat.engine, {}
        for number, prompt in enumerate(prompts_of(seat.groups.rank)):
            engine.add_request(str(number), prompt, params)
        while seat.groups.votes.any_rank(says_yes=engine.has_unfinished_requests()):
            last.update({record.request_id: record for record in engine.step()})
        answers = [last[name].as_json() for name in sorted(last, key=int)]
        return answers, seat.recorder.calls, engine.worker._transformer.weights.device_bytes

    return act


def by_group(calls: list[RecordedCall]) -> dict[str, list[RecordedCall]]:
    return {group: [call for call in calls if call.group == group] for group in {call.group for call in calls}}


@pytest.fixture(scope="module")
def alone(tiny_directory: Path) -> Callable[..., list[Any]]:
    def run(
        prompts: list[list[int]], params: SamplingParams, model: Path | None = tiny_directory, **options: Any
    ) -> list[Any]:
        sizes = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "batch_invariant": True}
        records = LLM(model, "cpu_ref", **{**sizes, **options}).generate(prompts, params, use_tqdm=False)
        assert {record.outputs[0].finish_reason for record in records} == {"length"}
        return [{**record.as_json(), "request_id": str(number)} for number, record in enumerate(records)]

    return run


@pytest.mark.parametrize(
    ("world", "size", "options"),
    [
        (2, 2, {}),
        (3, 3, {"spread_ngram_tables": True}),
        (4, 4, {}),
        (4, 2, {"max_num_batched_tokens": 6}),
        (2, 2, {"numerics": "served", "async_scheduling": True, "spread_ngram_tables": True}),
        (2, 1, {"async_scheduling": True, "spread_ngram_tables": True, "decode_graphs": True, "max_num_seqs": 2}),
        (3, 3, {"truncated_prefill": "compact", "truncated_prefill_keep_tokens": 9, "async_scheduling": True}),
    ],
)
def test_answers_are_those_of_one_rank_to_the_bit(
    together: Together, alone: Callable[..., list[Any]], world: int, size: int, options: dict[str, Any]
) -> None:
    params = replace(PARAMS, prompt_logprobs=None) if "truncated_prefill" in options else PARAMS
    # Rank 0 has nothing to do, the last one most of it.
    found = together(
        world,
        serve(lambda rank: PROMPTS[: 2 * rank] if rank else [], params),
        ReferenceDriver,
        batch_invariant=True,
        expert_parallel_size=size,
        **options,
    )
    expected = alone(PROMPTS, params, **options)
    for rank, (answers, calls, _) in enumerate(found):
        assert answers == (expected[: 2 * rank] if rank else [])
        mine, groups = rank // size, {call.group for call in calls}
        members = ", ".join(str(mine * size + each) for each in range(size))
        everybody = ", ".join(map(str, range(world)))
        names = {f"host group of ranks {everybody}"}
        names |= {f"expert group of ranks {members}"} if size > 1 else set()
        names |= {f"table group of ranks {everybody}"} if "spread_ngram_tables" in options else set()
        assert groups == names
        # Planned ahead, votes and exchanges of rows are made by two threads: each group has an order of its own.
        assert by_group(calls) == by_group(found[mine * size][1])
        assert {call.op for call in calls if not call.group.startswith("host")} == {"all_gather", "all_to_all"}


def test_drafts_are_verified_by_the_experts_of_all_ranks(together: Together, alone: Callable[..., list[Any]]) -> None:
    options = {"model": None, "num_speculative_tokens": 2, "max_model_len": 48, "num_blocks": 49}
    params, prompts = replace(PARAMS, temperature=0), [[65, 66, 67], [70]]
    found = together(
        2,
        serve(lambda rank: prompts if rank else [], params),
        ReferenceDriver,
        batch_invariant=True,
        expert_parallel_size=2,
        **options,
    )
    assert [each[0] for each in found] == [[], alone(prompts, params, **options)]
    assert found[0][1] == found[1][1]


def test_a_rank_loads_its_own_experts_only(together: Together, tiny_config: Any) -> None:
    whole = together(2, serve(lambda _: []), ReferenceDriver)
    parts = together(2, serve(lambda _: []), ReferenceDriver, expert_parallel_size=2)
    # Two of four experts a layer, three matrices each, in float32.
    expert_bytes = 3 * tiny_config.hidden_size * tiny_config.moe_intermediate_size * 4
    saved = tiny_config.num_hidden_layers * 2 * expert_bytes
    assert [part[2] for part in parts] == [whole[0][2] - saved] * 2


def test_a_rank_keeps_its_share_of_the_tables_only(together: Together) -> None:
    def act(seat: Any) -> Any:
        weights = seat.engine.worker._transformer.weights
        return weights.table_bytes, [engram.table.rows_RW.shape[0] for engram in weights.engrams.values()]

    whole = together(1, act, ReferenceDriver, spread_ngram_tables=True)
    parts = together(3, act, ReferenceDriver, spread_ngram_tables=True)
    assert sum(nbytes for nbytes, _ in parts) == whole[0][0] > 0
    rows = [held for _, (held,) in parts]
    assert rows[0] == rows[1] >= rows[2] > 0
    assert sum(rows) == whole[0][1][0]


def test_what_cannot_be_spread_is_refused_at_once() -> None:
    with pytest.raises(ArgumentError) as refused:
        LLM(data_parallel_size=4, expert_parallel_size=3, decode_graphs=True, rank_deadline_s=-1)
    assert "rank_deadline_s=-1" in str(refused.value)
    with pytest.raises(ArgumentError) as refused:
        LLM(data_parallel_size=4, expert_parallel_size=3, decode_graphs=True, variable_verification=True)
    text = str(refused.value)
    for words in ("does not divide the 4 ranks", "decode_graphs=True", "variable_verification=True"):
        assert words in text
