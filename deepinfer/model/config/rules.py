"""What makes a configuration contradictory: each rule names the keys it needs and yields its problems.

A rule runs only where all its keys could be read, so one unreadable key does not hide the other problems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from deepinfer.model.engram_hash import engram_primes

if TYPE_CHECKING:
    from deepinfer.model.config.base import ModelConfig

Check = Callable[["ModelConfig"], Iterator[str]]

FORMAT_GROUP = 32
"""Elements that share one scale in every released format whose group divides a model dimension."""

_POSITIVE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "qk_rope_head_dim",
    "q_lora_rank", "o_groups", "o_lora_rank", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok",
    "routed_scaling_factor", "swiglu_limit", "rms_norm_eps", "sliding_window", "index_n_heads", "index_head_dim",
    "index_topk", "candidate_topk_blocks", "candidate_block_size", "rope_theta", "compress_rope_theta",
    "max_position_embeddings", "hc_mult", "hc_sinkhorn_iters", "hc_eps",
)  # fmt: skip
_ENGRAM_POSITIVE = ("engram_n_heads", "engram_head_dim", "engram_vocab_size", "engram_compressed_vocab_size")
_DRAFT_POSITIVE = (
    "dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts", "dspark_num_experts_per_tok",
)  # fmt: skip
_GROUPED = ("hidden_size", "moe_intermediate_size", "q_lora_rank", "o_lora_rank", "head_dim", "index_head_dim")
_ONLY: tuple[tuple[str, object, str], ...] = (
    ("num_key_value_heads", 1, "one vector per token is key and value of all heads"),
    ("n_shared_experts", 1, "the checkpoint names hold one shared expert"),
    ("scoring_func", "sqrtsoftplus", "the router knows no other score"),
    ("topk_method", "noaux_tc", "experts are chosen by score plus bias"),
    ("norm_topk_prob", True, "routing weights are renormalised"),
    ("hidden_act", "silu", "experts know no other activation"),
    ("attention_bias", False, "projections have no bias"),
    ("attention_dropout", 0.0, "inference drops nothing"),
    ("tie_word_embeddings", False, "head.weight is a tensor of its own"),
)
_DTYPES = ("bfloat16", "float32")


class _Rule(NamedTuple):
    needs: tuple[str, ...]
    check: Check


def owner_of(sources: tuple[int, ...], layer: int) -> int | None:
    """The last source at or before ``layer``, or None if there is none."""
    return max((source for source in sources if source <= layer), default=None)


def problems_of(config: ModelConfig) -> list[str]:
    """Every contradiction found among the keys that ``config`` has; empty if it can be served."""
    problems: list[str] = []
    for rule in _RULES:
        if all(hasattr(config, name) for name in rule.needs):
            problems.extend(rule.check(config))
    return problems


def _positive(name: str) -> _Rule:
    def check(config: ModelConfig) -> Iterator[str]:
        value = getattr(config, name)
        if value <= 0:
            yield f"{name}: {value!r} must be above zero"

    return _Rule((name,), check)


def _positive_if(name: str, switch: str) -> _Rule:
    def check(config: ModelConfig) -> Iterator[str]:
        value, active = getattr(config, name), getattr(config, switch)
        if active and value <= 0:
            yield f"{name}: {value!r} must be above zero, because {switch} is {active!r}"

    return _Rule((name, switch), check)


def _grouped(name: str) -> _Rule:
    def check(config: ModelConfig) -> Iterator[str]:
        value = getattr(config, name)
        if value > 0 and value % FORMAT_GROUP:
            yield f"{name}: {value} is not a multiple of {FORMAT_GROUP}, which the number formats need"

    return _Rule((name,), check)


def _only(name: str, allowed: object, why: str) -> _Rule:
    def check(config: ModelConfig) -> Iterator[str]:
        value = getattr(config, name)
        if value != allowed or isinstance(value, bool) != isinstance(allowed, bool):
            yield f"{name}: {value!r} is not served, only {allowed!r} ({why})"

    return _Rule((name,), check)


def _token_id(name: str, switch: str = "vocab_size") -> _Rule:
    def check(config: ModelConfig) -> Iterator[str]:
        value = getattr(config, name)
        if getattr(config, switch) and not 0 <= value < config.vocab_size:
            yield f"{name}: {value} is not a token id of a vocabulary of {config.vocab_size}"

    return _Rule((name, switch, "vocab_size"), check)


def _layer_list(name: str) -> _Rule:
    def check(config: ModelConfig) -> Iterator[str]:
        layers: tuple[int, ...] = getattr(config, name)
        outside = [layer for layer in layers if not 0 <= layer < config.num_hidden_layers]
        if outside:
            yield f"{name}: layers {outside} do not exist; num_hidden_layers is {config.num_hidden_layers}"
        if list(layers) != sorted(set(layers)):
            yield f"{name}: {list(layers)} is not strictly increasing"

    return _Rule((name, "num_hidden_layers"), check)


def _at_most(name: str, limit_name: str) -> _Rule:
    def check(config: ModelConfig) -> Iterator[str]:
        value, limit = getattr(config, name), getattr(config, limit_name)
        if value > limit:
            yield f"{name}: {value} exceeds {limit_name} {limit}"

    return _Rule((name, limit_name), check)


def _shapes(config: ModelConfig) -> Iterator[str]:
    if config.qk_rope_head_dim % 2:
        yield f"qk_rope_head_dim: {config.qk_rope_head_dim} is odd; rotation works on pairs of channels"
    if config.o_groups > 0 and config.num_attention_heads % config.o_groups:
        yield f"o_groups: {config.o_groups} does not divide num_attention_heads {config.num_attention_heads}"


def _ratios(config: ModelConfig) -> Iterator[str]:
    layers, stages, ratios = config.num_hidden_layers, config.num_nextn_predict_layers, config.compress_ratios
    if stages < 0:
        yield f"num_nextn_predict_layers: {stages} is below zero"
    if len(ratios) != layers + stages:
        yield (
            f"compress_ratios: {len(ratios)} entries, but num_hidden_layers {layers} and num_nextn_predict_layers "
            f"{stages} need {layers + stages}"
        )
    bad = sorted({ratio for ratio in ratios if ratio not in {0, 1, 2}})
    if bad:
        yield f"compress_ratios: {bad} are not served, only 0, 1 and 2"
    drafts = ratios[layers : layers + stages]
    if any(drafts):
        yield f"compress_ratios: the draft stages have {list(drafts)}, they must be 0 (window only)"


def _sharing(config: ModelConfig) -> Iterator[str]:
    ratios = dict(enumerate(config.compress_ratios[: config.num_hidden_layers]))
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        sources: tuple[int, ...] = getattr(config, name)
        plain = [layer for layer in sources if ratios.get(layer) == 0]
        if plain:
            yield f"{name}: layers {plain} have compress ratio 0 and keep no long-range entries"
        uncovered = [layer for layer, ratio in ratios.items() if ratio and owner_of(sources, layer) is None]
        if uncovered:
            yield f"{name}: {list(sources)} covers no source at or before layers {uncovered}"
    for layer, ratio in ratios.items():
        owner = owner_of(config.kv_source_layer_ids, layer)
        picker = owner_of(config.index_source_layer_ids, layer)
        if not ratio or owner is None:
            continue
        if ratios.get(owner, ratio) != ratio:
            yield (
                f"kv_source_layer_ids: layer {layer} (ratio {ratio}) would read the entries of layer {owner} "
                f"(ratio {ratios[owner]}); a sharing group must not cross a ratio boundary"
            )
        if picker is not None and picker < owner:
            yield (
                f"index_source_layer_ids: layer {layer} reads entries of layer {owner} but takes its picks from layer "
                f"{picker}, which picked among other entries; every layer of kv_source_layer_ids must be listed"
            )


def _candidates(config: ModelConfig) -> Iterator[str]:
    source = config.candidate_source_layer_id
    ratios = config.compress_ratios[: config.num_hidden_layers]
    if source is None:
        return
    if source not in config.kv_source_layer_ids or not 0 <= source < len(ratios) or ratios[source] != 1:
        yield (
            f"candidate_source_layer_id: {source} must be one of kv_source_layer_ids "
            f"{list(config.kv_source_layer_ids)} with compress ratio 1"
        )
        return
    others = [layer for layer in config.kv_source_layer_ids if layer < len(ratios) and ratios[layer] == 1]
    if others != [source]:
        yield f"kv_source_layer_ids: ratio-1 owners {others}, only candidate_source_layer_id {source} can be one"


def _rope(config: ModelConfig) -> Iterator[str]:
    scaling = config.rope_scaling
    if scaling.rope_type != "yarn":
        yield f"rope_scaling.rope_type: {scaling.rope_type!r} is not served, only 'yarn'"
    if scaling.factor < 1:
        yield f"rope_scaling.factor: {scaling.factor!r} must be at least 1"
    if scaling.original_max_position_embeddings <= 0:
        original = scaling.original_max_position_embeddings
        yield f"rope_scaling.original_max_position_embeddings: {original} must be above zero"
    if not 0 < scaling.beta_slow < scaling.beta_fast:
        yield (
            f"rope_scaling: beta_slow {scaling.beta_slow!r} and beta_fast {scaling.beta_fast!r} "
            "must satisfy 0 < beta_slow < beta_fast"
        )


def _engram(config: ModelConfig) -> Iterator[str]:
    if not config.engram_layer_ids:
        if config.engram_num_embeddings:
            yield f"engram_num_embeddings: {list(config.engram_num_embeddings)} without any engram_layer_ids"
        return
    if config.engram_max_ngram_size < 2:
        yield f"engram_max_ngram_size: {config.engram_max_ngram_size} must be at least 2"
    if config.engram_head_dim % FORMAT_GROUP:
        yield f"engram_head_dim: {config.engram_head_dim} is not a multiple of {FORMAT_GROUP}, as its format needs"
    if min(config.engram_max_ngram_size - 1, config.engram_n_heads, config.engram_vocab_size) <= 0:
        return
    primes = engram_primes(
        len(config.engram_layer_ids), config.engram_max_ngram_size, config.engram_n_heads, config.engram_vocab_size
    )
    derived = [sum(layer_primes) for layer_primes in primes]
    if list(config.engram_num_embeddings) != derived:
        yield (
            f"engram_num_embeddings: {list(config.engram_num_embeddings)} differs from the table rows that "
            f"engram_vocab_size, engram_n_heads and engram_max_ngram_size give: {derived}"
        )


def _draft(config: ModelConfig) -> Iterator[str]:
    if config.num_nextn_predict_layers > 0 and not config.dspark_target_layer_ids:
        yield "dspark_target_layer_ids: empty, but the draft stages read at least one layer"


def _quantization(config: ModelConfig) -> Iterator[str]:
    stored = config.quantization_config
    if stored is None:
        return
    served = (
        ("quant_method", stored.quant_method, "fp8"),
        ("activation_scheme", stored.activation_scheme, "dynamic"),
        ("weight_block_size", stored.weight_block_size, (32, 32)),
        ("scale_fmt", stored.scale_fmt, "ue8m0"),
        ("expert_dtype", stored.expert_dtype, "fp4"),
    )
    for name, value, allowed in served:
        if value != allowed:
            yield f"quantization_config.{name}: {value!r} is not served, only {allowed!r}"


def _vision(config: ModelConfig) -> Iterator[str]:
    vision = config.vision_config
    if vision is None:
        return
    for name in (
        "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "patch_size", "rope_theta",
        "downsample_ratio", "max_image_tokens", "min_pixels",
    ):  # fmt: skip
        if getattr(vision, name) <= 0:
            yield f"vision_config.{name}: {getattr(vision, name)!r} must be above zero"


def _dtype(config: ModelConfig) -> Iterator[str]:
    if config.dtype not in _DTYPES:
        yield f"dtype: {config.dtype!r} is not served, only {' and '.join(map(repr, _DTYPES))}"


_SHARING_KEYS = ("num_hidden_layers", "compress_ratios", "kv_source_layer_ids", "index_source_layer_ids")

_RULES: tuple[_Rule, ...] = (
    *(_positive(name) for name in _POSITIVE),
    *(_positive_if(name, "engram_layer_ids") for name in _ENGRAM_POSITIVE),
    *(_positive_if(name, "num_nextn_predict_layers") for name in _DRAFT_POSITIVE),
    *(_grouped(name) for name in _GROUPED),
    *(_only(name, allowed, why) for name, allowed, why in _ONLY),
    *(_token_id(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")),
    _token_id("engram_pad_token_id", "engram_layer_ids"),
    _token_id("dspark_noise_token_id", "num_nextn_predict_layers"),
    *(
        _layer_list(name)
        for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "dspark_target_layer_ids")
    ),
    _at_most("num_experts_per_tok", "n_routed_experts"),
    _at_most("dspark_num_experts_per_tok", "dspark_n_routed_experts"),
    _at_most("engram_compressed_vocab_size", "vocab_size"),
    _at_most("qk_rope_head_dim", "head_dim"),
    _at_most("qk_rope_head_dim", "index_head_dim"),
    _Rule(("qk_rope_head_dim", "o_groups", "num_attention_heads"), _shapes),
    _Rule(("num_hidden_layers", "num_nextn_predict_layers", "compress_ratios"), _ratios),
    _Rule(_SHARING_KEYS, _sharing),
    _Rule((*_SHARING_KEYS, "candidate_source_layer_id"), _candidates),
    _Rule(("rope_scaling",), _rope),
    _Rule(
        (
            "engram_layer_ids", "engram_num_embeddings", "engram_max_ngram_size", "engram_n_heads", "engram_head_dim",
            "engram_vocab_size",
        ),
        _engram,
    ),
    _Rule(("num_nextn_predict_layers", "dspark_target_layer_ids"), _draft),
    _Rule(("quantization_config",), _quantization),
    _Rule(("vision_config",), _vision),
    _Rule(("dtype",), _dtype),
)  # fmt: skip
