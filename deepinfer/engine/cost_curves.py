"""Cost curves kept from one start to the next: a file for each curve, named by all that it depends on.

The directory belongs to whoever named it. Nothing in it is ever deleted, and a file that holds anything but a curve of
ours is left as it is, whatever its name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch

from deepinfer.accelerator import AcceleratorDriver, Plan
from deepinfer.engine.options import EngineOptions
from deepinfer.errors import ArgumentError
from deepinfer.model.config import ModelConfig
from deepinfer.sampling.verify_budget import CostCurve

_LOG = logging.getLogger(__name__)
_FORMAT = 1

Facts = Mapping[str, object]
"""What a curve depends on, in plain values."""


def facts_of(
    driver: AcceleratorDriver,
    plan: Plan,
    config: ModelConfig,
    options: EngineOptions,
    *,
    weight_form: str,
    sizes: Sequence[int],
    is_padded: bool,
) -> Facts:
    """Return everything that a curve depends on: machine, versions, who computes each op, model, options, sizes."""
    found = type(driver).availability()
    described = json.dumps(config.to_hf(), sort_keys=True, default=str)
    return {
        "host": [platform.node(), platform.machine(), os.cpu_count()],
        "device": found.device_name,
        "runtime": found.runtime,
        "versions": {
            "deepinfer": version("deepinfer-multibackend"),
            "torch": torch.__version__,
            "driver": f"{driver.name} {driver.version}",
        },
        "threads": torch.get_num_threads(),
        "plan": plan.as_json(),
        "model": hashlib.sha256(described.encode()).hexdigest(),
        "weights": weight_form,
        "drafts": options.num_speculative_tokens,
        "verification": options.verification,
        "block_size": options.block_size,
        "sizes": list(sizes),
        "is_padded": is_padded,
    }


class CurveFolder:
    """The curves of a directory."""

    def __init__(self, folder: Path) -> None:
        """Name the directory; it is made when the first curve is kept."""
        self.folder = folder

    def file(self, facts: Facts) -> Path:
        """Return where the curve of these facts is kept."""
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return self.folder / f"cost-curve-{digest[:32]}.json"

    def find(self, facts: Facts) -> CostCurve | None:
        """Return the curve of these facts, or None if there is none."""
        file = self.file(facts)
        curve = _read(file, facts)
        if curve is None and os.path.lexists(file):
            _LOG.warning("%s is no cost curve of this engine; the costs are measured anew and not kept", file)
        return curve

    def keep(self, facts: Facts, curve: CostCurve) -> bool:
        """Write a curve, whole or not at all; False where a file that is not ours has its name, or nothing can be."""
        file = self.file(facts)
        if os.path.lexists(file) and _read(file, facts) is None:
            return False
        content = {"format": _FORMAT, "facts": facts, "sizes": curve.sizes, "seconds": curve.seconds}
        half_written: Path | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("w", dir=self.folder, prefix=f".{file.stem}-", delete=False) as written:
                half_written = Path(written.name)
                json.dump(content, written)
            half_written.replace(file)
        except OSError as error:
            if half_written is not None:
                half_written.unlink(missing_ok=True)
            _LOG.warning("the cost curve cannot be kept in %s: %s", self.folder, error)
            return False
        return True


def _read(file: Path, facts: Facts) -> CostCurve | None:
    """Return the curve of a file; None where it holds anything else."""
    try:
        held = json.loads(file.read_text())
        if held["format"] != _FORMAT or held["facts"] != json.loads(json.dumps(facts)):
            return None
        curve = CostCurve(tuple(held["sizes"]), tuple(held["seconds"]), bool(facts["is_padded"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ArgumentError):
        return None
    return curve if list(curve.sizes) == list(facts["sizes"]) else None  # type: ignore[call-overload]
