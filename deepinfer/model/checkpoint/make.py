"""Makes a checkpoint, with random or given weights, in the released file layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from deepinfer.errors import ArgumentError
from deepinfer.model.checkpoint.progress import Progress, ProgressCallback
from deepinfer.model.checkpoint.shards import INDEX_NAME, SINGLE_NAME
from deepinfer.model.config import ModelConfig
from deepinfer.model.inventory import FORMS, CheckpointForm, Parameter, parameters
from deepinfer.model.statistics import random_values
from deepinfer.numerics import quantise_engram_table, quantise_fp8_weight, quantise_mxfp4_weight

_QUANTISERS = {
    "fp8_block32": quantise_fp8_weight,
    "mxfp4": quantise_mxfp4_weight,
    "engram_fp8": quantise_engram_table,
}


def make_checkpoint(
    config: ModelConfig,
    seed: int,
    out_dir: str | Path,
    fmt: CheckpointForm = "float32",
    *,
    shards: int = 1,
    progress: ProgressCallback | None = None,
) -> Path:
    """Write ``config.json`` and random weights for every parameter of ``config``; give the directory.

    The same seed gives the same model in every form: the released form holds the float32 form's values, quantised.
    Arguments and errors are those of :func:`write_checkpoint`; ``seed`` changes every weight.
    """

    def values(parameter: Parameter) -> torch.Tensor:
        return random_values(parameter, seed)

    return write_checkpoint(config, values, out_dir, fmt, shards=shards, progress=progress)


def write_checkpoint(
    config: ModelConfig,
    values_of: Callable[[Parameter], torch.Tensor],
    out_dir: str | Path,
    fmt: CheckpointForm = "float32",
    *,
    shards: int = 1,
    progress: ProgressCallback | None = None,
) -> Path:
    """Write ``config.json`` and given values for every parameter of ``config``; give the directory.

    ``config.json`` is written last, so that an interrupted run leaves a directory that nobody can open by mistake.

    Args:
        config: the model.
        values_of: gives the unquantised float32 values of one parameter, in its logical shape.
        out_dir: a directory that is empty or does not exist yet.
        fmt: the form of the weights.
        shards: number of files; more than one are listed in an index.
        progress: called after every parameter; bytes are those of the tensors.

    Raises:
        ArgumentError: if the directory is not empty, or the form or the number of shards cannot be served.
    """
    root = Path(out_dir)
    all_parameters = parameters(config)
    _check_arguments(root, fmt, shards, len(all_parameters))
    root.mkdir(parents=True, exist_ok=True)
    portions = _portions(all_parameters, fmt, shards)
    total_bytes = sum(_num_bytes(parameter, fmt) for parameter in all_parameters)
    done_tensors = done_bytes = 0
    weight_map: dict[str, str] = {}
    for number, portion in enumerate(portions, start=1):
        file = SINGLE_NAME if shards == 1 else f"model-{number:05d}-of-{shards:05d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for parameter in portion:
            tensors |= stored_tensors(parameter, values_of(parameter), fmt)
            done_tensors += 1
            done_bytes += _num_bytes(parameter, fmt)
            if progress is not None:
                progress(Progress(parameter.name, done_tensors, len(all_parameters), done_bytes, total_bytes))
        save_file(tensors, root / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    if shards > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(root / INDEX_NAME, index)
    _write_json(root / "config.json", config.to_hf())
    # The safetensors library writes files that only their owner can read; give them the mode of any other file.
    mode = (root / "config.json").stat().st_mode & 0o777
    for file in sorted(set(weight_map.values())):
        (root / file).chmod(mode)
    return root


def stored_tensors(parameter: Parameter, values: torch.Tensor, fmt: CheckpointForm) -> dict[str, torch.Tensor]:
    """Give the tensors, by checkpoint name, that hold float32 ``values`` of a parameter in one form."""
    entries = parameter.entries(fmt)
    if len(entries) == 2:
        quantised = _QUANTISERS[parameter.storage](values)
        return {entries[0].name: quantised.weight, entries[1].name: quantised.scale}
    dtype = torch.bfloat16 if entries[0].dtype == "BF16" else torch.float32
    return {entries[0].name: values.to(dtype)}


def _check_arguments(root: Path, fmt: str, shards: int, num_parameters: int) -> None:
    problems: list[str] = []
    if root.exists() and not root.is_dir():
        problems.append(f"out_dir {root}: is a file; give a directory")
    elif root.is_dir() and any(root.iterdir()):
        problems.append(f"out_dir {root}: is not empty, and nothing is overwritten; give a new directory")
    if fmt not in FORMS:
        problems.append(f"fmt {fmt!r}: only {', '.join(map(repr, FORMS))} are known")
    if not 1 <= shards <= num_parameters:
        problems.append(f"shards {shards}: must lie between 1 and the {num_parameters} parameters")
    if problems:
        raise ArgumentError("make_checkpoint", problems)


def _num_bytes(parameter: Parameter, fmt: CheckpointForm) -> int:
    return sum(entry.num_bytes for entry in parameter.entries(fmt))


def _portions(all_parameters: tuple[Parameter, ...], fmt: CheckpointForm, shards: int) -> list[list[Parameter]]:
    """Cut the list into ``shards`` runs of about equal bytes, none of them empty."""
    total = sum(_num_bytes(parameter, fmt) for parameter in all_parameters)
    portions: list[list[Parameter]] = [[]]
    seen = 0
    for position, parameter in enumerate(all_parameters):
        open_shards = shards - len(portions)
        left = len(all_parameters) - position
        is_full = seen * shards >= total * len(portions) or left == open_shards
        if portions[-1] and open_shards and is_full:
            portions.append([])
        portions[-1].append(parameter)
        seen += _num_bytes(parameter, fmt)
    return portions


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
