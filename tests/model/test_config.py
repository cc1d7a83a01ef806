"""ModelConfig: what it reads, what it keeps, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest

from deepinfer.errors import ConfigurationError
from deepinfer.model import ModelConfig
from deepinfer.model.presets import preset, preset_names

TINY8 = preset("tiny8").to_hf(nested=False)
FLASH = preset("v41-flash").to_hf()


def refusals(**changes: object) -> str:
    """Read a flat tiny8 with some keys changed (... removes a key) and give the error's text."""
    mapping = copy.deepcopy(TINY8)
    for key, value in changes.items():
        if value is ...:
            del mapping[key]
        else:
            mapping[key] = value
    with pytest.raises(ConfigurationError) as caught:
        ModelConfig.from_hf(mapping)
    return str(caught.value)


def test_every_preset_is_a_valid_configuration() -> None:
    assert set(preset_names()) >= {"tiny8", "tiny6-wide", "mini276", "v41-flash", "small"}
    for name in preset_names():
        assert preset(name).num_hidden_layers > 0


def test_a_preset_may_be_a_path(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FLASH))
    assert preset(path) == preset("v41-flash")


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="mini276, small, tiny6-wide, tiny8"):
        preset("tiny9")


@pytest.mark.parametrize("name", ["tiny8", "tiny6-wide", "mini276", "v41-flash"])
def test_both_written_forms_read_back_to_an_equal_configuration(name: str) -> None:
    config = preset(name)
    for written in (config.to_hf(), config.to_hf(nested=False)):
        assert ModelConfig.from_hf(json.loads(json.dumps(written))) == config


def test_the_released_configuration_has_the_documented_values() -> None:
    config = preset("v41-flash")
    assert config.compress_ratios == (0, 0) + (2,) * 18 + (1,) * 20 + (0,) * 3
    assert (config.hidden_size, config.head_dim, config.qk_nope_head_dim) == (5120, 512, 448)
    assert config.engram_num_embeddings == (384006168, 384016682)
    assert config.num_engram_columns == 24
    assert config.first_decoder_layer == 20
    assert config.rope_scaling.original_max_position_embeddings == 65536
    assert config.vision_config is not None
    assert config.vision_config.max_wh_ratio is None
    assert config.quantization_config is not None
    assert config.quantization_config.weight_block_size == (32, 32)


def test_whole_numbers_are_taken_for_real_ones_and_stored_as_such() -> None:
    assert isinstance(ModelConfig.from_hf({**TINY8, "rope_theta": 10000}).rope_theta, float)


@pytest.mark.parametrize("key", ["transformers_version", "use_cache", "_name_or_path", "initializer_range"])
def test_bookkeeping_of_the_transformers_library_is_accepted(key: str) -> None:
    assert ModelConfig.from_hf({**TINY8, key: "5.24.0"}) == preset("tiny8")


def test_keys_with_one_possible_value_may_be_left_out() -> None:
    fixed = {"hidden_act", "attention_bias", "scoring_func", "topk_method", "num_key_value_heads", "architectures"}
    assert ModelConfig.from_hf({k: v for k, v in TINY8.items() if k not in fixed}) == preset("tiny8")


def test_v4_keys_are_harmless_only_when_they_mean_not_used() -> None:
    neutral = {"num_hash_layers": 0, "n_group": 1, "topk_group": None, "first_k_dense_replace": 0, "v_head_dim": 64}
    assert ModelConfig.from_hf({**TINY8, **neutral}) == preset("tiny8")
    for key, value in {"num_hash_layers": 3, "n_group": 8, "topk_group": 4, "intermediate_size": 18432}.items():
        assert f"{key}: {value} contradicts DeepSeek-V4.1" in refusals(**{key: value})


def test_a_model_without_draft_needs_no_draft_keys() -> None:
    mapping = {k: v for k, v in TINY8.items() if not k.startswith("dspark")}
    config = ModelConfig.from_hf(
        {**mapping, "num_nextn_predict_layers": 0, "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1]}
    )
    assert config.dspark_block_size == 0


def test_a_model_without_engram_needs_no_engram_keys() -> None:
    mapping = {k: v for k, v in TINY8.items() if not k.startswith("engram")}
    assert ModelConfig.from_hf({**mapping, "engram_layer_ids": []}).num_engram_columns == 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"vocab_sise": 5}, "vocab_sise: unknown key (value 5); did you mean 'vocab_size'?"),
        ({"head_dim": ...}, "head_dim: missing"),
        ({"eos_token_id": ...}, "eos_token_id: missing"),
        ({"vocab_size": "512"}, "vocab_size: '512' is not a whole number"),
        ({"vocab_size": True}, "vocab_size: True is not a whole number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: nan is not a finite number"),
        ({"kv_source_layer_ids": 2}, "kv_source_layer_ids: 2 is not a list"),
        ({"compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0]}, "compress_ratios: 9 entries"),
        ({"compress_ratios": [0, 0, 4, 4, 1, 1, 1, 1, 0, 0]}, "compress_ratios: [4] are not served"),
        ({"compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 1, 0]}, "the draft stages have [1, 0]"),
        ({"compress_ratios": [0, 0, 2, 1, 2, 1, 1, 1, 0, 0]}, "must not cross a ratio boundary"),
        ({"compress_ratios": [0, 2, 0, 2, 1, 1, 1, 1, 0, 0]}, "covers no source at or before layers [1]"),
        ({"kv_source_layer_ids": [2]}, "must not cross a ratio boundary"),
        ({"kv_source_layer_ids": [4, 2]}, "is not strictly increasing"),
        ({"kv_source_layer_ids": [2, 4, 8]}, "layers [8] do not exist"),
        ({"kv_source_layer_ids": [0, 2, 4]}, "layers [0] have compress ratio 0"),
        ({"index_source_layer_ids": [4, 6]}, "covers no source at or before layers [2, 3]"),
        ({"index_source_layer_ids": [2, 6]}, "every layer of kv_source_layer_ids must be listed"),
        ({"candidate_source_layer_id": 6}, "must be one of kv_source_layer_ids"),
        ({"candidate_source_layer_id": 2}, "with compress ratio 1"),
        ({"candidate_source_layer_id": -1}, "must be one of kv_source_layer_ids"),
        ({"kv_source_layer_ids": [2, 4, 6]}, "ratio-1 owners [4, 6]"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not served, only 'silu'"),
        ({"attention_bias": True}, "attention_bias: True"),
        ({"num_key_value_heads": 4}, "num_key_value_heads: 4"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: True"),
        ({"hidden_size": 136}, "hidden_size: 136 is not a multiple of 32"),
        ({"head_dim": 48}, "head_dim: 48 is not a multiple of 32"),
        ({"qk_rope_head_dim": 128}, "qk_rope_head_dim: 128 exceeds head_dim 64"),
        ({"qk_rope_head_dim": 31}, "qk_rope_head_dim: 31 is odd"),
        ({"o_groups": 3}, "o_groups: 3 does not divide num_attention_heads 4"),
        ({"sliding_window": 0}, "sliding_window: 0 must be above zero"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9 exceeds n_routed_experts 8"),
        ({"eos_token_id": 512}, "eos_token_id: 512 is not a token id"),
        ({"dspark_noise_token_id": 512}, "dspark_noise_token_id: 512 is not a token id"),
        ({"dspark_target_layer_ids": []}, "dspark_target_layer_ids: empty"),
        ({"dspark_target_layer_ids": [6, 7, 8]}, "dspark_target_layer_ids: layers [8] do not exist"),
        ({"engram_num_embeddings": [660, 866]}, "give: [660, 864]"),
        ({"engram_num_embeddings": [660]}, "give: [660, 864]"),
        ({"engram_layer_ids": []}, "engram_num_embeddings: [660, 864] without any engram_layer_ids"),
        ({"engram_head_dim": 24}, "engram_head_dim: 24 is not a multiple of 32"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size: 1 must be at least 2"),
        ({"engram_compressed_vocab_size": 513}, "exceeds vocab_size 512"),
        ({"rope_scaling": None}, "rope_scaling: missing"),
        ({"rope_scaling": 16}, "rope_scaling: 16 is not an object"),
        ({"dtype": "int8"}, "dtype: 'int8' is not served"),
        ({"torch_dtype": "bfloat16"}, "contradicts torch_dtype 'bfloat16'"),
        ({"model_type": "deepseek_v4"}, "model_type: 'deepseek_v4' is not served"),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "does not name 'DeepseekV41ForCausalLM'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.quant_method: 'gptq'"),
        ({"quantization_config": {"weight_block_size": [128, 128]}}, "weight_block_size: (128, 128)"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.bits: unknown key"),
        ({"vision_config": {"hidden_size": 8}}, "vision_config.patch_size: missing"),
        ({"text_config": {"vocab_size": 500}}, "vocab_size: 512 at the top contradicts 500 in text_config"),
        ({"v_head_dim": 128}, "v_head_dim: 128 contradicts head_dim 64"),
    ],
)
def test_each_fault_is_refused_with_its_key_and_value(changes: dict[str, object], expected: str) -> None:
    assert expected in refusals(**changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_type": "linear", "type": "linear"}, "rope_scaling.rope_type: 'linear'"),
        ({"type": "linear"}, "rope_scaling.type: 'linear' contradicts rope_type 'yarn'"),
        ({"mscale": 1.0}, "rope_scaling.mscale: 1.0 would scale the rotation"),
        ({"attention_factor": 1.3}, "rope_scaling.attention_factor: 1.3"),
        ({"factor": 0.5}, "rope_scaling.factor: 0.5 must be at least 1"),
        ({"beta_slow": 64}, "0 < beta_slow < beta_fast"),
        ({"low_freq_factor": 1}, "rope_scaling.low_freq_factor: unknown key"),
    ],
)
def test_rotation_settings_of_other_models_are_refused(changes: dict[str, object], expected: str) -> None:
    scaling = TINY8["rope_scaling"]
    assert isinstance(scaling, dict)
    assert expected in refusals(rope_scaling={**scaling, **changes})


def test_all_problems_are_reported_in_one_error() -> None:
    text = refusals(
        bad=1, hidden_act="gelu", vocab_size="x", head_dim=..., sliding_window=0, rope_scaling={"factor": 2}
    )
    for part in ("bad: unknown", "hidden_act:", "vocab_size: 'x'", "head_dim: missing", "sliding_window: 0"):
        assert part in text
    assert "rope_scaling.beta_fast: missing" in text
    assert "rope_scaling: missing" not in text
    assert "vocab_size: missing" not in text


def test_a_changed_copy_is_checked_like_a_file() -> None:
    config = preset("tiny8")
    assert dataclasses.replace(config, index_topk=3).index_topk == 3
    with pytest.raises(ConfigurationError, match="index_topk: 0"):
        dataclasses.replace(config, index_topk=0)


def test_a_configuration_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset("tiny8").vocab_size = 1  # type: ignore[misc]


@pytest.mark.parametrize(("text", "expected"), [("{", "is not JSON text"), ("[]", "holds a JSON list")])
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=expected) as caught:
        ModelConfig.from_file(path)
    assert str(path) in str(caught.value)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        ModelConfig.from_file(tmp_path / "config.json")
