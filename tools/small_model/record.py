"""What a training run leaves in its folder: resumable state, losses, a plot, and the checkpoint with its hashes."""

from __future__ import annotations

import csv
import hashlib
import importlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from deepinfer.model import ModelConfig
from deepinfer.model.checkpoint import write_checkpoint

from .parameters import value_of

STATE, LOSSES, PLOT, MADE, CHECKPOINT = "state.pt", "loss.csv", "loss.png", "made.json", "checkpoint"
_PLOT_COLUMNS, _PLOT_ROWS = 72, 16


class Measured(NamedTuple):
    """One step of one phase."""

    phase: str
    step: int
    progress: float
    tokens: int
    seconds: float
    loss: float
    answers: float
    side: float


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the state so that an interruption leaves the old one or the new one, never a half."""
    unfinished = folder / f"{STATE}.unfinished"
    torch.save(dict(state), unfinished)
    unfinished.replace(folder / STATE)


def load_state(folder: Path) -> dict[str, Any] | None:
    """Read the state of an earlier run; None if there is none."""
    path = folder / STATE
    return torch.load(path, weights_only=True) if path.exists() else None


def write_losses(folder: Path, history: Sequence[Sequence[Any]]) -> None:
    """Write the table of losses and its plot: a picture where matplotlib is installed, else text."""
    with (folder / LOSSES).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Measured._fields)
        writer.writerows(history)
    rows = [Measured(*row) for row in history]
    if not rows:
        return
    (folder / "loss.txt").write_text(text_plot([row.answers for row in rows if row.phase == "model"]), encoding="utf-8")
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        return
    figure, axes = pyplot.subplots(figsize=(9, 5))
    for field, label in (("loss", "weighted loss"), ("answers", "answers"), ("side", "index")):
        chosen = [row for row in rows if row.phase == "model"]
        axes.plot([row.tokens for row in chosen], smooth([getattr(row, field) for row in chosen]), label=label)
    axes.set_xlabel("tokens")
    axes.set_ylabel("nats per token")
    axes.legend()
    figure.savefig(folder / PLOT)
    pyplot.close(figure)


def smooth(values: Sequence[float], keep: float = 0.95) -> list[float]:
    """Return the running mean of values."""
    found: list[float] = []
    for value in values:
        found.append(value if not found else keep * found[-1] + (1.0 - keep) * value)
    return found


def text_plot(values: Sequence[float]) -> str:
    """Draw values over their number as text."""
    if not values:
        return ""
    running = smooth(values)
    columns = [running[number * len(running) // _PLOT_COLUMNS] for number in range(_PLOT_COLUMNS)]
    low, high = min(columns), max(columns)
    lines: list[str] = []
    for row in range(_PLOT_ROWS, -1, -1):
        level = low + (high - low) * row / _PLOT_ROWS
        marks = "".join("*" if abs(value - level) <= (high - low) / _PLOT_ROWS / 2 else " " for value in columns)
        lines.append(f"{level:8.3f} |{marks}".rstrip())
    return "\n".join([*lines, f"{'':8} +{'-' * _PLOT_COLUMNS} {len(values)} steps", ""])


def write_made(
    folder: Path, config: ModelConfig, weights: Mapping[str, Tensor], tokenizer: Tokenizer, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the checkpoint in the released form, and beside it what made it and the SHA-256 of each of its files."""
    unfinished, final = folder / f"{CHECKPOINT}.unfinished", folder / CHECKPOINT
    shutil.rmtree(unfinished, ignore_errors=True)
    # Images have a bias of their own in the router; the small model has seen none, and serves them like text.
    served_as_text = {name: weights[name.removesuffix("_vl")].clone() for name in weights if name.endswith("bias_vl")}
    held = {**weights, **served_as_text}
    write_checkpoint(config, lambda parameter: value_of(parameter, held), unfinished, "released")
    tokenizer.save(str(unfinished / "tokenizer.json"), pretty=False)
    shutil.rmtree(final, ignore_errors=True)
    unfinished.replace(final)
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(final.iterdir())}
    made = {"sha256": hashes, **facts}
    (folder / MADE).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return made
