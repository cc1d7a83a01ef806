"""What is checked before a request enters: wrong types raise, everything else becomes the request's own record."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch

from deepinfer.model.config import ModelConfig
from deepinfer.sampling.params import SamplingParams

_LISTED_IDS = 5


def checked_token_ids(request_id: object, prompt_token_ids: Sequence[int], params: object) -> tuple[int, ...]:
    """Return the prompt as Python integers; raise one TypeError that lists every wrong type."""
    wrong = []
    if not isinstance(request_id, str):
        wrong.append(f"request_id is a {type(request_id).__name__}, give a str")
    if not isinstance(params, SamplingParams):
        wrong.append(f"params is a {type(params).__name__}, give SamplingParams")
    ids: list[int] = []
    if isinstance(prompt_token_ids, (str, bytes)) or not hasattr(prompt_token_ids, "__iter__"):
        wrong.append(f"prompt_token_ids is a {type(prompt_token_ids).__name__}, give a list of integers")
    else:
        items: list[Any] = list(prompt_token_ids)
        strange = sorted({type(item).__name__ for item in items if not _is_integer(item)})
        if strange:
            wrong.append(f"prompt_token_ids holds {', '.join(strange)}, give integers")
        else:
            ids = [int(item) for item in items]
    if wrong:
        raise TypeError("add_request: " + "; ".join(wrong))
    return tuple(ids)


def refusals(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    config: ModelConfig,
    max_model_len: int,
    *,
    has_tokenizer: bool,
) -> tuple[str, ...]:
    """Return every reason to refuse a request of right types, in words; empty if there is none."""
    problems: list[str] = []
    if not prompt_token_ids:
        problems.append("the prompt is empty; give at least one token")
    outside = [token for token in prompt_token_ids if not 0 <= token < config.vocab_size]
    if outside:
        shown = ", ".join(map(str, outside[:_LISTED_IDS])) + (", ..." if len(outside) > _LISTED_IDS else "")
        problems.append(f"the prompt holds {len(outside)} ids outside [0, {config.vocab_size}): {shown}")
    if len(prompt_token_ids) > max_model_len:
        problems.append(
            f"the prompt has {len(prompt_token_ids)} tokens, a request may hold {max_model_len} positions (max_model_len)"
        )
    if params.stop and not has_tokenizer:
        problems.append("stop strings need text, but the model has no tokenizer.json; use stop_token_ids")
    problems += params.problems(config.vocab_size)
    return tuple(problems)


def image_refusals(
    spans: Sequence[tuple[int, int]], embeddings_PD: torch.Tensor | None, num_tokens: int, hidden_size: int
) -> tuple[str, ...]:
    """Return what is wrong with image spans and the embeddings given for them."""
    problems: list[str] = []
    end = 0
    for start, stop in sorted(spans):
        if not end <= start < stop <= num_tokens:
            problems.append(f"image span [{start}, {stop}) is empty, overlaps another or leaves the {num_tokens} tokens")
        end = max(end, stop)
    if embeddings_PD is not None and tuple(embeddings_PD.shape) != (num_tokens, hidden_size):
        problems.append(
            f"embeddings have shape {list(embeddings_PD.shape)}, one row per prompt token is needed: "
            f"[{num_tokens}, {hidden_size}]"
        )
    return tuple(problems)


def spans_of(mask: Sequence[bool]) -> tuple[tuple[int, int], ...]:
    """Return the runs of True in ``mask`` as (start, stop) pairs."""
    spans = []
    start: int | None = None
    for position, is_image in enumerate(mask):
        if is_image and start is None:
            start = position
        elif not is_image and start is not None:
            spans.append((start, position))
            start = None
    if start is not None:
        spans.append((start, len(mask)))
    return tuple(spans)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
