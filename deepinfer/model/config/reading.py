"""From the keys of a Hugging Face ``config.json`` to typed field values, collecting every problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from difflib import get_close_matches
from typing import Any

MODEL_TYPE = "deepseek_v41"
ARCHITECTURE = "DeepseekV41ForCausalLM"

# Where the released file keeps a key; every other key lives in text_config.
TOP_LEVEL_KEYS = frozenset(
    {"dtype", "bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "quantization_config", "vision_config"}
)

# Written by the transformers library; they say nothing about the mathematics.
BOOKKEEPING_KEYS = frozenset(
    {"transformers_version", "_name_or_path", "use_cache", "initializer_range", "auto_map", "pretraining_tp"}
)

# DeepSeek-V4 keys that V4.1 does not have: present is harmless only with the value that means "not used".
ABSENT_ON_PURPOSE: dict[str, tuple[tuple[object, ...], str]] = {
    "num_hash_layers": ((None, 0), "no layer routes by token id"),
    "n_group": ((None, 0, 1), "experts are chosen from one flat list"),
    "topk_group": ((None, 0, 1), "experts are chosen from one flat list"),
    "first_k_dense_replace": ((None, 0), "every layer is a mixture of experts"),
    "moe_layer_freq": ((None, 1), "every layer is a mixture of experts"),
    "intermediate_size": ((None,), "every layer is a mixture of experts"),
    "kv_lora_rank": ((None,), "one key-value vector per token is projected directly"),
}

_ROPE_SCALING_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention_factor": (None, 1, 1.0),
    "mscale": (None,),
    "mscale_all_dim": (None,),
}


def flatten(mapping: Mapping[str, object], problems: list[str]) -> dict[str, object]:
    """Lift ``text_config`` to the top; a key given twice must agree with itself."""
    flat: dict[str, object] = {key: value for key, value in mapping.items() if key != "text_config"}
    model_types = {"": (MODEL_TYPE, f"{MODEL_TYPE}_text")}
    text = mapping.get("text_config", {})
    if not isinstance(text, Mapping):
        problems.append(f"text_config: {text!r} is not an object")
        text = {}
    for key, value in text.items():
        if key == "model_type":
            if value not in model_types[""]:
                problems.append(f"text_config.model_type: {value!r} is not served, only {MODEL_TYPE}_text")
        elif key in flat and flat[key] != value:
            problems.append(f"{key}: {flat[key]!r} at the top contradicts {value!r} in text_config")
        else:
            flat[key] = value
    model_type = flat.pop("model_type", MODEL_TYPE)
    if model_type not in model_types[""]:
        problems.append(f"model_type: {model_type!r} is not served, only {MODEL_TYPE!r}")
    architectures = flat.pop("architectures", [ARCHITECTURE])
    if not isinstance(architectures, list) or ARCHITECTURE not in architectures:
        problems.append(f"architectures: {architectures!r} does not name {ARCHITECTURE!r}")
    torch_dtype = flat.pop("torch_dtype", None)
    if torch_dtype is not None and flat.setdefault("dtype", torch_dtype) != torch_dtype:
        problems.append(f"dtype: {flat['dtype']!r} contradicts torch_dtype {torch_dtype!r}")
    return flat


def take_bookkeeping(flat: dict[str, object], problems: list[str]) -> None:
    """Remove the keys that are known and carry no mathematics, and refuse V4 keys that would change it."""
    for key in BOOKKEEPING_KEYS & set(flat):
        del flat[key]
    for key, (neutral, why) in ABSENT_ON_PURPOSE.items():
        if key in flat:
            value = flat.pop(key)
            if not _is_one_of(value, neutral):
                problems.append(f"{key}: {value!r} contradicts DeepSeek-V4.1 ({why}); leave the key out")
    head_dim, rope_dim = flat.get("head_dim"), flat.get("qk_rope_head_dim")
    if isinstance(head_dim, int) and isinstance(rope_dim, int):
        for key, expected in (("qk_nope_head_dim", head_dim - rope_dim), ("v_head_dim", head_dim)):
            value = flat.pop(key, expected)
            if value != expected:
                problems.append(f"{key}: {value!r} contradicts head_dim {head_dim} and qk_rope_head_dim {rope_dim}")


def read_fields(
    cls: type, raw: Mapping[str, object], where: str, problems: list[str], built: tuple[str, ...] = ()
) -> dict[str, object]:
    """Convert the keys of one JSON object to the fields of ``cls``; unreadable keys are left out and reported."""
    prefix = f"{where}." if where else ""
    keys = dict(raw)
    if where == "rope_scaling":
        _take_rope_aliases(keys, problems)
    elif where == "vision_config":
        model_type = keys.pop("model_type", f"{MODEL_TYPE}_vision")
        if model_type != f"{MODEL_TYPE}_vision":
            problems.append(f"vision_config.model_type: {model_type!r} is not served, only {MODEL_TYPE}_vision")
    known: dict[str, Field[Any]] = {field.name: field for field in fields(cls) if field.name not in built}
    values: dict[str, object] = {}
    for key, value in keys.items():
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            problems.append(f"{prefix}{key}: unknown key (value {value!r}){hint}")
            continue
        convert, wanted = _CONVERTERS[str(known[key].type)]
        try:
            values[key] = convert(value)
        except (TypeError, ValueError):
            problems.append(f"{prefix}{key}: {value!r} is not {wanted}")
            values[key] = _UNREADABLE
    return values


def read_part(part: type, raw: object, where: str, problems: list[str]) -> object:
    """Build the nested value of one key, or give the mark of an unreadable key after reporting why."""
    if not isinstance(raw, Mapping):
        problems.append(f"{where}: {raw!r} is not an object")
        return _UNREADABLE
    values = read_fields(part, raw, where, problems)
    report_missing(part, values, problems, where=f"{where}.")
    complete = all(field.name in values for field in fields(part))
    return part(**values) if complete else _UNREADABLE


def report_missing(cls: type, values: dict[str, object], problems: list[str], *, where: str = "") -> None:
    """Report required fields that were not given, fill in defaults, and drop the unreadable ones."""
    for field in fields(cls):
        if field.name not in values:
            if field.default is MISSING:
                problems.append(f"{where}{field.name}: missing, and it has no safe default")
            else:
                values[field.name] = field.default
    for name in [name for name, value in values.items() if value is _UNREADABLE]:
        del values[name]


def jsonable(value: object) -> object:
    """Turn a field's value into what JSON can hold."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: jsonable(part) for name, part in asdict(value).items()}
    return list(value) if isinstance(value, tuple) else value


def _take_rope_aliases(keys: dict[str, object], problems: list[str]) -> None:
    kind = keys.pop("type", None)
    if kind is not None and keys.setdefault("rope_type", kind) != kind:
        problems.append(f"rope_scaling.type: {kind!r} contradicts rope_type {keys['rope_type']!r}")
    for key, neutral in _ROPE_SCALING_NEUTRAL.items():
        if key in keys:
            value = keys.pop(key)
            if not _is_one_of(value, neutral):
                problems.append(f"rope_scaling.{key}: {value!r} would scale the rotation; DeepSeek-V4.1 does not")


def _is_one_of(value: object, allowed: tuple[object, ...]) -> bool:
    # True == 1 in Python, but a boolean is not a count.
    return any(value is item or (value == item and not isinstance(value, bool)) for item in allowed)


class _Unreadable:
    """Marks a key that was given, so that it is not reported as missing as well."""


_UNREADABLE = _Unreadable()


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError
    return float(value)


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _integers(value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise TypeError
    return tuple(_integer(item) for item in value)


_CONVERTERS: dict[str, tuple[Callable[[object], object], str]] = {
    "int": (_integer, "a whole number"),
    "float": (_number, "a finite number"),
    "bool": (_boolean, "true or false"),
    "str": (_string, "a string"),
    "tuple[int, ...]": (_integers, "a list of whole numbers"),
    "int | None": (lambda value: None if value is None else _integer(value), "a whole number or null"),
    "float | None": (lambda value: None if value is None else _number(value), "a finite number or null"),
}
