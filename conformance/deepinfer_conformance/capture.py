"""Capturing: a driver around another one that writes the calls of a real run as cases.

``CapturingDriver(driver, folder)`` goes to `build_engine_on` in the driver's place; every op computes as before. Of
each op at most ``per_op`` calls are kept, all of different shapes, and all files together stay below ``limit_bytes``,
so that a long run does not fill a disk. Ops that fall back to the reference are not the driver's, and not captured.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import ClassVar, Final

import torch

from deepinfer.accelerator import AcceleratorDriver, OpOptions, PreparedWeight
from deepinfer.accelerator.wrapped import OpFunction, WrappedDriver
from deepinfer.errors import ArgumentError
from deepinfer_conformance.bench import parameters_of
from deepinfer_conformance.data.call import OpCall, Recipe, mapped, tensors
from deepinfer_conformance.data.layouts import copied
from deepinfer_conformance.data.stored import SUFFIX, save_call

CASES_PER_OP: Final = 8
LIMIT_BYTES: Final = 256 * 2**20
_HOST: Final = torch.device("cpu")
_LOG: Final = logging.getLogger("deepinfer.conformance.capture")


def folder_problems(folder: Path) -> list[str]:
    """Return why nothing can be captured in a folder; none for one that is empty or not there yet."""
    if folder.is_dir():
        names = sorted(path.name for path in folder.iterdir())
        if names:
            listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            return [f"{str(folder)!r} is not empty, it holds {listed}; give a new or an empty folder"]
    elif folder.exists():
        return [f"{str(folder)!r} is a file; give a new or an empty folder"]
    return []


class CapturingDriver(WrappedDriver):
    """Another driver whose calls are written to a folder. It carries the wrapped driver's name for the plan."""

    name: ClassVar[str] = "capturing"

    def __init__(
        self,
        inner: AcceleratorDriver,
        folder: Path,
        *,
        per_op: int = CASES_PER_OP,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        """Wrap a driver; the folder is made if need be.

        Raises:
            ArgumentError: the folder is not empty.
        """
        problems = folder_problems(folder)
        if problems:
            raise ArgumentError("capture", problems)
        super().__init__(inner)
        self._folder = folder
        self._per_op = per_op
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._seen: dict[str, list[tuple[object, ...]]] = {}
        self._recipes: dict[int, tuple[PreparedWeight, Recipe]] = {}
        self._written_bytes = 0
        self._too_large: dict[str, int] = {}
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def written(self) -> int:
        """How many cases lie in the folder by now."""
        return sum(len(shapes) for shapes in self._seen.values())

    def summary(self) -> str:
        """Return one line: what was captured, and what was not because of the limit."""
        line = (
            f"captured {self.written} cases of {len(self._seen)} ops, {self._written_bytes:,} bytes, in {self._folder}"
        )
        if not self._too_large:
            return line
        ops = ", ".join(sorted(self._too_large))
        return (
            f"{line}; {sum(self._too_large.values())} calls were left out, with which the files would exceed "
            f"{self._limit_bytes:,} bytes ({ops})"
        )

    def around(self, identifier: str, function: OpFunction, options: OpOptions) -> OpFunction:
        """Return the op with a recorder before it."""
        names = parameters_of(identifier)

        def call(*args: object, **keywords: object) -> object:
            arguments = {**dict(zip(names, args, strict=False)), **keywords}
            self._keep(OpCall(identifier, arguments), options)
            result = function(*args, **keywords)
            if isinstance(result, PreparedWeight):
                # Held, so that its address cannot become another weight's.
                self._recipes[id(result)] = (result, Recipe(identifier, arguments))
            return result

        return call

    def _keep(self, call: OpCall, options: OpOptions) -> None:
        shape: tuple[object, ...] = tuple((name, tuple(tensor.shape)) for name, tensor in tensors(call.arguments))
        recorded = OpCall(call.op, {name: self._with_recipes(value) for name, value in call.arguments.items()})
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors(recorded.arguments))
        with self._lock:
            seen = self._seen.get(call.op, [])
            if len(seen) >= self._per_op or shape in seen:
                return
            if self._written_bytes + size > self._limit_bytes:
                self._leave_out(call.op, size)
                return
            self._written_bytes += size
            seen.append(shape)
            self._seen[call.op] = seen
            number = len(seen)
        arguments = {
            name: mapped(value, lambda tensor, _: copied(tensor, _HOST)) for name, value in recorded.arguments.items()
        }
        save_call(OpCall(call.op, arguments), options, self._folder / f"{call.op}-{number}{SUFFIX}")

    def _leave_out(self, op: str, size: int) -> None:
        if not self._too_large:
            _LOG.warning(
                "limit of capture reached: a call of %s holds %s bytes, %s of %s are left; smaller ones are still kept",
                op, f"{size:,}", f"{self._limit_bytes - self._written_bytes:,}", f"{self._limit_bytes:,}",
            )  # fmt: skip
        self._too_large[op] = self._too_large.get(op, 0) + 1

    def _with_recipes(self, value: object) -> object:
        return self._recipes[id(value)][1] if isinstance(value, PreparedWeight) else value
