"""A vocabulary of single characters, a few words and control marks; its compiler runs for the whole session.

These tests need xgrammar (extra ``structured``); where it is not installed they are not collected, and the run's header
says so. Continuous integration runs them in an environment of their own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tokenizers

from deepinfer.sampling.grammar import GrammarCompiler, GrammarProgress, StructuredOutputs
from deepinfer.tokenizer import Tokenizer

END = 1
VOCAB_SIZE = 140  # the tokenizer knows fewer: the rest is padding

collect_ignore_glob = [] if importlib.util.find_spec("xgrammar") is not None else ["test_*.py"]


def pytest_report_header() -> str | None:
    if collect_ignore_glob:
        return "tests/structured: NOT COLLECTED, xgrammar is not installed (extra 'structured')"
    return None


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    marks = ["<begin>", "<end>", "<pad>"]
    characters = [chr(code) for code in range(33, 127)] + ["Ġ"]
    words = ['{"', '":', "true", "ab", "abc"]
    vocabulary = {token: number for number, token in enumerate([*marks, *characters, *words])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, marks[2]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(marks)
    return Tokenizer(backend)


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    running = GrammarCompiler(tokenizer, VOCAB_SIZE, [END])
    yield running
    running.close()


Begin = Callable[..., GrammarProgress]


@pytest.fixture(scope="session")
def begin(compiler: GrammarCompiler) -> Begin:
    def start(**wanted: Any) -> GrammarProgress:
        form = StructuredOutputs(**wanted)
        return GrammarProgress(compiler.submit(form.source).result(timeout=150), form, [END])

    return start


@pytest.fixture(scope="session")
def token(tokenizer: Tokenizer) -> Callable[[str], int]:
    ids = {tokenizer.token_bytes(token_id).decode(): token_id for token_id in range(tokenizer.vocab_size)}
    return ids.__getitem__


@pytest.fixture(scope="session")
def allowed() -> Callable[..., list[set[int]]]:
    """The allowed ids of the next token and behind each of some drafts."""

    def read(progress: GrammarProgress, drafts: tuple[int, ...] = ()) -> list[set[int]]:
        mask = np.zeros((1 + len(drafts), -(-VOCAB_SIZE // 32)), np.int32)
        progress.fill(mask, drafts)
        bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")
        return [set(np.flatnonzero(row[:VOCAB_SIZE]).tolist()) for row in bits]

    return read
