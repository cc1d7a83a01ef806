"""LLM: prompts in, outputs out, in the order of the prompts whatever happens to one of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Unpack

import torch
from tqdm import tqdm

from deepinfer.engine.build import build_engine
from deepinfer.engine.engine import Engine
from deepinfer.engine.options import EngineKeywords, EngineOptions
from deepinfer.engine.outputs import RequestOutput
from deepinfer.errors import ArgumentError
from deepinfer.sampling.params import SamplingParams

Prompt = str | Sequence[int]


class LLM:
    """A model on an accelerator, ready to generate.

    Args:
        model: checkpoint directory; None means the small model that comes with the package.
        accelerator: driver name; None means DEEPINFER_ACCELERATOR, or the first available driver.
        **options: see :class:`deepinfer.engine.options.EngineOptions`. Unknown names are refused, all at once.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        accelerator: str | None = None,
        **options: Unpack[EngineKeywords],
    ) -> None:
        self._engine = build_engine(model, accelerator, EngineOptions.from_keywords(options))
        self._ids = itertools.count()

    @property
    def engine(self) -> Engine:
        """The engine underneath, for driving it step by step."""
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for every prompt and return one terminal record per prompt, in order.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            sampling_params: one for all prompts or one per prompt; None means the defaults.
            use_tqdm: show a progress bar on the standard error stream.

        Raises:
            ArgumentError: the call itself is malformed; nothing was queued.

        An exception, Ctrl-C included, aborts what this call queued: the next call starts clean. A refused prompt does
        not raise; its record says ``ignored`` and why.
        """
        results: dict[str, RequestOutput] = {}
        request_ids = self._enqueue(prompts, sampling_params)
        with tqdm(total=len(request_ids), desc="generating", unit="request", disable=not use_tqdm) as bar:
            for output in self._run(request_ids):
                if output.finished:
                    results[output.request_id] = output
                    bar.update()
        return [results[request_id] for request_id in request_ids]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield the growing records of all prompts as steps produce them; the last of each has ``finished`` set.

        Texts and token lists are cumulative. Closing the iterator aborts what is unfinished.
        """
        request_ids = self._enqueue(prompts, sampling_params)
        yield from self._run(request_ids)

    def logits(self, ids: Sequence[int], image_mask: Sequence[bool] | None = None) -> torch.Tensor:
        """Return float32 logits [len(ids), vocab] at every position, through chunked prefill and the caches.

        Args:
            ids: token ids.
            image_mask: True where a position lies in an image span; runs of True are spans.
        """
        (request_id,) = self._new_ids(1)
        return self._engine.compute_logits(request_id, ids, image_mask)

    def _enqueue(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[str]:
        problems: list[str] = []
        if self._engine.has_unfinished_requests():
            problems.append(
                f"the engine still has {self._engine.stats().num_unfinished} unfinished requests that this call did not "
                f"add; run engine.step() until they end, or abort them"
            )
        listed = _as_list(prompts)
        params = _params_for(sampling_params, len(listed), problems)
        ids: list[tuple[str | None, Sequence[int]]] = []
        for number, prompt in enumerate(listed):
            if isinstance(prompt, str):
                if self._engine.tokenizer is None:
                    problems.append(f"prompt {number} is text, but the model has no tokenizer.json: give token ids")
                    continue
                ids.append((prompt, self._engine.tokenizer.encode(prompt)))
            elif isinstance(prompt, (list, tuple)):
                ids.append((None, prompt))
            else:
                problems.append(f"prompt {number} is a {type(prompt).__name__}; give a text or a list of token ids")
        if problems:
            raise ArgumentError("generate", problems)
        request_ids = self._new_ids(len(ids))
        added: list[str] = []
        try:
            for request_id, (text, token_ids), each in zip(request_ids, ids, params, strict=True):
                self._engine.add_request(request_id, token_ids, each, prompt=text)
                added.append(request_id)
        except BaseException:
            self._engine.discard_requests(added)
            raise
        return request_ids

    def _run(self, request_ids: Sequence[str]) -> Iterator[RequestOutput]:
        try:
            while self._engine.has_unfinished_requests():
                yield from self._engine.step()
        finally:
            self._engine.discard_requests(request_ids)

    def _new_ids(self, count: int) -> list[str]:
        return [str(next(self._ids)) for _ in range(count)]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if listed and all(isinstance(item, int) and not isinstance(item, bool) for item in listed):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]


def _params_for(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int, problems: list[str]
) -> list[SamplingParams]:
    if given is None:
        return [SamplingParams()] * count
    if isinstance(given, SamplingParams):
        return [given] * count
    params = list(given)
    if len(params) != count:
        problems.append(f"{len(params)} sampling parameters for {count} prompts; give one, or one per prompt")
    wrong = sorted({type(each).__name__ for each in params if not isinstance(each, SamplingParams)})
    if wrong:
        problems.append(f"sampling_params holds {', '.join(wrong)}; give SamplingParams")
    return params
