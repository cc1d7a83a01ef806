"""A recording stand-in for ``torch.cuda``: streams, events and graphs that remember what was asked of them."""

from __future__ import annotations

from contextlib import contextmanager


class Stream:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def wait_stream(self, other):
        self.cuda.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.cuda.log.append(f"{self.name} waits for event of {event.stream}")


class Event:
    stream = ""

    def record(self, stream):
        self.stream = stream.name

    def query(self):
        return True

    def synchronize(self):
        return None

    def elapsed_time(self, later):
        """Milliseconds between two events of one stream."""
        return 2500.0 if self.stream == later.stream else -1.0


class Recording:
    """Graph: what runs while it is recorded is appended by `RecordingCuda.enqueue`; a replay runs it again."""

    def __init__(self, cuda):
        self.cuda, self.work = cuda, []

    def capture_begin(self, pool, capture_error_mode):
        self.cuda.log.append(f"capture on {self.cuda.current.name} ({capture_error_mode})")
        self.cuda.recording = self

    def capture_end(self):
        self.cuda.recording = None

    def replay(self):
        for work in self.work:
            work()


class RecordingCuda:
    """What the driver uses of ``torch.cuda``."""

    def __init__(self):
        self.log, self.recording, self.count = [], None, 0
        self.default = self.current = Stream(self, "default")

    def Stream(self, device):  # noqa: N802
        self.count += 1
        return Stream(self, f"stream {self.count}")

    def Event(self, enable_timing=False):  # noqa: N802, FBT002
        return Event()

    def CUDAGraph(self):  # noqa: N802
        return Recording(self)

    def synchronize(self, index):
        self.log.append("synchronize")

    def current_stream(self, index):
        return self.current

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def enqueue(self, work):
        """Run work now, or record it: a captured launch does not run."""
        if self.recording is None:
            work()
        else:
            self.recording.work.append(work)
