"""LLM: prompts in, outputs out, in the order of the prompts whatever happens to one of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from numbers import Integral
from os import PathLike
from typing import NamedTuple, Unpack

import torch
from tqdm import tqdm

from deepinfer.engine.admission import read_token_ids
from deepinfer.engine.build import build_engine
from deepinfer.engine.engine import Engine
from deepinfer.engine.options import EngineKeywords, EngineOptions
from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.ranks.front import LocalRanks
from deepinfer.engine.ranks.launched import LaunchedEngine
from deepinfer.errors import ArgumentError, TokenizerError
from deepinfer.sampling.params import SamplingParams
from deepinfer.settings import LaunchedRank, Settings
from deepinfer.tokenizer import Tokenizer

ServingEngine = Engine | LocalRanks | LaunchedEngine
Prompt = str | Sequence[int] | Mapping[str, object]


class _Prepared(NamedTuple):
    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    params: SamplingParams


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
        _require_types(model, accelerator)
        self._wrap(_build(model, accelerator, EngineOptions.from_keywords(options)))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """Put this face on an engine that was built by hand."""
        llm = cls.__new__(cls)
        llm._wrap(engine)
        return llm

    def _wrap(self, engine: ServingEngine) -> None:
        self._engine = engine
        self._ids = itertools.count()
        self._over: list[str] = []

    @property
    def engine(self) -> Engine:
        """The engine underneath, for driving it step by step.

        Raises:
            ArgumentError: there are many ranks; then :attr:`ranks` drives them.
        """
        if isinstance(self._engine, LocalRanks):
            raise ArgumentError("engine", [f"there are {self._engine.world_size} ranks; llm.ranks drives them"])
        return self._engine.engine if isinstance(self._engine, LaunchedEngine) else self._engine

    @property
    def ranks(self) -> LocalRanks | None:
        """The ranks of this machine, to be driven step by step like an engine; None where there is one."""
        return self._engine if isinstance(self._engine, LocalRanks) else None

    @property
    def rank(self) -> int:
        """This process's number among those that a launcher has started, 0 without one.

        All of them make the same calls and get the same terminal records; rank 0 is the one to write them down.
        """
        return self._engine.rank if isinstance(self._engine, LaunchedEngine) else 0

    def close(self) -> None:
        """End the processes that the engine started: the compiler of structured output, and ranks.

        One engine can be used again; many ranks of this machine cannot.

        Raises:
            RankFailedError: a rank of this machine had died, raised, or did not follow, and no call has said so yet;
                all processes are gone nevertheless.
        """
        self._engine.close()

    def get_tokenizer(self) -> Tokenizer | None:
        """Return the model's tokenizer, or None when its directory has none."""
        return self._engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for every prompt and return one terminal record per prompt, in order.

        Args:
            prompts: a text, a list of token ids, or a list of either; arrays of integers count as lists. Instead of a
                text or ids there may be ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
            sampling_params: one for all prompts or one per prompt; None means the defaults.
            use_tqdm: show a progress bar on the standard error stream.

        Raises:
            ArgumentError: the call itself is malformed, with everything that is wrong; nothing was queued.
            TokenizerError: texts that cannot be encoded are all that is wrong; nothing was queued.
            RankFailedError: a rank of this machine has failed, or one that a launcher has started had failed before.
            LostRanksError: a rank that a launcher has started has failed (docs/ranks.md).

        An exception, Ctrl-C included, aborts what this call queued: the next call starts clean. A refused prompt does
        not raise; its record says ``ignored`` and why.
        """
        prepared = self._prepare(prompts, sampling_params)
        results: dict[str, RequestOutput] = {}
        is_silent = not use_tqdm or self.rank != 0
        with tqdm(total=len(prepared), desc="generating", unit="request", disable=is_silent) as bar:
            for output in self._run(prepared):
                if output.finished:
                    results[output.request_id] = output
                    bar.update()
        return [results[each.request_id] for each in prepared]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Return an iterator over the growing records of all prompts; the last of each has ``finished`` set.

        Arguments are those of :meth:`generate` and refused as there, at the call. Texts and token lists are cumulative.
        The requests are queued when the first record is asked for; closing the iterator aborts what is unfinished.
        """
        return self._run(self._prepare(prompts, sampling_params))

    def logits(self, ids: Sequence[int], image_mask: Sequence[bool] | None = None) -> torch.Tensor:
        """Return float32 logits [len(ids), vocab] at every position, through chunked prefill and the caches.

        Args:
            ids: token ids.
            image_mask: true where a position lies in an image span; runs of true positions are spans.

        Raises:
            ArgumentError: with every reason why they cannot be computed.
            TypeError: the ids are no integers.
        """
        if isinstance(self._engine, LocalRanks | LaunchedEngine):
            raise ArgumentError("logits", ["they are computed by an engine of one rank; use data_parallel_size=1"])
        return self._engine.compute_logits(self._new_id(), ids, image_mask)

    def _prepare(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[_Prepared]:
        problems = self._busy_problems()
        listed = _listed(prompts, problems)
        params = _params_for(sampling_params, len(listed), problems)
        read: list[tuple[str | None, Sequence[int]]] = []
        unspeakable: list[str] = []
        for number, prompt in enumerate(listed):
            try:
                read.append(self._read(prompt))
            except TypeError as error:
                problems.append(f"prompt {number} {error}")
            except TokenizerError as error:
                unspeakable.append(f"prompt {number}: {error}")
        if problems:
            raise ArgumentError("generate", problems + unspeakable)
        if unspeakable:
            raise TokenizerError("; ".join(unspeakable))
        return [_Prepared(self._new_id(), text, ids, each) for (text, ids), each in zip(read, params, strict=True)]

    def _read(self, prompt: object) -> tuple[str | None, Sequence[int]]:
        if isinstance(prompt, Mapping):
            prompt = _unwrapped(prompt)
        if not isinstance(prompt, str):
            return None, read_token_ids(prompt)
        if self._engine.tokenizer is None:
            raise TypeError("is text, but the model has no tokenizer.json; give token ids")
        return prompt, self._engine.tokenizer.encode(prompt)

    def _run(self, prepared: Sequence[_Prepared]) -> Iterator[RequestOutput]:
        busy = self._busy_problems()
        if busy:  # something was added since the call that prepared this iterator
            raise ArgumentError("generate", busy)
        try:
            for each in prepared:
                self._engine.add_request(each.request_id, each.prompt_token_ids, each.params, prompt=each.prompt)
            while self._engine.has_unfinished_requests():
                yield from self._engine.step()
        finally:
            self._over = [each.request_id for each in prepared]
            self._discard_what_is_over()

    def _discard_what_is_over(self) -> None:
        # Remembered until it is done: a second Ctrl-C may cut off what the first one began.
        self._engine.discard_requests(self._over)
        self._over = []

    def _busy_problems(self) -> list[str]:
        self._discard_what_is_over()
        if not self._engine.has_unfinished_requests():
            return []
        who, name = ("the ranks", "llm.ranks") if self.ranks is not None else ("the engine", "llm.engine")
        have = "have" if self.ranks is not None else "has"
        return [
            f"{who} still {have} {self._num_unfinished()} unfinished requests that this call did not add; run "
            f"{name}.step() until has_unfinished_requests() is False ({name}.abort_request ends them early)"
        ]

    def _num_unfinished(self) -> int:
        stats = self._engine.stats()
        return sum(each.num_unfinished for each in (stats if isinstance(stats, tuple) else (stats,)))

    def _new_id(self) -> str:
        return str(next(self._ids))


def _build(model: str | PathLike[str] | None, accelerator: str | None, options: EngineOptions) -> ServingEngine:
    """Build one engine, or one a rank where a launcher or the options say that there are many."""
    settings = Settings.from_environment()
    place = LaunchedRank.from_environment()
    if place is not None:
        return LaunchedEngine(place, model, accelerator, options, settings)
    world_size = options.data_parallel_size or 1
    if options.data_parallel_size is None:
        world_size = math.lcm(options.expert_parallel_size, options.context_parallel_size)
    if world_size > 1:
        return LocalRanks(model, accelerator, options, world_size)
    return build_engine(model, accelerator, options, settings)


def _listed(prompts: object, problems: list[str]) -> list[object]:
    if isinstance(prompts, torch.Tensor):
        prompts = prompts.tolist()
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, (bytes, Set)) or not isinstance(prompts, Iterable):
        problems.append(f"prompts are of type {type(prompts).__name__}; give a text, token ids, or a list of either")
        return []
    listed = list(prompts)
    is_one_prompt = bool(listed) and all(isinstance(item, Integral) and not isinstance(item, bool) for item in listed)
    return [listed] if is_one_prompt else listed


def _unwrapped(prompt: Mapping[object, object]) -> object:
    """Return what a prompt given as a mapping holds."""
    keys = list(prompt)
    if keys == ["prompt"]:
        if isinstance(prompt["prompt"], str):
            return prompt["prompt"]
        raise TypeError(f"has a 'prompt' of type {type(prompt['prompt']).__name__}; give a text")
    if keys == ["prompt_token_ids"]:
        if not isinstance(prompt["prompt_token_ids"], str):
            return prompt["prompt_token_ids"]
        raise TypeError("has 'prompt_token_ids' of type str; give token ids")
    raise TypeError(f"is a mapping with the keys {keys}; give {{'prompt': text}} or {{'prompt_token_ids': ids}}")


def _params_for(given: object, count: int, problems: list[str]) -> list[SamplingParams]:
    if given is None:
        return [SamplingParams()] * count
    if isinstance(given, SamplingParams):
        return [given] * count
    if isinstance(given, (str, bytes, Mapping, Set)) or not isinstance(given, Iterable):
        problems.append(f"sampling_params are of type {type(given).__name__}; give SamplingParams, or one per prompt")
        return []
    listed = list(given)
    params = [each for each in listed if isinstance(each, SamplingParams)]
    wrong = sorted({type(each).__name__ for each in listed if not isinstance(each, SamplingParams)})
    if wrong:
        problems.append(f"sampling_params hold values of type {', '.join(wrong)}; give SamplingParams")
    if len(listed) != count:
        problems.append(f"{len(listed)} sampling parameters for {count} prompts; give one, or one per prompt")
    return params


def _require_types(model: object, accelerator: object) -> None:
    wrong = []
    if model is not None and not isinstance(model, (str, PathLike)):
        wrong.append(f"model is of type {type(model).__name__}; give a directory or None")
    if accelerator is not None and not isinstance(accelerator, str):
        wrong.append(f"accelerator is of type {type(accelerator).__name__}; give a driver's name or None")
    if wrong:
        raise TypeError("LLM: " + "; ".join(wrong))
