"""Streams, events and recorded graphs of torch-npu behind the contract."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from deepinfer.accelerator.interface import Event, Graph, Stream
from deepinfer.errors import OpRefusedError
from deepinfer_ascend import runtime


class NpuEvent(Event):
    """A recorded ``torch.npu.Event``."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def done(self) -> bool:
        """Ask the runtime without waiting."""
        return bool(self.raw.query())

    def wait(self) -> None:
        """Block the host until the event has been reached."""
        self.raw.synchronize()


class NpuStream(Stream):
    """A ``torch.npu.Stream``."""

    def __init__(self, index: int) -> None:
        self.raw = runtime.npu().Stream(device=index)

    def record_event(self) -> Event:
        """Record an event behind everything that this stream holds."""
        event = runtime.npu().Event()
        event.record(self.raw)
        return NpuEvent(event)

    def wait_event(self, event: Event) -> None:
        """Hold this stream back until the event; an event of another kind is waited for on the host."""
        if isinstance(event, NpuEvent):
            self.raw.wait_event(event.raw)
        else:
            event.wait()

    def enqueue(self, work: Callable[[], None]) -> Event:
        """Issue the operators of ``work`` on this stream, behind what the caller's stream holds."""
        npu = runtime.npu()
        self.raw.wait_stream(npu.current_stream())
        with npu.stream(self.raw):
            return super().enqueue(work)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy without waiting."""
        return tensor.to("cpu", non_blocking=True)


class NpuGraph(Graph):
    """A ``torch.npu.NPUGraph``, recorded on a stream of its own: the default stream cannot be captured."""

    def __init__(self, index: int) -> None:
        self._graph = runtime.npu().NPUGraph()
        self._stream = runtime.npu().Stream(device=index)
        self._scope: AbstractContextManager[Any] | None = None

    def capture_begin(self) -> None:
        """Move to the recording stream, behind all earlier work, and record what is enqueued from here on."""
        if self._scope is not None:
            raise OpRefusedError("the graph is being recorded already; call capture_end first")
        runtime.npu().synchronize()
        self._stream.wait_stream(runtime.npu().current_stream())
        scope = runtime.npu().stream(self._stream)
        scope.__enter__()
        self._scope = scope
        self._graph.capture_begin()

    def capture_end(self) -> None:
        """Stop recording and go back to the stream that was current before."""
        if self._scope is None:
            raise OpRefusedError("the graph is not being recorded; call capture_begin first")
        scope, self._scope = self._scope, None
        try:
            self._graph.capture_end()
        finally:
            scope.__exit__(None, None, None)
        runtime.npu().current_stream().wait_stream(self._stream)

    def replay(self) -> None:
        """Enqueue the recorded work on the current stream."""
        if self._scope is not None:
            raise OpRefusedError("the graph is still being recorded; call capture_end first")
        self._graph.replay()
