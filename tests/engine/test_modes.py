"""Every mode of computing runs, and the batch-invariant one gives the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

Answer = tuple[list[int], list[dict[int, float]], list[dict[int, float] | None]]


@pytest.mark.parametrize("kv_cache_dtype", ["released", "float32"])
@pytest.mark.parametrize(
    ("dtype", "numerics"),
    [("float32", "portable"), ("float64", "portable"), ("bfloat16", "portable"), (None, "served")],
)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_every_mode_generates_the_tokens_of_its_own_logits(
    reference, prompt_of, dtype, numerics, kv_cache_dtype, batch_invariant
) -> None:
    engine = reference(dtype=dtype, numerics=numerics, kv_cache_dtype=kv_cache_dtype, batch_invariant=batch_invariant)
    engine.add("a", prompt_of(6), max_tokens=2, temperature=0, ignore_eos=True)
    engine.drain()
    tokens = engine.tokens("a")
    logits_TV = engine.engine.compute_logits("x", [*prompt_of(6), *tokens])
    assert logits_TV.dtype == torch.float32
    assert logits_TV.isfinite().all()
    # What a step-by-step decode chose, a prefill of the same history puts among its best.
    for position, token in ((5, tokens[0]), (6, tokens[1])):
        row_V = logits_TV[position]
        assert row_V.max() - row_V[token] <= (0.0 if batch_invariant else 0.05)


def test_the_options_reach_the_plan(reference) -> None:
    plan = reference(dtype="bfloat16", kv_cache_dtype="float32", batch_invariant=True).engine.plan
    assert plan.options.activation_dtype == torch.bfloat16
    assert plan.options.kv_cache_dtype == "float32"
    assert plan.options.batch_invariant
    assert reference(numerics="served").engine.plan.options.activation_dtype == torch.bfloat16


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def answer_of(reference, prompt_of) -> Callable[..., Answer]:
    """What one request gets beside some neighbours: ids, log-probabilities and those of the prompt."""

    def run(*, neighbours: int = 0, **options: Any) -> Answer:
        engine = reference(batch_invariant=True, prefill_attempt_interval=1, **options)
        for number in range(neighbours):
            engine.add(f"neighbour {number}", prompt_of(3 + 2 * number, 10 + number), max_tokens=6)
        engine.add("mine", prompt_of(18), max_tokens=4, temperature=0, logprobs=3, raw_logprobs=True, prompt_logprobs=1)
        engine.drain()
        answer = engine.answer("mine")
        return list(answer.token_ids), list(answer.logprobs), list(engine.records["mine"][-1].prompt_logprobs)

    return run


def test_a_batch_invariant_answer_is_the_same_in_any_company_cut_and_number_of_threads(answer_of, threads) -> None:
    alone = answer_of()
    for neighbours in (1, 2, 6):
        assert answer_of(neighbours=neighbours) == alone, f"with {neighbours} neighbours"
    for budget in (1, 3, 16):
        assert answer_of(max_num_batched_tokens=budget) == alone, f"in chunks of {budget}"
    threads(2)
    assert answer_of(neighbours=2) == alone, "on two threads"


def test_a_preemption_shows_in_no_number_of_the_answer(reference, prompt_of) -> None:
    def run(num_blocks: int) -> tuple[int, list[Any]]:
        engine = reference(batch_invariant=True, num_blocks=num_blocks, prefill_attempt_interval=1)
        for number in range(2):
            engine.add(
                str(number),
                prompt_of(7 + number, number),
                max_tokens=9,
                seed=number,
                logprobs=2,
                prompt_logprobs=1,
                first_n_token_no_eos=5,
                presence_penalty=1.0,
                repetition_penalty=1.5,
            )
        engine.drain()
        answers = [(engine.answer(str(number)), engine.records[str(number)][-1].prompt_logprobs) for number in range(2)]
        return engine.engine.stats().preemptions, answers

    (calm, undisturbed), (preempted, recomputed) = run(64), run(1 + 6)
    assert (calm, preempted > 0) == (0, True)
    assert recomputed == undisturbed
