"""Runs items through an engine and counts right answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from deepinfer.errors import ArgumentError
from deepinfer.eval.items import PERPLEXITY_TASK, EvalItem
from deepinfer.eval.report import EvalReport, RowResult
from deepinfer.llm import LLM
from deepinfer.sampling.params import SamplingParams
from deepinfer.tokenizer import Tokenizer

_SPARE_TOKENS = 4


def evaluate(
    llm: LLM,
    items: Sequence[EvalItem],
    settings: dict[str, object] | None = None,
    tick: Callable[[int], object] = lambda _: None,
) -> EvalReport:
    """Ask every item, greedily.

    Args:
        llm: an engine whose model has a tokenizer.
        items: what is asked; rows of the report follow their order.
        settings: kept in the report.
        tick: called with the number of items that are done since the last call.

    Raises:
        ArgumentError: if the model has no tokenizer.
    """
    tokenizer = _tokenizer(llm)
    rows: dict[tuple[str, int], list[EvalItem]] = {}
    for item in items:
        rows.setdefault((item.task, item.distance), []).append(item)
    results: list[RowResult] = []
    for (task, distance), group in rows.items():
        if task == PERPLEXITY_TASK:
            results.append(RowResult(task, distance, len(group), None, _perplexity(llm, tokenizer, group)))
        else:
            right = right_answers(llm, group)
            results.append(RowResult(task, distance, len(group), sum(right) / len(group), None))
        tick(len(group))
    return EvalReport(settings or {}, tuple(results))


def right_answers(llm: LLM, items: Sequence[EvalItem]) -> list[bool]:
    """Ask items greedily and say of each whether the answer was right to the character and ended by itself.

    Raises:
        ArgumentError: if the model has no tokenizer.
    """
    tokenizer = _tokenizer(llm)
    params = [
        SamplingParams(temperature=0.0, max_tokens=len(tokenizer.encode(item.answer)) + _SPARE_TOKENS) for item in items
    ]
    outputs = llm.generate([item.prompt for item in items], params, use_tqdm=False)
    return [
        output.outputs[0].text == item.answer and output.outputs[0].finish_reason == "stop"
        for output, item in zip(outputs, items, strict=True)
    ]


def _tokenizer(llm: LLM) -> Tokenizer:
    tokenizer = llm.get_tokenizer()
    if tokenizer is None:
        raise ArgumentError("evaluation", ["the model has no tokenizer.json; items are text"])
    return tokenizer


def _perplexity(llm: LLM, tokenizer: Tokenizer, items: Sequence[EvalItem]) -> float:
    total, count = 0.0, 0
    for item in items:
        prompt, answer = tokenizer.encode(item.prompt), tokenizer.encode(item.answer, add_special_tokens=False)
        logits_TV = llm.logits([*prompt, *answer])[len(prompt) - 1 : -1]
        chances_TV = torch.log_softmax(logits_TV, -1)
        total -= float(chances_TV.gather(1, torch.tensor(answer).unsqueeze(1)).sum())
        count += len(answer)
    return math.exp(total / count)
