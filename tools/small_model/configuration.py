"""The shape of the small model, and its tokenizer's map.

Recall beyond the window can only come through compressed entries: layers 0 and 1 see 32 positions, and even all seven
windows in a row reach 217. Picks bite from 17 entries on, candidate blocks from 192.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from deepinfer.model import ModelConfig
from deepinfer.model.config.base import QuantizationConfig, RopeScaling
from deepinfer.model.engram_hash import engram_primes, normalise_text, token_map

_ENGRAM_ROWS, _ENGRAM_HEADS, _NGRAM = 500, 2, 4


def small_configuration(tokenizer: Tokenizer) -> ModelConfig:
    """Give the configuration that fits a tokenizer of ``make_tokenizer``."""
    vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
    rows = engram_primes(2, _NGRAM, _ENGRAM_HEADS, _ENGRAM_ROWS)
    return ModelConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        num_hidden_layers=7,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=64,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        rms_norm_eps=1e-20,
        sliding_window=32,
        compress_ratios=(0, 0, 2, 2, 1, 1, 1, 0, 0),
        kv_source_layer_ids=(2, 4),
        index_source_layer_ids=(2, 4, 6),
        index_n_heads=2,
        index_head_dim=64,
        index_topk=16,
        candidate_source_layer_id=4,
        candidate_topk_blocks=24,
        candidate_block_size=8,
        rope_theta=10000.0,
        compress_rope_theta=160000.0,
        rope_scaling=RopeScaling(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=256),
        max_position_embeddings=4096,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        engram_layer_ids=(1, 3),
        engram_num_embeddings=tuple(sum(primes) for primes in rows),
        engram_max_ngram_size=_NGRAM,
        engram_n_heads=_ENGRAM_HEADS,
        engram_head_dim=32,
        engram_vocab_size=_ENGRAM_ROWS,
        engram_compressed_vocab_size=_compressed_size(tokenizer),
        engram_pad_token_id=2,
        num_nextn_predict_layers=2,
        dspark_block_size=3,
        dspark_noise_token_id=vocabulary - 1,
        dspark_target_layer_ids=(4, 5, 6),
        dspark_markov_rank=32,
        dspark_n_routed_experts=4,
        dspark_num_experts_per_tok=1,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        image_token_id=vocabulary - 2,
        dtype="float32",
        quantization_config=QuantizationConfig(),
    )


def compressed_ids(tokenizer: Tokenizer, config: ModelConfig) -> npt.NDArray[np.int64]:
    """Give Engram's map of token ids."""
    return token_map(tokenizer, config)


def _compressed_size(tokenizer: Tokenizer) -> int:
    """Count the texts that differ in more than case, accents, width and white space, as the map itself does."""
    keys: set[str] = set()
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        keys.add((tokenizer.id_to_token(token) or "") if "\ufffd" in text else (normalise_text(text) or text))
    return len(keys)
