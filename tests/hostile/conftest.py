"""Models that no other test knows: odd shapes, odd arrangements of layers, random weights of a seed of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer import LLM
from deepinfer.model.checkpoint import make_checkpoint
from deepinfer.model.config import ModelConfig
from deepinfer.model.engram_hash import engram_primes
from deepinfer.model.presets import preset

_COMMON = {
    "vocab_size": 101,
    "engram_compressed_vocab_size": 101,
    "image_token_id": 100,
    "dspark_target_layer_ids": [],
    "num_nextn_predict_layers": 0,
    "hidden_size": 64,
    "head_dim": 32,
    "index_head_dim": 32,
    "qk_rope_head_dim": 16,
    "moe_intermediate_size": 32,
    "index_n_heads": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    # Starts with a pair-merged owner, one head group, one expert per token, two streams, no n-gram memory.
    "one_of_each": {
        "hidden_size": 96,
        "hc_mult": 2,
        "num_hidden_layers": 7,
        "compress_ratios": [2, 2, 0, 1, 1, 0, 1],
        "kv_source_layer_ids": [0, 3],
        "index_source_layer_ids": [0, 1, 3, 4, 6],
        "candidate_source_layer_id": 3,
        "candidate_topk_blocks": 3,
        "candidate_block_size": 3,
        "index_topk": 5,
        "sliding_window": 5,
        "num_attention_heads": 3,
        "o_groups": 1,
        "n_routed_experts": 5,
        "num_experts_per_tok": 1,
        "qk_rope_head_dim": 8,
        "swiglu_limit": 1.0,
        "engram_layer_ids": [],
    },
    # A window of one, two pair-merged owners, three streams, all experts for every token, n-gram memory on three.
    "narrow": {
        "hc_mult": 3,
        "num_hidden_layers": 7,
        "compress_ratios": [2, 0, 2, 2, 1, 0, 1],
        "kv_source_layer_ids": [0, 2, 4],
        "index_source_layer_ids": [0, 2, 4, 6],
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 5,
        "index_topk": 3,
        "sliding_window": 1,
        "num_attention_heads": 6,
        "o_groups": 3,
        "n_routed_experts": 6,
        "num_experts_per_tok": 6,
        "engram_layer_ids": [0, 2, 4],
        "engram_max_ngram_size": 3,
        "engram_n_heads": 3,
        "engram_pad_token_id": 0,
    },
    # The ratio-1 owner stands before the pair-merged one, behind which a window layer lies.
    "turned_round": {
        "num_hidden_layers": 5,
        "compress_ratios": [1, 1, 2, 0, 2],
        "kv_source_layer_ids": [0, 2],
        "index_source_layer_ids": [0, 1, 2],
        "candidate_source_layer_id": 0,
        "engram_layer_ids": [0],
    },
}


def odd_config(name: str) -> ModelConfig:
    shape: dict[str, Any] = preset("tiny8").to_hf(nested=False) | _COMMON | SHAPES[name]
    layers = shape["engram_layer_ids"]
    primes = engram_primes(
        len(layers), shape["engram_max_ngram_size"], shape["engram_n_heads"], shape["engram_vocab_size"]
    )
    return ModelConfig.from_hf(shape | {"engram_num_embeddings": [sum(of_layer) for of_layer in primes]})


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def odd_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(odd_config(name), 29, tmp_path_factory.mktemp("odd") / name)
        return made[name]

    return directory


@pytest.fixture
def odd(odd_directory: Callable[[str], Path]) -> Callable[..., LLM]:
    def build(name: str = "turned_round", model: Path | None = None, **options: Any) -> LLM:
        given = {"block_size": 4, "num_blocks": 60, "max_num_seqs": 6, "max_model_len": 120} | options
        return LLM(model or odd_directory(name), accelerator="cpu_ref", **{"kv_cache_dtype": "float32"} | given)

    return build
