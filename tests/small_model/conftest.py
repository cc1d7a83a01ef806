"""The trainer of the packaged model on models of a few thousand weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from deepinfer.model import ModelConfig
from deepinfer.model.engram_hash import engram_primes
from tools.small_model.configuration import small_configuration
from tools.small_model.make_tokenizer import make_tokenizer

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_bits() -> Iterator[None]:
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture(scope="session")
def config(tokenizer: Tokenizer) -> ModelConfig:
    return small_configuration(tokenizer)


@pytest.fixture(scope="session")
def thin(config: ModelConfig) -> ModelConfig:
    """The small model's layers, each as thin as the formats allow; everything that can bite does so early."""
    return replace(
        config,
        hidden_size=32,
        num_attention_heads=2,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        o_lora_rank=32,
        moe_intermediate_size=32,
        n_routed_experts=4,
        sliding_window=8,
        index_head_dim=32,
        index_topk=4,
        candidate_topk_blocks=3,
        candidate_block_size=4,
        engram_vocab_size=50,
        engram_num_embeddings=tuple(sum(primes) for primes in engram_primes(2, 4, 2, 50)),
    )
