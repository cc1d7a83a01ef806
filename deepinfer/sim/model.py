"""The smallest model with every kind of state: window rings, pending pairs, both ratios, picks, n-gram history."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from deepinfer.model.checkpoint import make_checkpoint
from deepinfer.model.config import ModelConfig
from deepinfer.model.presets import preset

SIMULATED_MODEL_SEED = 0


def simulated_config() -> ModelConfig:
    """Return tiny8 cut down to three layers, so that a step costs little and still touches every cache."""
    return replace(
        preset("tiny8"),
        num_hidden_layers=3,
        compress_ratios=(0, 2, 1),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2),
        candidate_source_layer_id=2,
        engram_layer_ids=(1,),
        engram_num_embeddings=(660,),
        num_nextn_predict_layers=0,
        dspark_block_size=0,
        dspark_noise_token_id=0,
        dspark_target_layer_ids=(),
        dspark_markov_rank=0,
        dspark_n_routed_experts=0,
        dspark_num_experts_per_tok=0,
    )


def make_simulated_model(directory: Path) -> Path:
    """Write the model's checkpoint; the oracle never reads its values."""
    make_checkpoint(simulated_config(), SIMULATED_MODEL_SEED, directory)
    return directory
