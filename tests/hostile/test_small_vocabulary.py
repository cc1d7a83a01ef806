"""Drafts that are really accepted: with eight tokens and flat logits the model's own drafts are often right.

No script stands in for the rounds here; draft stages, pool, verification and commit are the engine's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from deepinfer import LLM, RequestOutput, SamplingParams
from deepinfer.model.checkpoint import make_checkpoint
from deepinfer.model.config import ModelConfig
from deepinfer.model.engram_hash import engram_primes
from deepinfer.model.presets import preset

VOCAB_SIZE = 8
LIMIT = 30
SIZES: dict[str, Any] = {"block_size": 4, "max_model_len": LIMIT, "batch_invariant": True, "max_num_batched_tokens": 9}

MIX: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 1.7, "top_k": 4, "top_p": 0.9, "stop_token_ids": (5,), "min_tokens": 3},
    {"temperature": 0.8, "presence_penalty": 0.9, "frequency_penalty": -0.4, "repetition_penalty": 1.2, "n": 2},
    {"temperature": 5.0, "min_p": 0.3, "logit_bias": {3: 1.5, 4: -100.0}, "blacklist_token_ids": (6,)},
    {"temperature": 1.0, "allowed_token_ids": (2, 3, 5), "ignore_eos": True, "raw_logprobs": True},
)
PROMPTS = [[3, 4, 5], [2] * 9, [7, 0, 3, 3], [4], [5, 3] * 13]


@pytest.fixture(scope="module")
def flat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape: dict[str, Any] = preset("tiny8").to_hf(nested=False) | {
        "vocab_size": VOCAB_SIZE,
        "engram_compressed_vocab_size": VOCAB_SIZE,
        "image_token_id": VOCAB_SIZE - 2,
        "dspark_noise_token_id": VOCAB_SIZE - 1,
        "dspark_target_layer_ids": [1, 2, 3],
        "hidden_size": 64,
        "head_dim": 32,
        "index_head_dim": 32,
        "qk_rope_head_dim": 16,
        "num_attention_heads": 2,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "compress_ratios": [0, 2, 1, 1, 0, 0],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 3],
        "candidate_source_layer_id": 2,
        "engram_layer_ids": [1],
        "engram_vocab_size": 30,
    }
    primes = engram_primes(1, shape["engram_max_ngram_size"], shape["engram_n_heads"], shape["engram_vocab_size"])
    config = ModelConfig.from_hf(shape | {"engram_num_embeddings": [sum(of_layer) for of_layer in primes]})
    directory = make_checkpoint(config, 3, tmp_path_factory.mktemp("flat") / "model")
    weights = load_file(directory / "model.safetensors")
    weights["head.weight"] *= 0.15
    save_file(weights, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def answer(flat_model: Path) -> Callable[..., tuple[list[RequestOutput], LLM]]:
    def ask(params: list[SamplingParams], prompts: list[list[int]], **options: Any) -> tuple[list[RequestOutput], LLM]:
        llm = LLM(flat_model, accelerator="cpu_ref", **{"num_blocks": 60, "max_num_seqs": 8, **SIZES, **options})
        records = llm.generate(prompts, params, use_tqdm=False)
        llm.engine.check_invariants()
        assert llm.engine.stats().free_blocks == llm.engine.stats().usable_blocks
        return records, llm

    return ask


def mixed() -> list[SamplingParams]:
    return [SamplingParams(seed=90 - number, max_tokens=14, logprobs=3, **each) for number, each in enumerate(MIX)]


def shown(records: list[RequestOutput]) -> list[Any]:
    return [
        (list(each.token_ids), list(each.logprobs or ()), each.finish_reason, each.stop_reason)
        for record in records
        for each in record.outputs
    ]


@pytest.fixture(scope="module")
def plain(answer: Callable[..., tuple[list[RequestOutput], LLM]]) -> list[RequestOutput]:
    return answer(mixed(), PROMPTS)[0]


@pytest.mark.parametrize(("drafts", "num_blocks"), [(2, 9), (5, 60)])
def test_accepted_drafts_change_nothing_in_coupled_verification(
    answer: Callable[..., tuple[list[RequestOutput], LLM]], plain: list[RequestOutput], drafts: int, num_blocks: int
) -> None:
    """Length limits of request and engine, stops and preemptions (exactly one long request fits) inside the runs."""
    options = {"num_speculative_tokens": drafts, "verification": "coupled", "num_blocks": num_blocks}
    records, llm = answer(mixed(), PROMPTS, **options)
    assert shown(records) == shown(plain)
    assert llm.engine.stats().accepted_tokens > 3
    assert (llm.engine.stats().preemptions > 0) is (num_blocks < 60)


def test_tokens_that_standard_verification_accepts_have_the_log_probabilities_of_the_plain_run(
    answer: Callable[..., tuple[list[RequestOutput], LLM]],
) -> None:
    """Fault 62: the plain run is made to emit the same tokens, and lists what it would have drawn from."""
    records, llm = answer(mixed(), PROMPTS, num_speculative_tokens=4)
    assert llm.engine.stats().accepted_tokens > 10
    emitted = [
        (prompt, dataclasses.replace(params, n=1, golden_token_ids=each.token_ids))
        for prompt, params, record in zip(PROMPTS, mixed(), records, strict=True)
        for each in record.outputs
    ]
    forced, _ = answer([params for _, params in emitted], [prompt for prompt, _ in emitted])
    assert shown(forced) == shown(records)
