"""Prompts from a file: one JSON value a line, a text or a list of token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from deepinfer.errors import ArgumentError
from deepinfer.tokenizer import Tokenizer

Prompt = str | list[int]


def read_prompts(file: Path) -> list[Prompt]:
    """Return the prompts of a file in order; empty lines are passed over.

    Raises:
        ArgumentError: with every line that is neither a text nor a list of token ids; or there are none.
    """
    prompts: list[Prompt] = []
    problems: list[str] = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            problems.append(f"line {number} is not JSON: {error}")
            continue
        is_ids = isinstance(value, list) and bool(value) and all(type(each) is int and each >= 0 for each in value)
        if is_ids or (isinstance(value, str) and value):
            prompts.append(value)
        else:
            problems.append(f"line {number} is neither a text nor a list of token ids")
    if not prompts and not problems:
        problems.append("holds no prompt; write one JSON string, or list of token ids, a line")
    if problems:
        raise ArgumentError(str(file), problems)
    return prompts


def prompt_ids(prompts: Sequence[Prompt], tokenizer: Tokenizer | None) -> list[list[int]]:
    """Return the token ids of prompts; texts need a tokenizer.

    Raises:
        ArgumentError: there are texts, and no tokenizer.
    """
    if tokenizer is not None:
        return [list(tokenizer.encode(each)) if isinstance(each, str) else each for each in prompts]
    ids = [each for each in prompts if not isinstance(each, str)]
    if len(ids) < len(prompts):
        raise ArgumentError("prompts", ["some are texts, but the model has no tokenizer.json; give token ids"])
    return ids
