"""Whatever is forked, aborted, preempted or broken around it, a request's tokens are those of a quiet life."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer import LLM, SamplingParams
from deepinfer.engine.engine import Engine
from deepinfer.engine.outputs import RequestOutput
from deepinfer.errors import ArgumentError, DuplicateRequestError

Odd = Callable[..., LLM]


def greedy(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 101, length).tolist()


def drain(engine: Engine, records: list[RequestOutput]) -> dict[str, RequestOutput]:
    for _ in range(3000):
        if not engine.has_unfinished_requests():
            break
        records += engine.step()
        engine.check_invariants()
    stats = engine.stats()
    assert (stats.num_unfinished, stats.num_waiting, stats.num_running) == (0, 0, 0)
    assert (stats.free_blocks, stats.free_state_slots) == (stats.usable_blocks, stats.usable_state_slots)
    ends = [record for record in records if record.finished]
    assert len({end.request_id for end in ends}) == len(ends)
    return {end.request_id: end for end in ends}


def tokens(record: RequestOutput) -> list[int]:
    return list(record.outputs[0].token_ids)


def quiet(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    return tokens(llm.generate([list(prompt)], params, use_tqdm=False)[0])


@pytest.mark.parametrize("steps", [0, 2, 4])
@pytest.mark.parametrize("length", [3, 13])
def test_forks_of_forks_continue_their_parents_history(steps: int, length: int, odd: Odd) -> None:
    llm = odd(max_num_batched_tokens=5)
    engine, prompt = llm.engine, prompt_of(length)
    expected = quiet(llm, prompt, greedy(12))
    engine.add_request("parent", prompt, greedy(9))
    records = [record for _ in range(steps) for record in engine.step()]
    made = len(records[-1].outputs[0].token_ids) if records else 0
    other = (expected[made] + 1) % 101
    engine.fork_request("parent", "child", greedy(4))
    engine.fork_request("parent", "apart", greedy(4, golden_token_ids=[other]))
    engine.fork_request("child", "grandchild", greedy(3))
    ends = drain(engine, records)
    assert tokens(ends["parent"]) == expected[:9]
    assert tokens(ends["child"]) == expected[made : made + 4]
    assert tokens(ends["grandchild"]) == expected[made : made + 3]
    history = [*prompt, *expected[:made], *tokens(ends["apart"])]
    best = llm.logits(history).argmax(-1).tolist()
    assert tokens(ends["apart"])[1:] == best[len(prompt) + made : -1]


@pytest.mark.parametrize("victim", [2])
def test_an_abort_at_any_step_touches_nobody_else(victim: int, odd: Odd) -> None:
    calm = odd()
    prompts = [prompt_of(length) for length in (13, 5, 9)]
    expected = [quiet(calm, prompt, greedy(6)) for prompt in prompts]
    llm = odd(num_blocks=9, max_num_batched_tokens=6, max_num_seqs=2, prefill_attempt_interval=2)
    for steps in range(0, 16, 4):
        for number, prompt in enumerate(prompts):
            llm.engine.add_request(str(number), prompt, greedy(6))
        records = [record for _ in range(steps) for record in llm.engine.step()]
        was_alive = llm.engine.abort_request(str(victim))
        assert not llm.engine.abort_request(str(victim))
        ends = drain(llm.engine, records)
        for number in range(3):
            is_cut = was_alive and number == victim
            got = tokens(ends[str(number)])
            assert ends[str(number)].outputs[0].finish_reason == ("abort" if is_cut else "length")
            assert got == expected[number][: len(got) if is_cut else None]


@pytest.mark.parametrize("num_blocks", [9])
def test_preemption_changes_no_draw_no_penalty_and_no_listed_probability(num_blocks: int, odd: Odd) -> None:
    params = [
        SamplingParams(
            temperature=1.3, seed=seed, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1, top_p=0.9,
            presence_penalty=0.5, repetition_penalty=1.2, first_n_token_no_eos=5,
        )
        for seed in range(3)
    ]  # fmt: skip
    prompts = [prompt_of(length) for length in (5, 13, 8)]
    calm, tight = odd(batch_invariant=True), odd(batch_invariant=True, num_blocks=num_blocks, max_num_batched_tokens=7)
    expected = [calm.generate([prompt], one, use_tqdm=False)[0] for prompt, one in zip(prompts, params, strict=True)]
    actual = tight.generate(prompts, params, use_tqdm=False)
    assert tight.engine.stats().preemptions > 0
    for wanted, got in zip(expected, actual, strict=True):
        assert tokens(got) == tokens(wanted)
        assert got.outputs[0].logprobs == wanted.outputs[0].logprobs
        assert got.prompt_logprobs == wanted.prompt_logprobs


@pytest.mark.parametrize("seed", range(2))
def test_a_storm_of_calls_leaks_nothing_and_ends_everything_once(seed: int, odd: Odd) -> None:
    chance = random.Random(seed)
    llm = odd(
        num_blocks=chance.choice([6, 9, 14]),
        max_num_batched_tokens=chance.choice([3, 8, 64]),
        max_num_seqs=chance.choice([1, 2, 5]),
        num_state_slots=chance.choice([None, 2, 3]),
        stop_preempted_requests=chance.random() < 0.3,
    )
    engine, alive, added, ended = llm.engine, set[str](), 0, 0
    for _ in range(40):
        for _ in range(chance.randrange(3)):
            one, other = (chance.choice("abcdef") for _ in range(2))
            act = chance.choice(["add", "add", "abort", "fork"])
            try:
                if act == "add":
                    params = SamplingParams(
                        n=chance.choice([1, 1, 3]), max_tokens=chance.randrange(1, 12), seed=chance.randrange(9)
                    )
                    engine.add_request(one, prompt_of(chance.choice([1, 5, 12, 30])), params)
                    assert one not in alive
                    alive.add(one)
                    added += 1
                elif act == "abort":
                    assert not engine.abort_request(one) or one in alive
                else:
                    engine.fork_request(one, other, SamplingParams(max_tokens=chance.randrange(1, 9)))
                    assert one in alive
                    assert other not in alive
                    alive.add(other)
                    added += 1
            except DuplicateRequestError:
                assert {one, other} & alive
            except ArgumentError:
                assert act == "fork"
            engine.check_invariants()
        for record in engine.step():
            assert record.request_id in alive
            if record.finished:
                alive.remove(record.request_id)
                ended += 1
    ended += len(drain(engine, []))
    assert ended == added


def test_weights_that_are_nan_end_only_the_requests_that_meet_them(
    odd: Odd, odd_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    weights = load_file(odd_directory("turned_round") / "model.safetensors")
    weights["embed.weight"][50] = float("nan")
    weights["embed.weight"][51] = float("inf")
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((odd_directory("turned_round") / "config.json").read_bytes())
    params = greedy(5, blacklist_token_ids=[50, 51])
    sound, broken = odd(), odd(model=tmp_path)
    expected = [quiet(sound, prompt_of(length), params) for length in (3, 9)]
    answers = broken.generate([prompt_of(3), [1, 50, 3], [51], prompt_of(9), [50] * 20], params, use_tqdm=False)
    assert [answer.outputs[0].finish_reason for answer in answers] == [
        "length", "invalid", "invalid", "length", "invalid",
    ]  # fmt: skip
    assert [tokens(answer) for answer in answers] == [expected[0], [], [], expected[1], []]
    prompt = [7] * 30  # takes the memory in which NaN lay
    torch.testing.assert_close(broken.logits(prompt), sound.logits(prompt), rtol=0, atol=0)


def test_an_iterator_left_half_way_holds_nothing(odd: Odd) -> None:
    llm = odd(num_blocks=12)
    expected = quiet(llm, [5], greedy(6))
    left = llm.stream([[1], [2, 3]], greedy(8))
    next(left)
    for call in (lambda: llm.generate([[5]]), lambda: llm.stream([[5]]), lambda: llm.logits([5])):
        with pytest.raises(ArgumentError, match="unfinished"):
            call()
    del left
    assert quiet(llm, [5], greedy(6)) == expected
    unstarted, closed = llm.stream([[5]], greedy(6)), llm.stream([[1]], greedy(8))
    next(closed)
    llm.engine.add_request("mine", [5], greedy(6))
    closed.close()
    assert tokens(drain(llm.engine, [])["mine"]) == expected
    assert tokens(list(unstarted)[-1]) == expected
