"""One child process, seen from its parent: started, asked, watched, and ended if it hangs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from deepinfer.errors import ArgumentError, DriverLoadError

START_TIMEOUT_S: Final = 300.0
_LOG_TAIL_BYTES: Final = 1500


@dataclass(frozen=True, slots=True)
class Order:
    """What a child is started with.

    Attributes:
        driver: name of an installed driver.
        seed: of the cases.
        profile: "quick" or "full".
        waivers: TOML text.
        threads: of torch on the host.
        patience: what the cases' time limits are multiplied by: interpreters and emulators take their time.

    Raises:
        ArgumentError: the patience is no positive number.
    """

    driver: str
    seed: int
    profile: str
    waivers: str = ""
    threads: int = 1
    patience: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.patience < math.inf:
            raise ArgumentError("patience", [f"{self.patience}: give a factor above 0"])


class ChildDiedError(Exception):
    """The child ended while it was asked something; the message says how, with the end of its log."""


class ChildHungError(Exception):
    """The child did not answer in time and was killed."""


class Child:
    """A child that runs cases one at a time. Close it, or leave a ``with``, to end it."""

    def __init__(self, order: Order) -> None:
        self._patience = order.patience
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        read_end, write_end = os.pipe()
        self._answers = read_end
        self._buffer = b""
        environment = {**os.environ, "OMP_NUM_THREADS": str(order.threads)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deepinfer_conformance.runner.child"],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(write_end,),
            env=environment,
            start_new_session=True,  # so that everything it starts can be ended with it
        )
        os.close(write_end)
        self._tell(
            {
                "answers": write_end,
                "driver": order.driver,
                "seed": order.seed,
                "profile": order.profile,
                "waivers": order.waivers,
                "threads": order.threads,
            }
        )
        try:
            answer = self._answer(START_TIMEOUT_S)
        except (ChildDiedError, ChildHungError) as error:
            self.close()
            raise DriverLoadError(f"driver {order.driver!r} took its process down while it started: {error}") from error
        if "fatal" in answer:
            self.close()
            raise DriverLoadError(str(answer["fatal"]))
        self.facts: Mapping[str, Any] = answer["ready"]

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, case_id: str, timeout_s: float) -> Mapping[str, Any]:
        """Run one case and return its result as plain values.

        Raises:
            ChildDiedError: the driver took the process down.
            ChildHungError: there was no answer in time; the child has been killed.
        """
        self._tell({"case": case_id})
        result: Mapping[str, Any] = self._answer(timeout_s * self._patience)["result"]
        return result

    def close(self) -> None:
        """End the child and whatever it started."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # it died first
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        self._kill()
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1
        self._log.close()

    def _tell(self, message: Mapping[str, object]) -> None:
        if self._process.stdin is None:
            raise ChildDiedError("it has no standard input")
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ChildDiedError(self._end()) from error

    def _answer(self, timeout_s: float) -> Mapping[str, Any]:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._answers], [], [], max(0.0, left))
            if not ready:
                self._kill()
                raise ChildHungError(f"no answer within {timeout_s:g} s{self._tail()}")
            piece = os.read(self._answers, 1 << 16)
            if not piece:
                raise ChildDiedError(self._end())
            self._buffer += piece
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer: Mapping[str, Any] = json.loads(line)
        return answer

    def _end(self) -> str:
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return f"it closed its pipe and lives{self._tail()}"
        if code < 0:
            name = signal.Signals(-code).name
            memory = " (out of memory?)" if name == "SIGKILL" else ""
            return f"killed by {name}{memory}{self._tail()}"
        return f"exit status {code}{self._tail()}"

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=10)

    def _tail(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_TAIL_BYTES))
        text = self._log.read().decode(errors="replace").strip()
        return f"; its log ends:\n{text}" if text else ""
