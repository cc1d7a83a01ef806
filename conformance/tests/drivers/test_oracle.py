"""The oracle's tokens follow from the history alone, and from nothing else if the memory is kept straight."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from deepinfer.accelerator import OpOptions
from deepinfer.errors import ArgumentError, PlanError
from deepinfer_conformance.drivers import OracleDriver, OracleHistory, oracle_tokens
from deepinfer_conformance.drivers.oracle.hashing import TokenRule

PROMPT = [(7 * place * place + 3 * place + 11) % 400 for place in range(37)]


def chunks_of(total: int, size: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 37])
def test_every_chunk_split_gives_the_tokens_of_the_history(make_hand, tiny8, size) -> None:
    hand = make_hand(OracleDriver(), tiny8)
    request = hand.request(PROMPT)
    (said,) = hand.decode([request], [hand.prefill(request, chunks_of(len(PROMPT), size))], 12)
    assert said == oracle_tokens(PROMPT, 13, tiny8, tiny8.vocab_size)


@pytest.mark.parametrize("kv_cache_dtype", ["released", "float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_depend_neither_on_the_activation_dtype_nor_on_the_cache_format(
    make_hand, three_layers, dtype, kv_cache_dtype
) -> None:
    options = OpOptions(activation_dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    hand = make_hand(OracleDriver(), three_layers, options)
    request = hand.request(PROMPT)
    (said,) = hand.decode([request], [hand.prefill(request, [20, 17])], 6)
    assert said == oracle_tokens(PROMPT, 7, three_layers, three_layers.vocab_size)


def test_requests_of_one_batch_do_not_meet(make_hand, three_layers) -> None:
    hand = make_hand(OracleDriver(), three_layers)
    prompts = [PROMPT[:9], PROMPT[5:6], PROMPT[3:22], PROMPT[:16]]
    requests = [hand.request(prompt) for prompt in prompts]
    step_type = type("Chunk", (), {})
    del step_type
    first = [hand.prefill(request, chunks_of(len(request.ids), 4)) for request in requests]
    said = hand.decode(requests, first, 9)
    assert said == [oracle_tokens(prompt, 10, three_layers, three_layers.vocab_size) for prompt in prompts]
    assert len({tuple(words) for words in said}) == len(prompts)
