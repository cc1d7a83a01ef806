"""The model of a benchmark: a checkpoint directory, or a configuration by name that is given random weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from deepinfer.errors import ArgumentError
from deepinfer.model.checkpoint import ProgressCallback, inspect_checkpoint, make_checkpoint, packaged_model_path
from deepinfer.model.inventory import CheckpointForm
from deepinfer.model.presets import preset, preset_names

WEIGHT_SEED = 0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Which model ran, in which types, and what loading it took.

    Attributes:
        model: the directory's name, or the name of the configuration.
        weight_form: how the checkpoint stores its weights.
        checkpoint_bytes: size of its tensors.
        activation_dtype: what the engine computes in.
        numerics: the numerics contract.
        kv_cache_dtype: how the caches store records.
        accelerator: the driver.
        load_s: seconds from the directory to an engine that is ready.
        peak_resident_bytes: the largest resident size of the process, loading included.
        peak_since: from when that counts: "mark" is the moment before loading.
        async_scheduling: whether decode steps are planned ahead.
    """

    model: str
    weight_form: str
    checkpoint_bytes: int
    activation_dtype: str
    numerics: str
    kv_cache_dtype: str
    accelerator: str
    load_s: float
    peak_resident_bytes: int
    peak_since: str
    async_scheduling: bool = False


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A checkpoint directory and what it holds."""

    name: str
    directory: Path
    weight_form: str
    checkpoint_bytes: int


def model_problems(model: str | None) -> list[str]:
    """Return why ``model`` is neither a checkpoint directory nor the name of a configuration."""
    if model is None or Path(model).is_dir() or model in preset_names():
        return []
    known = ", ".join(preset_names())
    return [f"model {model!r} is neither a directory nor one of {known}; give one of them"]


@contextmanager
def model_source(
    model: str | None, form: CheckpointForm = "float32", progress: ProgressCallback | None = None
) -> Iterator[ModelSource]:
    """Hold a checkpoint for the time of the block; a named configuration gets random weights in a temporary folder.

    Args:
        model: directory, name, or None for the model of the package. A directory goes before a name.
        form: how random weights are stored.
        progress: told about the making of weights.

    Raises:
        ArgumentError: it is neither.
    """
    problems = model_problems(model)
    if problems:
        raise ArgumentError("bench", problems)
    if model is None:
        yield _source("packaged", packaged_model_path())
    elif Path(model).is_dir():
        yield _source(Path(model).resolve().name, Path(model))
    else:
        with TemporaryDirectory(prefix="deepinfer-bench-") as folder:
            yield _source(model, make_checkpoint(preset(model), WEIGHT_SEED, folder, form, progress=progress))


def _source(name: str, directory: Path) -> ModelSource:
    summary = inspect_checkpoint(directory)
    if summary.problems:
        raise ArgumentError(str(directory), summary.problems)
    return ModelSource(name, directory, summary.form or "unknown", summary.num_bytes)
