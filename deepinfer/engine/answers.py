"""Requests and their answers as the engine keeps them between steps: tokens, text, log-probabilities, the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from deepinfer.engine.outputs import CompletionOutput, FinishReason, RequestOutput
from deepinfer.model.config import ModelConfig
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.prompt import PromptLogProbabilities
from deepinfer.sampling.request import RequestSampling
from deepinfer.sampling.streams import sibling_seed
from deepinfer.scheduling.sequence import StopRules
from deepinfer.scheduling.step import TerminalRecord
from deepinfer.tokenizer import OutputText, Tokenizer


@dataclass(slots=True, eq=False)
class Answer:
    """One sibling of a request.

    Attributes:
        request_id: the request it belongs to.
        sequence_id: its own id in the scheduler; the request's for n = 1, ``id/index`` for siblings.
        index: its number.
        sampling: its sampling constants.
        stop_rules: when the scheduler ends it.
        text: its growing text, None without a tokenizer.
        token_ids: what was emitted.
        log_probabilities: one entry per emitted token, if asked for.
        found_stop: the stop string that its text has reached.
        terminal: how it ended.
    """

    request_id: str
    sequence_id: str
    index: int
    sampling: RequestSampling
    stop_rules: StopRules
    text: OutputText | None
    token_ids: list[int] = field(default_factory=list)
    log_probabilities: list[Mapping[int, float]] = field(default_factory=list)
    found_stop: str | None = None
    terminal: TerminalRecord | None = None

    @property
    def is_finished(self) -> bool:
        """True once its terminal record is known."""
        return self.terminal is not None

    def append(self, token_id: int, log_probabilities: Mapping[int, float] | None, *, ended_by_token: bool) -> None:
        """Take an emitted token; ``ended_by_token`` says that it was an end token or a stop id."""
        self.token_ids.append(token_id)
        if log_probabilities is not None:
            self.log_probabilities.append(log_probabilities)
        params = self.sampling.params
        if self.text is not None and (not ended_by_token or params.include_stop_str_in_output):
            may_stop = len(self.token_ids) >= params.min_tokens and not ended_by_token
            self.found_stop = self.text.add(token_id, may_stop=may_stop)

    def finish(self, terminal: TerminalRecord) -> None:
        """Take the terminal record and release the text that was held back."""
        self.terminal = terminal
        if self.text is not None and self.found_stop is None:
            self.text.finish()

    def output(self) -> CompletionOutput:
        """Return the answer as it stands."""
        terminal = self.terminal
        return CompletionOutput(
            index=self.index,
            text=self.text.text if self.text is not None else "",
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.log_probabilities) if self.sampling.params.logprobs is not None else None,
            finish_reason=cast("FinishReason", terminal.finish_reason) if terminal is not None else None,
            stop_reason=terminal.stop_reason if terminal is not None else None,
            message=terminal.text or None if terminal is not None else None,
        )


@dataclass(slots=True, eq=False)
class Request:
    """What a caller added: one prompt, one or more answers.

    Attributes:
        request_id: the caller's id.
        prompt: its text, if it had one.
        prompt_token_ids: its ids.
        answers: the siblings; empty for a refused request.
        num_answers: how many answers its record lists.
        refusal: why it was refused, None if it was not.
        prompt_log_probabilities: the list that its prompt rows fill, if asked for.
        embeddings_PD: embeddings of image positions, if given.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    answers: tuple[Answer, ...]
    num_answers: int
    refusal: str | None = None
    prompt_log_probabilities: PromptLogProbabilities | None = None
    embeddings_PD: torch.Tensor | None = None

    @classmethod
    def create(
        cls,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        *,
        seed: int,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
    ) -> Request:
        """Make a request and its answers; ``params`` have been checked."""
        stop_rules = StopRules(
            max_tokens=params.max_tokens,
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            eos_token_id=config.eos_token_id,
            ignore_eos=params.ignore_eos,
        )
        answers = tuple(
            Answer(
                request_id=request_id,
                sequence_id=request_id if params.n == 1 else f"{request_id}/{index}",
                index=index,
                sampling=RequestSampling.create(
                    params,
                    seed=sibling_seed(seed, index),
                    prompt_token_ids=prompt_token_ids,
                    end_token_ids=(config.eos_token_id,),
                    vocab_size=config.vocab_size,
                ),
                stop_rules=stop_rules,
                text=_text(tokenizer, params),
            )
            for index in range(params.n)
        )
        return cls(request_id, prompt, prompt_token_ids, answers, params.n)

    @classmethod
    def refused(
        cls, request_id: str, prompt: str | None, prompt_token_ids: Sequence[int], params: SamplingParams, why: str
    ) -> Request:
        """Make a request that is refused: it never runs, its one record says why."""
        num_answers = params.n if 1 <= params.n <= 1024 else 1
        return cls(request_id, prompt, tuple(prompt_token_ids), (), num_answers, refusal=why)

    @property
    def is_refused(self) -> bool:
        """True if it never enters the scheduler."""
        return self.refusal is not None

    @property
    def is_finished(self) -> bool:
        """True once no answer is living."""
        return not self.living()

    def living(self) -> list[Answer]:
        """Return the answers without a terminal record."""
        return [answer for answer in self.answers if not answer.is_finished]

    def output(self) -> RequestOutput:
        """Return the request's record as it stands."""
        if self.refusal is not None:
            outputs = tuple(
                CompletionOutput(index, "", (), None, "ignored", message=self.refusal)
                for index in range(self.num_answers)
            )
        else:
            outputs = tuple(answer.output() for answer in self.answers)
        listed = self.prompt_log_probabilities
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=listed.entries() if listed is not None else None,
            outputs=outputs,
            finished=self.is_finished,
        )


def _text(tokenizer: Tokenizer | None, params: SamplingParams) -> OutputText | None:
    if tokenizer is None:
        return None
    return OutputText(tokenizer, stop=params.stop or (), include_stop=params.include_stop_str_in_output)
