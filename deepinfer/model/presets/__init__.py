"""Configurations that ship with the package, by name."""

from __future__ import annotations

from pathlib import Path

from deepinfer.errors import ConfigurationError
from deepinfer.model.config import ModelConfig

_FOLDER = Path(__file__).resolve().parent


def preset_names() -> tuple[str, ...]:
    """Names that `preset` knows, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def preset(name_or_path: str | Path) -> ModelConfig:
    """Give a packaged configuration by name, or read the ``config.json`` file of that path.

    Raises:
        ConfigurationError: if it is neither, or the file is refused.
    """
    name = str(name_or_path)
    if name in preset_names():
        return ModelConfig.from_file(_FOLDER / f"{name}.json")
    if not Path(name).is_file():
        known = ", ".join(preset_names())
        raise ConfigurationError(name, [f"is neither a preset ({known}) nor a file; give one of them"])
    return ModelConfig.from_file(name)
