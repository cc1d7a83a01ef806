"""Requests and their answers as the engine keeps them between steps: tokens, text, log-probabilities, the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from deepinfer.engine.admission import Submission
from deepinfer.engine.growing import Prefix
from deepinfer.engine.outputs import CompletionOutput, FinishReason, RequestOutput
from deepinfer.engine.worker import RowExtras
from deepinfer.model.config import ModelConfig
from deepinfer.sampling.grammar import GrammarProgress
from deepinfer.sampling.grammar.library import GrammarError
from deepinfer.sampling.limits import SamplingLimits
from deepinfer.sampling.request import RequestSampling
from deepinfer.sampling.sampler import SampledRow
from deepinfer.sampling.streams import sibling_seed
from deepinfer.scheduling.sequence import StopRules
from deepinfer.scheduling.states import Status
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
        extras: what its rows want beyond a token.
        text: its growing text, None without a tokenizer.
        token_ids: what was emitted.
        log_probabilities: one entry per emitted token, if asked for.
        found_stop: the stop string that its text has reached.
        terminal: how it ended.
        progress: its place in the form that it must have; None without a form, or while the form is compiled.
        form_failure: why the form cannot be kept any longer; empty while it can.
    """

    request_id: str
    sequence_id: str
    index: int
    sampling: RequestSampling
    stop_rules: StopRules
    extras: RowExtras
    text: OutputText | None
    token_ids: list[int] = field(default_factory=list)
    log_probabilities: list[Mapping[int, float]] = field(default_factory=list)
    found_stop: str | None = None
    terminal: TerminalRecord | None = None
    progress: GrammarProgress | None = None
    form_failure: str = ""
    _output: CompletionOutput | None = None

    @property
    def is_finished(self) -> bool:
        """True once its terminal record is known."""
        return self.terminal is not None

    def allowed_tokens(self, drafts: Sequence[int] = (), *, rows: int = 1) -> NDArray[np.int32] | None:
        """Return the tokens that may come next and behind each draft; None where every token may.

        Args:
            drafts: the drafts to verify, up to the first placeholder.
            rows: how many rows the step has: at least one more than drafts.

        Returns:
            int32 [rows, W] with bit t for token t; every token in rows that follow no draft.
        """
        if self.progress is None:
            return None
        allowed_mW = np.empty((rows, -(-self.sampling.vocab_size // 32)), np.int32)
        try:
            self.progress.fill(allowed_mW, drafts)
        except RuntimeError as error:  # the library's; this answer alone ends
            self.form_failure = f"structured_outputs: {error}"
            return None
        return allowed_mW

    def take_run(self, rows: Sequence[SampledRow], most: int) -> tuple[list[int], SampledRow | None]:
        """Take the tokens of a run up to the one that ends the answer, at most ``most``.

        Tokens, text, log-probabilities and the place in the form end together, wherever in the run that is.

        Returns:
            The tokens that were taken, and the row without a token that the answer has come to, if it has.
        """
        taken: list[int] = []
        for row in rows[:most]:
            if row.token_id < 0:
                return taken, row
            is_stop = self.stop_rules.is_stop(row.token_id)
            self.append(row.token_id, row.log_probabilities, ended_by_token=is_stop)
            taken.append(row.token_id)
            if is_stop or self.found_stop is not None or self.form_failure:
                break
        return taken, None

    def append(self, token_id: int, log_probabilities: Mapping[int, float] | None, *, ended_by_token: bool) -> None:
        """Take an emitted token; ``ended_by_token`` says that it was an end token or a stop id."""
        self._output = None
        if log_probabilities is not None:
            self.log_probabilities.append(log_probabilities)
        self.token_ids.append(token_id)
        if self.progress is not None:
            try:
                self.progress.commit(token_id)
            except (GrammarError, RuntimeError) as error:
                self.form_failure = f"structured_outputs: {error}"
        params = self.sampling.params
        if self.text is not None and (not ended_by_token or params.include_stop_str_in_output):
            may_stop = not ended_by_token and len(self.token_ids) >= params.min_tokens
            self.found_stop = self.text.add(token_id, may_stop=may_stop)

    def finish(self, terminal: TerminalRecord) -> None:
        """Take the terminal record and release the text that was held back."""
        self._output = None
        self.terminal = terminal
        if self.text is not None and self.found_stop is None:
            self.text.finish()

    def end_unscheduled(self, status: Status, text: str) -> TerminalRecord:
        """Return the terminal record of an answer that the scheduler does not know, or no longer knows."""
        return TerminalRecord(
            request_id=self.sequence_id,
            status=status,
            stop_reason=None,
            text=text,
            num_prompt_tokens=0,
            output_token_ids=tuple(self.token_ids),
            preemptions=0,
        )

    def output(self) -> CompletionOutput:
        """Return the answer as it stands; O(1) in its tokens, and the same object until it changes."""
        if self._output is None:
            terminal = self.terminal
            has_logprobs = self.sampling.params.logprobs is not None
            self._output = CompletionOutput(
                index=self.index,
                text=self.text.text if self.text is not None else "",
                token_ids=Prefix(self.token_ids, len(self.token_ids)),
                logprobs=Prefix(self.log_probabilities, len(self.token_ids)) if has_logprobs else None,
                finish_reason=cast("FinishReason", terminal.finish_reason) if terminal is not None else None,
                stop_reason=terminal.stop_reason if terminal is not None else None,
                message=terminal.text or None if terminal is not None else None,
            )
        return self._output


@dataclass(slots=True, eq=False)
class Request:
    """What a caller added: one prompt, one or more answers.

    Attributes:
        submission: what the caller passed.
        answers: the siblings; empty for a refused request.
        extras: what the rows of all siblings want beyond a token. Each prompt position is recorded once, by whichever
            sibling computes it first.
        refusal: why it was refused, None if it was not.
        arrival: its place in the order of admission.
    """

    submission: Submission
    answers: tuple[Answer, ...]
    extras: RowExtras
    refusal: str | None = None
    arrival: int = 0
    _prompt_logprobs: tuple[Mapping[int, float] | None, ...] | None = None

    @classmethod
    def create(
        cls, submission: Submission, extras: RowExtras, *, seed: int, config: ModelConfig, tokenizer: Tokenizer | None
    ) -> Request:
        """Make a request and its answers; nothing speaks against the submission."""
        request_id, params = submission.request_id, submission.params
        stop_rules = StopRules(
            max_tokens=params.max_tokens,
            stop_token_ids=frozenset(params.stop_token_ids),
            eos_token_id=config.eos_token_id,
            ignore_eos=params.ignore_eos,
        )
        answers = tuple(
            Answer(
                request_id=request_id,
                sequence_id=sequence_id,
                index=index,
                sampling=RequestSampling.create(
                    params,
                    seed=sibling_seed(seed, index),
                    prompt_token_ids=submission.prompt_token_ids,
                    end_token_ids=(config.eos_token_id,),
                    vocab_size=config.vocab_size,
                ),
                stop_rules=stop_rules,
                extras=extras,
                text=None
                if tokenizer is None
                else OutputText(tokenizer, stop=params.stop, include_stop=params.include_stop_str_in_output),
            )
            for index, sequence_id in enumerate(sequence_ids(request_id, params.n))
        )
        return cls(submission, answers, extras)

    @property
    def request_id(self) -> str:
        """The caller's id."""
        return self.submission.request_id

    @property
    def history(self) -> tuple[int, ...]:
        """Prompt and outputs of a request with one answer."""
        return (*self.submission.prompt_token_ids, *self.answers[0].token_ids)

    @property
    def is_finished(self) -> bool:
        """True once no answer is living; a refused request never had one."""
        return all(answer.is_finished for answer in self.answers)

    def living(self) -> list[Answer]:
        """Return the answers without a terminal record."""
        return [answer for answer in self.answers if not answer.is_finished]

    def output(self) -> RequestOutput:
        """Return the request's record as it stands."""
        submission = self.submission
        return RequestOutput(
            request_id=submission.request_id,
            prompt=submission.prompt,
            prompt_token_ids=submission.prompt_token_ids,
            prompt_logprobs=self._listed_prompt(),
            outputs=self._refused_outputs() if self.refusal else tuple(answer.output() for answer in self.answers),
            finished=self.is_finished,
        )

    def _refused_outputs(self) -> tuple[CompletionOutput, ...]:
        wanted = self.submission.params.n
        count = wanted if 1 <= wanted <= SamplingLimits().choices else 1
        return tuple(CompletionOutput(index, "", (), None, "ignored", message=self.refusal) for index in range(count))

    def _listed_prompt(self) -> tuple[Mapping[int, float] | None, ...] | None:
        listed = self.extras.prompt_log_probabilities
        if self._prompt_logprobs is None and listed is not None and listed.is_complete:
            self._prompt_logprobs = listed.entries()
        return self._prompt_logprobs


def sequence_ids(request_id: str, n: int) -> list[str]:
    """Return the ids under which the scheduler knows the siblings: the request's own for n = 1, else ``id/index``."""
    return [request_id] if n == 1 else [f"{request_id}/{index}" for index in range(n)]
