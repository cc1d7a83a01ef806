"""Scripts written for vLLM's offline interface, with only the import changed (docs/coming-from-vllm.md)."""

from __future__ import annotations

import dataclasses
import math

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.errors import ArgumentError


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_seqs=4, num_blocks=20)


def test_the_usual_script_runs(llm: LLM) -> None:
    prompts = ["Hello, my name is", "The capital of France is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4, seed=1, ignore_eos=True)
    outputs = llm.generate(prompts, sampling_params)
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert len(output.outputs[0].token_ids) == 4
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].finished()


def test_prompts_as_mappings_are_the_same_prompts(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    greedy = SamplingParams(temperature=0, max_tokens=3)
    ids = tokenizer.encode("Hello")
    plain, mapped, listed = llm.generate(["Hello", {"prompt": "Hello"}, {"prompt_token_ids": ids}], greedy)
    assert plain.outputs[0].token_ids == mapped.outputs[0].token_ids == listed.outputs[0].token_ids
    assert (mapped.prompt, listed.prompt, listed.prompt_token_ids) == ("Hello", None, tuple(ids))
    assert len(llm.generate({"prompt": "Hello"}, greedy)) == 1


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"prompt": [1]}, "'prompt' of type list"),
        ({"prompt_token_ids": "1"}, "'prompt_token_ids' of type str"),
        ({"prompt": "a", "multi_modal_data": None}, "keys \\['prompt', 'multi_modal_data'\\]"),
    ],
)
def test_a_mapping_that_is_no_prompt_says_what_one_is(llm: LLM, prompt: dict[str, object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        llm.generate(prompt)


def test_cumulative_logprob_adds_up_what_was_emitted(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=5, logprobs=2, ignore_eos=True)
    answer = llm.generate("Hello", params)[0].outputs[0]
    expected = math.fsum(entry[token] for token, entry in zip(answer.token_ids, answer.logprobs, strict=True))
    assert answer.cumulative_logprob == pytest.approx(expected)
    assert answer.cumulative_logprob < 0
    assert llm.generate("Hello", SamplingParams(max_tokens=1))[0].outputs[0].cumulative_logprob is None


def test_names_of_elsewhere_are_refused_with_what_to_write_instead() -> None:
    with pytest.raises(ArgumentError) as refused:
        LLM(gpu_memory_utilization=0.5, tensor_parallel_size=2, trust_remote_code=True, generation_config="vllm")
    text = str(refused.value)
    for words in (
        "here it is memory_utilization",
        "see data_parallel_size",
        "no code is ever loaded",
        "generation_config.json is not",
    ):
        assert words in text


def test_parameters_and_records_cannot_be_changed_under_a_request(llm: LLM) -> None:
    params = SamplingParams(seed=-1, max_tokens=2, ignore_eos=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5  # type: ignore[misc]
    first, again = (llm.generate("Hello", dataclasses.replace(params, top_k=9))[0] for _ in range(2))
    assert first.outputs[0].token_ids == again.outputs[0].token_ids  # -1 is a seed
    assert [*first.prompt_token_ids, *first.outputs[0].token_ids] == list(
        first.prompt_token_ids + first.outputs[0].token_ids
    )
