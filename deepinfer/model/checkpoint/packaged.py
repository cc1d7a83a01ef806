"""The small model that ships inside the package, so that the first command needs no download."""

from __future__ import annotations

from pathlib import Path

from deepinfer.errors import CheckpointError

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def packaged_model_path() -> Path:
    """Give the directory of the packaged model: ``config.json``, released-form weights and ``tokenizer.json``.

    Raises:
        CheckpointError: if the installation lacks it.
    """
    path = _PACKAGE_ROOT / "_models" / "small"
    if not (path / "config.json").is_file():
        raise CheckpointError(str(path), ["the packaged model is not installed; install deepinfer again, from a wheel"])
    return path
