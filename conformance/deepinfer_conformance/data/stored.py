"""Calls as files: one safetensors file with every tensor, and the structure around them as its metadata.

A captured call is replayed like any other case: its inputs are in the file, its law is numerics.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from deepinfer.accelerator import (
    EntryCache,
    IndexCache,
    OpOptions,
    PendingCache,
    StepLayout,
    StoredExpert,
    StoredWeight,
    WindowCache,
)
from deepinfer.accelerator.ops import drafting, sampling
from deepinfer.accelerator.ops.attention import LongRange
from deepinfer.accelerator.ops.experts import RouterWeights, Routing
from deepinfer.accelerator.ops.memory import NgramHash, NgramTable
from deepinfer.accelerator.ops.mixing import Mix, MixWeights
from deepinfer.accelerator.ops.norm import RotaryTable
from deepinfer.accelerator.ops.selection import SelectionRule
from deepinfer.errors import ArgumentError
from deepinfer.numerics import Float32Record, IndexRecord, LongRangeRecord, WindowRecord
from deepinfer_conformance.data.call import OpCall, Recipe

SUFFIX: Final = ".case"
_FORMAT: Final = 1
_TYPES: Final[Mapping[str, type[Any]]] = {
    each.__name__: each
    for each in (
        EntryCache, IndexCache, PendingCache, StepLayout, StoredExpert, StoredWeight, WindowCache, LongRange,
        RouterWeights, Routing, NgramHash, NgramTable, Mix, MixWeights, RotaryTable, SelectionRule, Float32Record,
        IndexRecord, LongRangeRecord, WindowRecord, sampling.AllowedEntries, sampling.BiasEntries,
        sampling.LogitAdjustments, sampling.PenaltyEntries, sampling.RowFacts, sampling.SamplingRows,
        sampling.SampledTokens, sampling.TokenEntries, sampling.TokenWeights, drafting.DraftBlock,
        drafting.DraftDistributions, drafting.DraftRuns, drafting.Proposals,
    )
}  # fmt: skip


def save_call(call: OpCall, options: OpOptions, path: Path) -> None:
    """Write a call; tensors lose their strides and keep their bits."""
    tensors: dict[str, torch.Tensor] = {}
    structure = {
        "format": _FORMAT,
        "op": call.op,
        "options": {
            "activation_dtype": str(options.activation_dtype).removeprefix("torch."),
            "numerics": options.numerics,
            "kv_cache_dtype": options.kv_cache_dtype,
        },
        "arguments": {name: _plain(value, tensors) for name, value in call.arguments.items()},
    }
    save_file(tensors, path, metadata={"call": json.dumps(structure)})


def load_call(path: Path) -> tuple[OpCall, OpOptions]:
    """Return a call that :func:`save_call` wrote, and the options it was made with.

    Raises:
        ArgumentError: the file is absent, damaged, or of another format.
    """
    try:
        with safe_open(path, framework="pt") as file:
            structure = json.loads(file.metadata()["call"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        problem = f"no captured case: {type(error).__name__}: {error}; `deepinfer generate --capture DIR` writes them"
        raise ArgumentError(str(path), [problem]) from error
    if structure.get("format") != _FORMAT:
        raise ArgumentError(
            str(path), [f"format {structure.get('format')!r}; this suite reads {_FORMAT}: capture again"]
        )
    options = structure["options"]
    arguments = {name: _value(plain, tensors) for name, plain in structure["arguments"].items()}
    return OpCall(structure["op"], arguments), OpOptions(
        activation_dtype=getattr(torch, options["activation_dtype"]),
        numerics=options["numerics"],
        kv_cache_dtype=options["kv_cache_dtype"],
    )


def _plain(value: object, tensors: dict[str, torch.Tensor]) -> object:
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, Recipe):
        return {
            "recipe": value.op,
            "arguments": {name: _plain(each, tensors) for name, each in value.arguments.items()},
        }
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value).__name__
        if kind not in _TYPES:
            raise ArgumentError("capture", [f"a {kind} cannot be stored; add it to deepinfer_conformance.data.stored"])
        fields = {field.name: _plain(getattr(value, field.name), tensors) for field in dataclasses.fields(value)}
        return {"type": kind, "fields": fields}
    if isinstance(value, (list, tuple)):
        return {"list": [_plain(each, tensors) for each in value]}
    return {"value": value}


def _value(plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> object:
    if "tensor" in plain:
        return tensors[plain["tensor"]]
    if "recipe" in plain:
        return Recipe(plain["recipe"], {name: _value(each, tensors) for name, each in plain["arguments"].items()})
    if "type" in plain:
        return _TYPES[plain["type"]](**{name: _value(each, tensors) for name, each in plain["fields"].items()})
    if "list" in plain:
        return [_value(each, tensors) for each in plain["list"]]
    return plain["value"]
