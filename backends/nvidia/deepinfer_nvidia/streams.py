"""Streams, events and recorded graphs of CUDA behind the contract.

Every class takes the runtime as an argument, ``torch.cuda`` by default: a recording one stands in for it in tests.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from deepinfer.accelerator.interface import Event, Graph, Stream
from deepinfer.errors import OpRefusedError


class CudaEvent(Event):
    """A recorded ``torch.cuda.Event``."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def done(self) -> bool:
        """Ask the runtime without waiting."""
        return bool(self.raw.query())

    def wait(self) -> None:
        """Block the host until the event has been reached."""
        self.raw.synchronize()


class CudaStream(Stream):
    """A ``torch.cuda.Stream``."""

    def __init__(self, index: int, cuda: Any = torch.cuda) -> None:
        self._cuda, self._index = cuda, index
        self.raw = cuda.Stream(device=index)

    def record_event(self) -> Event:
        """Record an event behind everything that this stream holds."""
        event = self._cuda.Event()
        event.record(self.raw)
        return CudaEvent(event)

    def wait_event(self, event: Event) -> None:
        """Hold this stream back until the event; an event of another kind is waited for on the host."""
        if isinstance(event, CudaEvent):
            self.raw.wait_event(event.raw)
        else:
            event.wait()

    def enqueue(self, work: Callable[[], None]) -> Event:
        """Issue the kernels of ``work`` on this stream, behind what the caller's stream holds; timed by the device."""
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        self.raw.wait_stream(self._cuda.current_stream(self._index))
        begin.record(self.raw)
        try:
            with self._cuda.stream(self.raw):
                work()
        except Exception as error:  # noqa: BLE001  # it is the event's to raise
            return CudaWorkEvent(begin, end, self.raw, error)
        return CudaWorkEvent(begin, end, self.raw)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy into pinned memory without waiting."""
        return tensor.to("cpu", non_blocking=True)


class CudaWorkEvent(CudaEvent):
    """The end of work that was issued on a stream."""

    def __init__(self, begin: Any, end: Any, stream: Any, error: Exception | None = None) -> None:
        end.record(stream)
        super().__init__(end)
        self._begin = begin
        self._error = error

    @property
    def elapsed_s(self) -> float | None:
        """Seconds between the marks on the device."""
        return float(self._begin.elapsed_time(self.raw)) / 1e3

    def wait(self) -> None:
        """Block the host until the work has finished; raise what its issuing has raised."""
        super().wait()
        if self._error is not None:
            raise self._error


class CudaGraph(Graph):
    """A ``torch.cuda.CUDAGraph``, recorded on a stream of its own: the default stream cannot be captured.

    Graphs that are given the same pool share the memory of what they allocate while they are recorded, so that only
    one of them may be replayed at a time. Kernels must have run once before: a launch that compiles or loads a
    binary cannot be captured.
    """

    def __init__(self, index: int, *, pool: Any = None, cuda: Any = torch.cuda) -> None:
        self._cuda, self._index, self._pool = cuda, index, pool
        self._graph = cuda.CUDAGraph()
        self._stream = cuda.Stream(device=index)
        self._scope: AbstractContextManager[Any] | None = None
        self._recorded = False

    def capture_begin(self) -> None:
        """Move to the recording stream, behind all earlier work, and record what is enqueued from here on."""
        if self._scope is not None:
            raise OpRefusedError("the graph is being recorded already; call capture_end first")
        if self._recorded:
            raise OpRefusedError("the graph has been recorded; take a new one")
        self._cuda.synchronize(self._index)
        self._stream.wait_stream(self._cuda.current_stream(self._index))
        scope: AbstractContextManager[Any] = self._cuda.stream(self._stream)
        scope.__enter__()
        self._scope = scope
        # Other threads (a NCCL watchdog among them) may call the runtime meanwhile.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def capture_end(self) -> None:
        """Stop recording and go back to the stream that was current before."""
        if self._scope is None:
            raise OpRefusedError("the graph is not being recorded; call capture_begin first")
        scope, self._scope = self._scope, None
        try:
            self._graph.capture_end()
            self._recorded = True
        finally:
            scope.__exit__(None, None, None)
        self._cuda.current_stream(self._index).wait_stream(self._stream)

    def replay(self) -> None:
        """Enqueue the recorded work on the current stream."""
        if not self._recorded:
            raise OpRefusedError("there is nothing to replay; call capture_begin and capture_end first")
        self._graph.replay()
