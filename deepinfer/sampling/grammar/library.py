"""The calls into xgrammar, shared by the engine and its grammar process."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer.errors import DeepInferError
from deepinfer.sampling.grammar.expressions import expression_problems, grammar_problems
from deepinfer.sampling.grammar.schemas import schema_problems
from deepinfer.sampling.grammar.specification import GrammarKind

# Spaces, line ends: a schema allows this many in a row. Without a limit a model can fill its whole answer with them.
_MOST_WHITESPACE = 8
# "[23:38:55] /project/cpp/regex_converter.cc:83: " stands in front of what the library has to say.
_PLACE_IN_LIBRARY = re.compile(r"^\[[0-9:]+\] \S+:[0-9]+: (Check failed: \(.*?\) is \w+: )?")


class GrammarError(DeepInferError):
    """A form cannot be compiled, or a token was committed that it does not allow."""


def load() -> Any:
    """Import xgrammar.

    Raises:
        GrammarError: it is not installed.
    """
    try:
        return importlib.import_module("xgrammar")
    except ImportError as error:
        raise GrammarError(
            f"structured output needs xgrammar, which cannot be imported ({error}); install "
            f"deepinfer-multibackend[structured]"
        ) from error


@dataclass(frozen=True, slots=True, eq=False)
class LibraryForm:
    """A form that the library has compiled.

    Attributes:
        compiled: its ``CompiledGrammar``.
    """

    compiled: Any

    def matcher(self) -> Any:
        """Return a matcher at the beginning of the form."""
        return load().GrammarMatcher(self.compiled)


def describe_vocabulary(xgrammar: Any, vocabulary: Sequence[bytes], vocab_size: int, end_ids: Sequence[int]) -> Any:
    """Return the library's description of a vocabulary; a token without bytes is never part of a form."""
    return xgrammar.TokenizerInfo(
        list(vocabulary), xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=list(end_ids)
    )


def compile_source(compiler: Any, kind: GrammarKind, text: str) -> Any:
    """Compile one form.

    Raises:
        GrammarError: the text is no such form (the library's reason without its file names), or the library would
            leave out or misread some of it.
    """
    find_problems = {"regex": expression_problems, "json_schema": schema_problems, "ebnf": grammar_problems}[kind]
    if problems := find_problems(text):
        raise GrammarError(f"not a usable {kind}: {'; '.join(problems)}")
    try:
        if kind == "json_schema":
            return compiler.compile_json_schema(text, max_whitespace_cnt=_MOST_WHITESPACE)
        if kind == "regex":
            return compiler.compile_regex(text)
        return compiler.compile_grammar(text)
    except (RuntimeError, ValueError, MemoryError) as error:
        words = _PLACE_IN_LIBRARY.sub("", str(error)).strip() or type(error).__name__
        raise GrammarError(f"not a usable {kind}: {words}") from error
