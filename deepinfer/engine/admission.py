"""What is checked before a request enters: wrong types raise, everything else becomes the request's own record.

Legend: P prompt positions, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import Any

import numpy as np
import torch

from deepinfer.engine.options import EngineOptions
from deepinfer.model.config import ModelConfig
from deepinfer.sampling.checks import id_problems
from deepinfer.sampling.params import SamplingParams

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Submission:
    """A request whose arguments have the right types.

    Attributes:
        request_id: the caller's id.
        prompt: the prompt's text, for the record only.
        prompt_token_ids: the prompt.
        params: how to sample.
        image_spans: (start, stop) positions that hold images, in order.
        embeddings_PD: one row per prompt position, read at image positions; None for none.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    image_spans: tuple[Span, ...] = ()
    embeddings_PD: torch.Tensor | None = None

    @classmethod
    def read(
        cls,
        request_id: Any,
        prompt_token_ids: Any,
        params: Any,
        *,
        prompt: Any = None,
        image_spans: Any = (),
        embeddings: Any = None,
    ) -> Submission:
        """Check and convert what a caller passed, whatever it is; ``params`` None means the defaults.

        Raises:
            TypeError: listing every argument of a wrong type.
        """
        wrong: list[str] = []
        if not isinstance(request_id, str):
            wrong.append(f"request_id is of type {type(request_id).__name__}; give a str")
        if not isinstance(prompt, (str, type(None))):
            wrong.append(f"prompt is of type {type(prompt).__name__}; give the prompt's text or None")
        if not isinstance(params, (SamplingParams, type(None))):
            wrong.append(f"params is of type {type(params).__name__}; give SamplingParams")
        if not (embeddings is None or (isinstance(embeddings, torch.Tensor) and embeddings.is_floating_point())):
            kind = embeddings.dtype if isinstance(embeddings, torch.Tensor) else type(embeddings).__name__
            wrong.append(f"embeddings are of type {kind}; give a floating-point tensor")
        ids: tuple[int, ...] = ()
        spans: tuple[Span, ...] = ()
        try:
            ids = read_token_ids(prompt_token_ids)
        except TypeError as error:
            wrong.append(f"prompt_token_ids {error}")
        try:
            spans = _read_spans(image_spans)
        except TypeError as error:
            wrong.append(f"image_spans {error}")
        if wrong:
            raise TypeError(f"request {request_id!r}: {'; '.join(wrong)}")
        return cls(request_id, prompt, ids, params or SamplingParams(), spans, embeddings)


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """What an engine accepts.

    Attributes:
        config: the model.
        max_model_len: positions that a request may hold.
        has_tokenizer: whether there is text, in which stop strings could be found.
        makes_one_token: a prompt engine, which cannot go on after the first token.
        leaves_rows_out: a prompt's first rows do not reach the last layer.
        has_twins: other ranks schedule the same requests, and must find each ready at the same step.
        has_compiler: forms are compiled by somebody who needs no tokenizer.
    """

    config: ModelConfig
    max_model_len: int
    has_tokenizer: bool
    makes_one_token: bool
    leaves_rows_out: bool = False
    has_twins: bool = False
    has_compiler: bool = False

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        options: EngineOptions,
        max_model_len: int,
        *,
        has_tokenizer: bool,
        has_compiler: bool = False,
    ) -> AdmissionRules:
        """Return the rules of an engine with these options, which the environment has completed."""
        return cls(
            config,
            max_model_len,
            has_tokenizer=has_tokenizer,
            makes_one_token=options.engine_type == "prompt",
            leaves_rows_out=options.is_prefill_truncated,
            has_twins=options.context_parallel_size > 1,
            has_compiler=has_compiler,
        )

    def refusals(self, submission: Submission) -> tuple[str, ...]:
        """Return every reason to refuse a request, in words; empty if there is none."""
        params, num_tokens = submission.params, len(submission.prompt_token_ids)
        problems: list[str] = []
        if not num_tokens:
            problems.append("the prompt is empty; give at least one token")
        problems += id_problems("the prompt", submission.prompt_token_ids, self.config.vocab_size)
        if num_tokens > self.max_model_len:
            problems.append(
                f"the prompt has {num_tokens} tokens; a request may hold max_model_len={self.max_model_len} positions"
            )
        problems += params.problems(self.config.vocab_size)
        if params.stop and not self.has_tokenizer:
            problems.append("stop strings need text, but the model has no tokenizer.json; use stop_token_ids")
        if params.prompt_logprobs is not None and self.leaves_rows_out:
            problems.append(
                "prompt_logprobs need every row of the prompt, and this engine leaves some out; build it with "
                "truncated_prefill='off'"
            )
        if params.structured_outputs is not None and not (self.has_tokenizer or self.has_compiler):
            problems.append("structured_outputs need text, but the model has no tokenizer.json")
        if params.structured_outputs is not None and self.has_twins:
            problems.append(
                "structured_outputs are ready at a time of each rank's own, and the ranks of a context group must "
                "agree; use context_parallel_size=1"
            )
        if self.makes_one_token and params.max_tokens > 1:
            problems.append(
                f"max_tokens is {params.max_tokens}; an engine of type 'prompt' makes the first token and cannot hand "
                f"the request over in this release: give max_tokens=1, or use engine_type='normal'"
            )
        problems += _image_problems(submission, self.config.hidden_size)
        return tuple(problems)

    def logits_problems(self, num_ids: int, mask: Sequence[bool] | None) -> list[str]:
        """Return why logits of so many ids cannot be given beyond what :meth:`refusals` says."""
        problems = []
        if mask is not None and len(mask) != num_ids:
            problems.append(f"image_mask has {len(mask)} flags for {num_ids} ids")
        if self.leaves_rows_out:
            problems.append("this engine leaves rows of a prompt out; build it with truncated_prefill='off'")
        return problems


def read_token_ids(prompt: object) -> tuple[int, ...]:
    """Return a prompt as Python integers, or raise TypeError with the second half of a sentence about it.

    Lists, tuples and other iterables of integers are read, and one-dimensional integer arrays of numpy and torch.
    """
    if isinstance(prompt, (np.ndarray, torch.Tensor)):
        prompt = prompt.tolist()
    if isinstance(prompt, (str, bytes, Mapping, Set)) or not isinstance(prompt, Iterable):
        raise TypeError(f"is of type {type(prompt).__name__}; give a list of token ids")
    items = list(prompt)
    # bool is an Integral too, and a mask in a prompt's place must be seen.
    strange = {kind.__name__ for kind in set(map(type, items)) if kind is bool or not issubclass(kind, Integral)}
    if strange:
        raise TypeError(f"holds values of type {', '.join(sorted(strange))}; give integers")
    return tuple(map(int, items))


def read_mask(mask: object) -> tuple[bool, ...]:
    """Return a mask as booleans; TypeError for anything but a list of truth values or 0 and 1."""
    if isinstance(mask, (str, bytes)) or not isinstance(mask, Iterable):
        raise TypeError(f"image_mask is of type {type(mask).__name__}; give a list of booleans")
    flags = list(mask)
    strange = sorted({repr(flag)[:20] for flag in flags if not _is_flag(flag)})
    if strange:
        raise TypeError(f"image_mask holds {', '.join(strange[:5])}; give booleans")
    return tuple(bool(flag) for flag in flags)


def _is_flag(value: object) -> bool:
    return not isinstance(value, (str, bytes)) and value in (0, 1)


def spans_of(mask: Sequence[object]) -> tuple[Span, ...]:
    """Return the runs of true values in ``mask`` as (start, stop) pairs."""
    edges = [False, *map(bool, mask), False]
    turns = [position for position, (before, after) in enumerate(pairwise(edges)) if before != after]
    return tuple(zip(turns[::2], turns[1::2], strict=True))


def _read_spans(spans: object) -> tuple[Span, ...]:
    if not isinstance(spans, Iterable):
        raise TypeError(f"is of type {type(spans).__name__}; give pairs of positions (start, stop)")
    read: list[Span] = []
    for pair in spans:
        try:
            start, stop = read_token_ids(pair)
        except (TypeError, ValueError):
            raise TypeError(f"holds {pair!r:.80}; give pairs of positions (start, stop)") from None
        read.append((start, stop))
    return tuple(sorted(read))


def _image_problems(submission: Submission, hidden_size: int) -> list[str]:
    num_tokens, embeddings_PD = len(submission.prompt_token_ids), submission.embeddings_PD
    problems: list[str] = []
    end = 0
    for start, stop in submission.image_spans:
        if not end <= start < stop <= num_tokens:
            problems.append(
                f"image span [{start}, {stop}) is empty, overlaps another or leaves the prompt of {num_tokens}"
            )
        end = max(end, stop)
    if embeddings_PD is not None:
        if tuple(embeddings_PD.shape) != (num_tokens, hidden_size):
            problems.append(
                f"embeddings have shape {list(embeddings_PD.shape)}; one row per prompt token is needed: "
                f"[{num_tokens}, {hidden_size}]"
            )
        if not submission.image_spans:
            problems.append("embeddings are read at image positions only, and image_spans is empty; give the spans")
    return problems


def parent_problems(parent_id: str, siblings: int, *, is_held: bool, is_alive: bool) -> list[str]:
    """Return why a request cannot be forked.

    Args:
        parent_id: its id.
        siblings: its answers, 0 for a request that nobody knows.
        is_held: it waits for its form.
        is_alive: the scheduler has it; it knows first, the record of a request that has ended may still be due.
    """
    if siblings > 1:
        return [f"request {parent_id!r} has n={siblings} siblings; fork a request with n=1"]
    if is_held:
        return [f"request {parent_id!r} waits until its form is compiled; fork it once it runs"]
    return [] if siblings and is_alive else [f"there is no living request {parent_id!r} to fork"]


def fork_problems(params: SamplingParams) -> list[str]:
    """Return why a fork cannot have these parameters, though another request could."""
    if (params.n, params.prompt_logprobs, params.structured_outputs) == (1, None, None):
        return []
    return ["a fork takes n=1, no prompt_logprobs and no structured_outputs"]
