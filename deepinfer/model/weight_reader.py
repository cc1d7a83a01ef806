"""From checkpoint names to device tensors and prepared weights, keeping account of what has been read."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import torch
from torch import Tensor

from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.memory import NgramTable
from deepinfer.accelerator.weights import Precision, PreparedWeight, StoredExpert, StoredWeight
from deepinfer.errors import InvariantError
from deepinfer.model.checkpoint import Checkpoint, Progress

_EXPERT_PARTS = ("w1", "w2", "w3")


class WeightReader:
    """Reads parameters of one checkpoint for one device; safe to use from several threads.

    Stored tensors are views of the mapped file and are let go as soon as they are prepared.
    """

    def __init__(self, checkpoint: Checkpoint, ops: Ops, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._ops = ops
        self._device = device
        self._lock = Lock()
        self._sizes_bytes = {
            parameter.name: sum(entry.num_bytes for entry in parameter.entries(checkpoint.form))
            for parameter in checkpoint.parameters
        }
        self._read: dict[str, None] = {}
        self._device_bytes = 0

    @property
    def device_bytes(self) -> int:
        """Bytes on the device of everything read so far."""
        return self._device_bytes

    def dense(self, stem: str, precision: Precision = "activation") -> PreparedWeight:
        """Return the prepared weight of a dense linear."""
        return self._hold(self._ops.linear.prepare(self.stored(stem), precision))

    def grouped(self, stem: str, groups: int) -> PreparedWeight:
        """Return the prepared weight of a grouped linear."""
        return self._hold(self._ops.linear.prepare_grouped(self.stored(stem), groups))

    def experts(self, stem: str, count: int, limit: float, held: Sequence[int]) -> PreparedWeight:
        """Return the prepared experts ``held`` of ``stem.0``, ``stem.1``, ...; the others other ranks read."""
        experts = [self._expert(f"{stem}.{expert}") for expert in held]
        for expert in set(range(count)).difference(held):
            for name in _EXPERT_PARTS:
                self._note(f"{stem}.{expert}.{name}.weight")
        return self._hold(self._ops.experts.prepare(experts, limit))

    def shared_expert(self, stem: str, limit: float) -> PreparedWeight:
        """Return the prepared shared expert."""
        return self._hold(self._ops.experts.prepare_shared(self._expert(stem), limit))

    def float32(self, name: str) -> Tensor:
        """Return a plain parameter in float32 on the device; a bfloat16 value stays exact."""
        return self._copy(name, torch.float32)

    def as_stored(self, name: str) -> Tensor:
        """Return a plain parameter on the device in the checkpoint's own type."""
        return self._copy(name, None)

    def ngram_table(self, stem: str) -> NgramTable:
        """Return an Engram table where it lies, mapped in host memory: it is far larger than a device."""
        stored = self.stored(stem)
        return NgramTable(stored.name, stored.weight, stored.scale)

    def stored(self, stem: str) -> StoredWeight:
        """Return a weight as the checkpoint holds it, on the host."""
        found = self._checkpoint.weight(stem)
        name = f"{stem}.weight"
        self._note(name)
        return StoredWeight(name, found.format, found.weight, found.scale, found.out_features, found.in_features)

    def progress(self) -> Progress:
        """Return how far the reading is; names the parameter that was read last."""
        with self._lock:
            names = list(self._read)
        done_bytes = sum(self._sizes_bytes[name] for name in names)
        last = names[-1] if names else ""
        return Progress(last, len(names), len(self._sizes_bytes), done_bytes, sum(self._sizes_bytes.values()))

    def check_complete(self) -> None:
        """Raise if a parameter of the model was not read: then some part of the model would run without it."""
        unread = [name for name in self._sizes_bytes if name not in self._read]
        if unread:
            raise InvariantError(f"{len(unread)} parameters of the model were not loaded, first {unread[:5]}")

    def _expert(self, stem: str) -> StoredExpert:
        return StoredExpert(*(self.stored(f"{stem}.{name}") for name in _EXPERT_PARTS))

    def _copy(self, name: str, dtype: torch.dtype | None) -> Tensor:
        # Always a copy: a view would keep the file mapped, and its address would follow the file's layout.
        held = self._checkpoint.tensor(name).to(self._device, dtype, copy=True)
        self._note(name)
        with self._lock:
            self._device_bytes += held.numel() * held.element_size()
        return held

    def _hold(self, prepared: PreparedWeight) -> PreparedWeight:
        with self._lock:
            self._device_bytes += prepared.nbytes
        return prepared

    def _note(self, name: str) -> None:
        with self._lock:
            self._read[name] = None
