"""Recorded graphs on the host: a list of bound calls that is run again without the code that made it.

There is no device that could record, so what is recorded are calls: those of ops as a whole, with the very tensors that
they were given, and between ops those of torch. A replay runs the list and puts every result where the recorded one
lies. It saves next to nothing, but it is a proof: what the code around the ops decided from a value, it decided while
recording, and a replay with other values at the same addresses shows it. Where such a decision is seen while recording,
it is refused at once.

An op of this driver may look at values itself: its call runs anew, and looks anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer.accelerator.interface import Graph
from deepinfer.accelerator.ops import OpGroup
from deepinfer.errors import OpRefusedError

_NEEDS_VALUES = frozenset(
    {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "bincount", "masked_select"}
    | {"nonzero", "nonzero_numpy", "argwhere", "_unique2", "unique_dim", "unique_consecutive"}
)
"""torch's functions whose result, or its shape, is known to the host only when the values are."""


class Call(NamedTuple):
    """One call of the list.

    Attributes:
        name: an op's identifier, or torch's own name of a function.
        function: what is called.
        arguments: with what, by position.
        named: with what, by name.
        result: what the recorded call returned.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    result: Any


class Recorder:
    """Says to the ops of one driver which of its graphs is being recorded.

    Attributes:
        graph: that graph; None at most times.
    """

    def __init__(self) -> None:
        self.graph: CallList | None = None

    def watched(self, group: OpGroup) -> OpGroup:
        """Return the group, with each of its ops told to this recorder when a graph is being recorded."""
        for name in type(group).implemented():
            setattr(group, name, self._watched(f"{group.group}.{name}", getattr(group, name)))
        return group

    def _watched(self, identifier: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(compute)
        def watched(*arguments: Any, **named: Any) -> Any:
            graph = self.graph
            return compute(*arguments, **named) if graph is None else graph.run(identifier, compute, arguments, named)

        return watched


class CallList(Graph):
    """The graph of a host.

    Attributes:
        calls: what was recorded.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.calls: list[Call] = []
        self._recorder = recorder
        self._watch = _Watch(self)
        self._is_recorded = False

    def capture_begin(self) -> None:
        """Record the calls that this thread makes from here on."""
        if self._recorder.graph is not None:
            raise OpRefusedError("a graph is being recorded already; call its capture_end first")
        if self._is_recorded:
            raise OpRefusedError("the graph has been recorded; take a new one")
        self._recorder.graph = self
        self._watch.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        """Stop recording."""
        if self._recorder.graph is not self:
            raise OpRefusedError("the graph is not being recorded; call capture_begin first")
        self._recorder.graph = None
        self._watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._is_recorded = True

    def replay(self) -> None:
        """Run the calls again, in order, each result into the memory of the recorded one."""
        if not self._is_recorded:
            raise OpRefusedError("there is nothing to replay; call capture_begin and capture_end first")
        with torch.inference_mode():
            for name, function, arguments, named, result in self.calls:
                _put(name, result, function(*arguments, **named))

    def run(
        self, identifier: str, compute: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Record the call of an op; what the op calls itself is part of it."""
        self._recorder.graph = None
        self._watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            result = compute(*arguments, **named)
        finally:
            self._watch.__enter__()  # type: ignore[no-untyped-call]
            self._recorder.graph = self
        self.calls.append(Call(identifier, compute, arguments, named, result))
        return result


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, graph: CallList) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in _NEEDS_VALUES or by_mask:
            raise OpRefusedError(
                f"{func} was called between ops while a graph was recorded: the host would decide from a value, which "
                f"a replay cannot do. Compute it on the device, or inside an op"
            )
        named = kwargs or {}
        result = func(*args, **named)
        self._graph.calls.append(Call(str(func), func, tuple(args), named, result))
        return result


def _put(name: str, recorded: Any, fresh: Any) -> None:
    """Copy fresh results to where the recorded ones lie; what was written in place, and views, are there already."""
    for old, new in zip(_tensors(recorded), _tensors(fresh), strict=True):
        if old.shape != new.shape or old.dtype != new.dtype:
            raise OpRefusedError(
                f"{name} returned {new.dtype} {list(new.shape)} in a replay and {old.dtype} {list(old.shape)} while it "
                f"was recorded: what it returns must not depend on values"
            )
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
