"""Drivers on which checks can be shown that need other claims than cpu_ref's about recorded graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer.accelerator import (
    AcceleratorDriver,
    Availability,
    Capabilities,
    Collectives,
    Graph,
    LinearShape,
    MemoryInfo,
    OpOptions,
    RankPlace,
    Repeatability,
    registry,
)
from deepinfer.accelerator.ops import OpGroup
from deepinfer.accelerator.plan import REFERENCE


class Borrowed(AcceleratorDriver):
    """The reference under another name, for subclasses that change one thing of it."""

    name: ClassVar[str] = "borrowed"
    interface_version: ClassVar[tuple[int, int]] = (1, 1)
    version: ClassVar[str] = "1.0"

    def __init__(self) -> None:
        self.inner: AcceleratorDriver = registry.load(REFERENCE)()

    @classmethod
    def availability(cls) -> Availability:
        """Available where the reference is."""
        return registry.load(REFERENCE).availability()

    @property
    def device(self) -> torch.device:
        """The reference's."""
        return self.inner.device

    def memory(self) -> MemoryInfo:
        """Return the reference's."""
        return self.inner.memory()

    def capabilities(self) -> Capabilities:
        """Return the reference's."""
        return self.inner.capabilities()

    def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
        """Return the reference's."""
        return self.inner.op_groups(options)

    def join_group(self, place: RankPlace) -> Collectives:
        """Join as the reference does."""
        return self.inner.join_group(place)

    def set_determinism(self, level: Repeatability, shapes: Sequence[LinearShape]) -> None:
        """Let the reference prove it."""
        self.inner.set_determinism(level, shapes)


class GraphlessDriver(Borrowed):
    """The reference without recorded graphs."""

    def capabilities(self) -> Capabilities:
        """Claim no graphs."""
        claims = self.inner.capabilities()
        ops = {op: dataclasses.replace(claim, graph_safe=False) for op, claim in claims.ops.items()}
        return dataclasses.replace(claims, ops=ops, graphs=False)


class GraphDriver(Borrowed):
    """The reference with graphs as a device has them: every torch operation is recorded, those inside of ops too."""

    def capabilities(self) -> Capabilities:
        """Claim graphs for every op."""
        claims = self.inner.capabilities()
        ops = {op: dataclasses.replace(claim, graph_safe=True) for op, claim in claims.ops.items()}
        return dataclasses.replace(claims, ops=ops, graphs=True)

    def new_graph(self) -> Graph:
        """Return a recorder of torch calls."""
        return RecordedGraph()


class RecordedGraph(Graph):
    """Records every torch operation with its tensors, and runs them again into the same tensors.

    What the host decided from values while recording stays decided, exactly as on a device.
    """

    def __init__(self) -> None:
        self.recorder = _Recorder()

    def capture_begin(self) -> None:
        """Start recording."""
        self.recorder.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        """Stop recording."""
        self.recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def replay(self) -> None:
        """Run what was recorded, in order."""
        with torch.inference_mode():
            for function, args, keywords, outputs in self.recorder.calls:
                _write(outputs, function(*args, **keywords))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        outputs = func(*args, **keywords)
        self.calls.append((func, tuple(args), dict(keywords), outputs))
        return outputs


def _write(outputs: object, fresh: object) -> None:
    """Put fresh results where the recorded ones lie; views and in-place results are there already."""
    if isinstance(outputs, torch.Tensor) and isinstance(fresh, torch.Tensor):
        if outputs.data_ptr() != fresh.data_ptr() and outputs.shape == fresh.shape:
            outputs.copy_(fresh)
    elif isinstance(outputs, (tuple, list)) and isinstance(fresh, (tuple, list)):
        for one, other in zip(outputs, fresh, strict=True):
            _write(one, other)
