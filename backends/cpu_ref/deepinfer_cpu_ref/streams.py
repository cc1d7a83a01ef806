"""A queue of work with a thread of its own: what makes the host a device that computes while the host goes on.

Torch lets go of the interpreter while it computes, so the other thread really runs; what is Python in an op does not
overlap with Python of the caller.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable

import torch

from deepinfer.accelerator.interface import Event, Stream

_Item = tuple[Callable[[], None], "ThreadEvent"]


class ThreadEvent(Event):
    """The end of one piece of work."""

    def __init__(self) -> None:
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self._elapsed_s: float | None = None

    @property
    def elapsed_s(self) -> float | None:
        """Seconds that the work took."""
        return self._elapsed_s

    def done(self) -> bool:
        """Return whether the work has ended, in whichever way."""
        return self._finished.is_set()

    def wait(self) -> None:
        """Wait for the end of the work and raise what it has raised."""
        self._finished.wait()
        if self._error is not None:
            raise self._error

    def wait_for_end(self) -> None:
        """Wait for the end of the work, whatever it came to."""
        self._finished.wait()

    def run(self, work: Callable[[], None]) -> None:
        """Do the work in this thread, and end."""
        begun = time.perf_counter()
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # whoever waits gets it, Ctrl-C of a test included
            self._error = error
        finally:
            self._elapsed_s = time.perf_counter() - begun
            self._finished.set()


class ThreadStream(Stream):
    """Runs its work in one thread, in order. The thread begins with the first work.

    It ends with :meth:`close`, when nobody holds the stream any longer, or with the interpreter.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._end: weakref.finalize[..., ThreadStream] | None = None

    def enqueue(self, work: Callable[[], None]) -> Event:
        """Hand work to the thread."""
        if self._end is None:
            # The thread holds the queue alone: a stream that nobody holds must be able to go.
            thread = threading.Thread(target=_run, args=(self._items,), name="deepinfer-cpu_ref-stream", daemon=True)
            self._end = weakref.finalize(self, _stop, self._items, thread)
            thread.start()
        event = ThreadEvent()
        self._items.put((work, event))
        return event

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor

    def record_event(self) -> Event:
        """Return an event that is done when all earlier work has ended."""
        return self.enqueue(_nothing)

    def wait_event(self, event: Event) -> None:
        """Let the thread wait; an exception of the other stream's work is for those who wait on the host."""
        self.enqueue(event.wait_for_end if isinstance(event, ThreadEvent) else event.wait)

    def close(self) -> None:
        """Let the thread do what it was given, end it and join it; later work begins another one."""
        if self._end is not None:
            end, self._end = self._end, None
            end()


def _run(items: queue.SimpleQueue[_Item | None]) -> None:
    while (item := items.get()) is not None:
        work, event = item
        event.run(work)
        del item, work, event  # what they hold must not live until more work comes


def _stop(items: queue.SimpleQueue[_Item | None], thread: threading.Thread) -> None:
    items.put(None)
    if thread is not threading.current_thread():  # the last one to let go of the stream may be its own work
        thread.join()


def _nothing() -> None:
    pass
