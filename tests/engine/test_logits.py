"""compute_logits, and prompt log-probabilities checked against it: through chunks and caches, for every split."""

from __future__ import annotations

import pytest
import torch

from deepinfer import SamplingParams
from deepinfer.errors import ArgumentError


def test_logits_are_float32_at_every_position_and_leave_nothing(reference, prompt_of) -> None:
    engine = reference(max_num_batched_tokens=4)
    logits_TV = engine.engine.compute_logits("x", prompt_of(9))
    assert (logits_TV.dtype, tuple(logits_TV.shape)) == (torch.float32, (9, 101))
    assert logits_TV.isfinite().all()
    assert engine.engine.has_unfinished_requests() is False
    engine.audit()
    engine.add("x", prompt_of(9), max_tokens=1, temperature=0)
    engine.drain()
    assert engine.tokens("x") == [int(logits_TV[-1].argmax())]


def test_logits_do_not_depend_on_the_budget_even_of_one_token(reference, prompt_of) -> None:
    whole_TV, *others = (
        reference(max_num_batched_tokens=budget).engine.compute_logits("x", prompt_of(9)) for budget in (64, 1, 4)
    )
    for logits_TV in others:
        torch.testing.assert_close(logits_TV, whole_TV, rtol=0, atol=5e-6)


def test_images_change_logits_from_their_first_position_on_and_are_not_cut(reference, prompt_of) -> None:
    mask = [False] * 3 + [True] * 4 + [False] * 3
    text_TV, image_TV = (reference().engine.compute_logits("x", prompt_of(10), flags) for flags in (None, mask))
    cut = reference(max_num_batched_tokens=5)
    torch.testing.assert_close(text_TV[:3], image_TV[:3], rtol=0, atol=5e-6)
    assert not torch.isclose(text_TV[3:], image_TV[3:]).all(dim=1).any()
    torch.testing.assert_close(cut.engine.compute_logits("x", prompt_of(10), mask), image_TV, rtol=0, atol=5e-6)


def test_what_cannot_be_computed_is_refused_with_every_reason_and_leaves_nothing(drive, prompt_of) -> None:
    engine = drive(max_num_batched_tokens=8, max_model_len=30, num_blocks=64)
    compute = engine.engine.compute_logits
    for ids, mask, words in (
        ([], None, "empty"),
        ([5, 101, -1], None, "101, -1"),
        (prompt_of(31), None, "31 tokens"),
        (prompt_of(5), [True], "1 flags for 5 ids"),
        (prompt_of(12), [False] + [True] * 9 + [False] * 2, "image of 9 positions"),
    ):
        with pytest.raises(ArgumentError, match=words):
            compute("x", ids, mask)
        engine.audit()
    with pytest.raises(ArgumentError) as refused:
        compute("x", [101], [True, True])
    assert len(refused.value.problems) == 3
    for ids in ([1.5], "text", None, [[5]], torch.tensor([[5]])):
        with pytest.raises(TypeError, match="prompt_token_ids"):
            compute("x", ids)
    engine.add("other", prompt_of(4), max_tokens=2)
    with pytest.raises(ArgumentError, match="1 requests are unfinished"):
        compute("x", prompt_of(3))
    engine.drain()
    assert compute("x", torch.tensor(prompt_of(3))).shape == (3, 101)


def test_a_prompt_engine_computes_logits_too(drive, prompt_of) -> None:
    assert drive(engine_type="prompt").engine.compute_logits("x", prompt_of(5)).shape == (5, 101)


@pytest.mark.parametrize("budget", [1, 2, 5, 9, 64])
def test_prompt_log_probabilities_are_those_of_the_logits_for_every_split(reference, prompt_of, budget) -> None:
    engine = reference(max_num_batched_tokens=budget)
    prompt = prompt_of(9)
    log_TV = engine.engine.compute_logits("x", prompt).double().log_softmax(dim=1)
    engine.add("a", prompt, max_tokens=1, prompt_logprobs=3)
    engine.drain()
    listed = engine.records["a"][-1].prompt_logprobs
    assert len(listed) == 9
    assert listed[0] is None
    for position, entry in enumerate(listed[1:], start=1):
        best = log_TV[position - 1].topk(3).indices.tolist()
        assert list(entry)[:3] == best
        assert set(entry) == {*best, prompt[position]}
        for token, value in entry.items():
            assert value == pytest.approx(log_TV[position - 1, token].item(), abs=1e-5)


@pytest.mark.parametrize("length", [1, 2, 5, 12])
def test_every_prompt_position_is_listed_once_whatever_the_chunks(oracle, prompt_of, length) -> None:
    lists = []
    for budget in (64, 1, 2, 3, 4, 11, 12):
        engine = oracle(max_num_batched_tokens=budget)
        engine.add("a", prompt_of(length), max_tokens=2, prompt_logprobs=2)
        engine.drain()
        lists.append(engine.records["a"][-1].prompt_logprobs)
    assert len(lists[0]) == length
    assert lists == [lists[0]] * len(lists)


def test_a_prompt_that_was_aborted_half_way_lists_nothing(drive, prompt_of) -> None:
    engine = drive(max_num_batched_tokens=4)
    engine.add("a", prompt_of(12), prompt_logprobs=1)
    engine.step(2)
    engine.engine.abort_request("a")
    engine.drain()
    assert engine.records["a"][-1].prompt_logprobs is None


def test_given_embeddings_take_the_place_of_ids_at_image_positions_and_nowhere_else(reference, prompt_of) -> None:
    def drawn(spans: list[tuple[int, int]], embeddings_PD: torch.Tensor | None, budget: int = 64) -> list[float]:
        engine = reference(max_num_batched_tokens=budget)
        params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0, raw_logprobs=True, logprobs=0)
        engine.engine.add_request("a", prompt_of(8), params, image_spans=spans, embeddings=embeddings_PD)
        engine.records["a"] = []
        engine.drain()
        record = engine.records["a"][-1]
        entries = [*record.prompt_logprobs[1:], *record.outputs[0].logprobs]
        return [value for entry in entries for value in entry.values()]

    given_PD = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    elsewhere_PD = given_PD.clone()
    elsewhere_PD[[0, 1, 6, 7]] = float("nan")
    spans = [(2, 6)]
    assert drawn(spans, given_PD) == drawn(spans, elsewhere_PD)
    assert drawn(spans, given_PD) != drawn(spans, None)
    assert drawn(spans, given_PD, budget=5) == pytest.approx(drawn(spans, given_PD), abs=1e-5)


def test_an_embedding_that_is_not_a_number_ends_its_request_alone(reference, prompt_of) -> None:
    engine = reference()
    bad_PD = torch.full((8, 64), float("nan"))
    params = SamplingParams(max_tokens=3, temperature=0)
    engine.engine.add_request("bad", prompt_of(8), params, image_spans=[(2, 6)], embeddings=bad_PD)
    engine.records["bad"] = []
    engine.add("good", prompt_of(5, 1), max_tokens=3, temperature=0)
    engine.drain()
    assert engine.answer("bad").finish_reason == "invalid"
    assert engine.answer("good").finish_reason == "length"
    alone = reference()
    alone.add("good", prompt_of(5, 1), max_tokens=3, temperature=0)
    alone.drain()
    assert engine.tokens("good") == alone.tokens("good")
