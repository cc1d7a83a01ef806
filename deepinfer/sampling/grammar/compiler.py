"""Compiles forms outside the step loop: once per form, in a process with limits of time, memory and size."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from deepinfer.sampling.grammar import library
from deepinfer.sampling.grammar.library import GrammarError
from deepinfer.sampling.grammar.matching import CompiledForm
from deepinfer.sampling.grammar.protocol import MODULE, Greeting, Reply
from deepinfer.sampling.grammar.specification import GrammarSource
from deepinfer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What compiling may cost.

    Attributes:
        compile_s: seconds for one form.
        start_s: seconds for the process to become ready, which imports torch.
        process_bytes: address space of the process.
        compiled_bytes: largest serialised grammar.
        cached_grammars: grammars kept for later requests, least recently used out first.
    """

    compile_s: float = 20.0
    start_s: float = 120.0
    process_bytes: int = 8 * 2**30
    compiled_bytes: int = 64 * 2**20
    cached_grammars: int = 64


class GrammarCompiler:
    """Compiles forms for one vocabulary. Thread-safe; :meth:`close` ends its process and its thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        end_token_ids: Sequence[int],
        limits: GrammarLimits | None = None,
    ) -> None:
        """Prepare; nothing is imported or started before the first form.

        Args:
            tokenizer: knows the bytes of every token.
            vocab_size: the model's vocabulary; ids without bytes are never part of a form.
            end_token_ids: tokens that may follow a complete form.
            limits: what compiling may cost.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = tuple(end_token_ids)
        self._limits = limits if limits is not None else GrammarLimits()
        self._cache: OrderedDict[GrammarSource, Future[CompiledForm]] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._running: list[_Process] = []  # none or one
        self._vocabulary_known: Any = None
        # A compiler that nobody closes must not leave a process behind.
        weakref.finalize(self, _kill_all, self._running)

    def submit(self, source: GrammarSource) -> Future[CompiledForm]:
        """Return a future of the compiled grammar; it raises GrammarError with the reason if there is none.

        Equal forms are compiled once, failures included, as long as they stay in the cache. That the process cannot
        start is no failure of a form, and not remembered.
        """
        with self._lock:
            known = self._cache.get(source)
            if known is None:
                known = self._cache[source] = self._thread.submit(self._compile, source)
            self._cache.move_to_end(source)
            finished = [key for key, each in self._cache.items() if each.done()]
            for key in finished[: max(0, len(self._cache) - self._limits.cached_grammars)]:
                del self._cache[key]
            return known

    def close(self) -> None:
        """End the process and the thread; forms that wait are cancelled."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        _kill_all(self._running)  # what it was asked fails at once
        self._thread.shutdown(wait=True)
        _kill_all(self._running)  # it was started in between

    def _compile(self, source: GrammarSource) -> CompiledForm:
        xgrammar = library.load()
        if self._vocabulary_known is None:
            self._vocabulary_known = library.describe_vocabulary(
                xgrammar, self._vocabulary(), self._vocab_size, self._end_token_ids
            )
        if self._running and self._running[0].has_ended:
            _kill_all(self._running)  # while it had nothing to do, which is no fault of this form
        try:
            if not self._running:
                self._start(source)
            reply = self._running[0].ask(source, self._limits.compile_s)
        except (GrammarError, IndexError) as error:
            # It hangs, has died over this form, or was closed; the next form gets a fresh process.
            _kill_all(self._running)
            raise error if isinstance(error, GrammarError) else GrammarError("the engine is being closed") from error
        if reply["compiled"] is None:
            raise GrammarError(reply["problem"])
        if len(reply["compiled"]) > self._limits.compiled_bytes:
            raise GrammarError(
                f"the compiled {source.kind} has {len(reply['compiled'])} bytes; the limit is "
                f"{self._limits.compiled_bytes}"
            )
        return library.LibraryForm(xgrammar.CompiledGrammar.deserialize_json(reply["compiled"], self._vocabulary_known))

    def _start(self, source: GrammarSource) -> None:
        """Start the process; a failure says nothing about the form, so that it is tried again when it comes again."""
        try:
            self._running.append(_Process())
            self._running[0].greet(self._greeting(), self._limits.start_s)
        except (GrammarError, IndexError, OSError) as error:
            with self._lock:
                self._cache.pop(source, None)
            if isinstance(error, OSError):
                raise GrammarError(f"the grammar process cannot be started: {error}") from error
            raise

    def _vocabulary(self) -> list[bytes]:
        hidden = self._tokenizer.special_token_ids
        ids = range(min(self._tokenizer.vocab_size, self._vocab_size))
        return [b"" if token_id in hidden else self._tokenizer.token_bytes(token_id) for token_id in ids]

    def _greeting(self) -> Greeting:
        return {
            "vocabulary": [each.hex() for each in self._vocabulary()],
            "vocab_size": self._vocab_size,
            "end_token_ids": list(self._end_token_ids),
            "address_space_bytes": self._limits.process_bytes,
        }


def _kill_all(running: list[_Process]) -> None:
    while running:
        running.pop().kill()


class _Process:
    """The running grammar process."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(  # noqa: S603 - our own module, no shell
            [sys.executable, "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._unread = b""

    @property
    def has_ended(self) -> bool:
        """Whether somebody ended it."""
        return self._child.poll() is not None

    def greet(self, greeting: Greeting, limit_s: float) -> None:
        """Tell the process its vocabulary and wait until it is ready; raises GrammarError when it never is."""
        ready = self._exchange(json.dumps(greeting), limit_s, "start")
        if ready["problem"]:
            raise GrammarError(ready["problem"])

    def ask(self, source: GrammarSource, limit_s: float) -> Reply:
        """Have one form compiled; raises GrammarError when there is no answer."""
        return self._exchange(json.dumps(list(source)), limit_s, f"compile the {source.kind}")

    def kill(self) -> None:
        """End the process, whatever it does."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()

    def _exchange(self, line: str, limit_s: float, purpose: str) -> Reply:
        stdin, stdout = self._child.stdin, self._child.stdout
        if stdin is None or stdout is None:
            raise GrammarError(f"cannot {purpose}: the grammar process has no pipes")
        end = time.monotonic() + limit_s
        try:
            stdin.write(line.encode() + b"\n")
            stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(stdout, selectors.EVENT_READ)
                while b"\n" not in self._unread:
                    if not selector.select(max(0.0, end - time.monotonic())):
                        raise GrammarError(f"cannot {purpose}: not done within {limit_s:g} s")
                    piece = os.read(stdout.fileno(), 2**20)
                    if not piece:
                        status = self._child.wait()
                        raise GrammarError(
                            f"cannot {purpose}: the grammar process ended with status {status}, perhaps out of memory"
                        )
                    self._unread += piece
        except (OSError, ValueError) as error:
            raise GrammarError(f"cannot {purpose}: the grammar process is gone ({error})") from error
        answer, _, self._unread = self._unread.partition(b"\n")
        reply: Reply = json.loads(answer)
        return reply
