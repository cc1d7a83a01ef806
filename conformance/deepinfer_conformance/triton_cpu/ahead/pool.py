"""Compilations in worker processes: side by side, cached, and none takes the caller down."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

from deepinfer_conformance.triton_cpu.ahead.request import CompileRequest, Json, compile_request
from deepinfer_conformance.triton_cpu.ahead.result import CompiledKernel, CompileFailure
from deepinfer_conformance.triton_cpu.errors import CompilationError

_WORKER = "deepinfer_conformance.triton_cpu.ahead.worker"
_START_LIMIT_S = 300.0


class _Worker:
    """A process that is started when it is first asked, and again after it died."""

    def __init__(self, triton_cache: Path, limit_s: float) -> None:
        self._triton_cache = triton_cache
        self._limit_s = limit_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._process: subprocess.Popen[str] | None = None

    def ask(self, message: Json) -> Json:
        """Returns ``{"result": ...}`` or ``{"error": ...}``."""
        if self._process is None:
            self._process = self._start()
            # Imports are no part of a kernel's time.
            if not self._exchange("", _START_LIMIT_S):
                return {"error": f"the compiler's process does not start: {self._retire()}{self._said()}"}
        self._log.truncate(0)
        line = self._exchange(json.dumps(message) + "\n", self._limit_s)
        if not line:
            return {"error": f"the compiler's process ended: {self._retire()}{self._said()}"}
        answer: Json = json.loads(line)
        if "error" in answer:
            answer["error"] += self._said()
        return answer

    def _exchange(self, text: str, limit_s: float) -> str:
        """Writes text and returns the next line; nothing if the process is gone or was stopped at the limit."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise CompilationError("a worker without pipes")
        timer = Timer(limit_s, process.kill)
        timer.start()
        try:
            process.stdin.write(text)
            process.stdin.flush()
            return process.stdout.readline()
        except BrokenPipeError:
            return ""
        finally:
            timer.cancel()

    def _retire(self) -> str:
        """Close the pipes of a process and wait for its end; returns how it ended."""
        process, self._process = self._process, None
        if process is None:
            return "it was not running"
        try:
            process.communicate()
        except BrokenPipeError:
            process.wait()
        killed = process.returncode == -signal.SIGKILL
        return f"stopped at the limit of {self._limit_s:g} s" if killed else f"status {process.returncode}"

    def _said(self) -> str:
        """The lines that the compiler printed about an error; the rest is a dump of the module."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        telling = [line.strip("\0 ") for line in lines if "rror" in line or "LLVM" in line or "nsupported" in line]
        return "".join(f"\n      {line[:300]}" for line in telling[:5])

    def _start(self) -> subprocess.Popen[str]:
        # `env`, so that a caller under TRITON_INTERPRET=1 still compiles. Fusion of multiply and add is named because
        # Triton 3.9 warns where it is not, and 3.10 turns it off.
        settings = ["TRITON_DEFAULT_FP_FUSION=1", f"TRITON_CACHE_DIR={self._triton_cache}"]
        settings += ["TORCH_DEVICE_BACKEND_AUTOLOAD=0", "OMP_NUM_THREADS=1"]
        command = ["env", "-u", "TRITON_INTERPRET", *settings, sys.executable, "-m", _WORKER]
        return subprocess.Popen(  # noqa: S603  # our own module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    def close(self) -> None:
        """End the process, which ends when nobody can ask it anything more."""
        if self._process is not None:
            self._retire()
        self._log.close()


@contextmanager
def _cache_folder(cache: Path | None) -> Iterator[Path]:
    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
        yield cache
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _answers(
    requests: Sequence[CompileRequest], stage: str, *, workers: int, cache: Path | None, limit_s: float
) -> list[Json]:
    with _cache_folder(cache) as folder:
        crew = [_Worker(folder / "triton", limit_s) for _ in range(max(1, min(workers, len(requests))))]
        path = [entry for entry in sys.path if entry]
        # Work is shared out as it is asked for: one slow kernel holds up one worker.
        waiting = iter(enumerate(requests))
        answers: list[Json] = [{} for _ in requests]

        def work(worker: _Worker) -> None:
            while True:
                try:
                    position, request = next(waiting)
                except StopIteration:
                    return
                message = {"request": request.to_json(), "stage": stage, "cache": str(folder), "path": path}
                answers[position] = worker.ask(message)

        try:
            with ThreadPoolExecutor(len(crew)) as threads:
                list(threads.map(work, crew))
        finally:
            for worker in crew:
                worker.close()
        return answers


def compile_kernels(
    requests: Sequence[CompileRequest], *, workers: int = 2, cache: Path | None = None, limit_s: float = 300.0
) -> tuple[CompiledKernel | CompileFailure, ...]:
    """Compile every request; the results stand in the order of the requests.

    Args:
        requests: from `compile_request` or `compile_request_of`.
        workers: processes side by side; each takes about three seconds to start.
        cache: folder in which results are kept. An entry counts as long as the sources of the kernel and its helpers,
            the request and the Triton release are the same. ``None``: nothing is kept.
        limit_s: seconds after which one compilation is given up.
    """
    answers = _answers(requests, "cubin", workers=workers, cache=cache, limit_s=limit_s)
    return tuple(
        CompiledKernel(label=request.label, **answer["result"]) if "result" in answer else _failure(request, answer)
        for request, answer in zip(requests, answers, strict=True)
    )


def ttirs_of(
    requests: Sequence[CompileRequest], *, workers: int = 2, cache: Path | None = None, limit_s: float = 300.0
) -> tuple[str | CompileFailure, ...]:
    """Triton's intermediate code of every request, before anything that belongs to a vendor; nothing else is run."""
    answers = _answers(requests, "ttir", workers=workers, cache=cache, limit_s=limit_s)
    return tuple(
        str(answer["result"]["ttir"]) if "result" in answer else _failure(request, answer)
        for request, answer in zip(requests, answers, strict=True)
    )


def ttir_of(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object],
    *,
    arch: int = 90,
    cache: Path | None = None,
) -> str:
    """Triton's intermediate code of one kernel; see `compile_request` for the arguments, `ttirs_of` for many.

    Raises:
        CompilationError: the kernel does not compile; the message holds the compiler's words.
    """
    (found,) = ttirs_of([compile_request(kernel, signature, constexprs, arch=arch)], workers=1, cache=cache)
    if isinstance(found, CompileFailure):
        raise CompilationError(f"{found.label}: {found.message}")
    return found


def compile_kernel(request: CompileRequest, *, cache: Path | None = None) -> CompiledKernel:
    """Compile one kernel; see `compile_kernels`.

    Raises:
        CompilationError: the kernel does not compile; the message holds the compiler's words.
    """
    (found,) = compile_kernels([request], workers=1, cache=cache)
    if isinstance(found, CompileFailure):
        raise CompilationError(f"{found.label}: {found.message}")
    return found


def _failure(request: CompileRequest, answer: Json) -> CompileFailure:
    return CompileFailure(request.label, str(answer["error"]))
