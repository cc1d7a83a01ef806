"""Everything that the simulation knows about its requests, and what it holds against the engine's records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from deepinfer.engine.options import EngineOptions
from deepinfer.engine.outputs import CompletionOutput, EngineStats, RequestOutput
from deepinfer.model.config import ModelConfig
from deepinfer.sampling.params import SamplingParams
from deepinfer.sim.truth import Foretelling, History


class Observation(NamedTuple):
    """What one record showed: new tokens that were compared, and what was wrong."""

    tokens: int
    problems: list[str]


@dataclass(slots=True)
class WitnessedRequest:
    """One living request as the simulation knows it.

    Attributes:
        prompt: its prompt; of a fork, its parent's history.
        params: what it asked for.
        truths: one history per answer, extended by the tokens that were seen.
        seen: tokens seen per answer.
        is_aborted: it was aborted from outside.
        is_failed: a step that it was in has failed.
    """

    prompt: list[int]
    params: SamplingParams
    truths: list[History]
    seen: list[int]
    is_aborted: bool = False
    is_failed: bool = False
    tokens: list[int] = field(default_factory=list)

    @property
    def work_tokens(self) -> int:
        """Positions that it may have to compute."""
        return (len(self.prompt) + self.params.max_tokens) * self.params.n

    @property
    def can_be_forked(self) -> bool:
        """Whether the engine would take a fork of it."""
        return self.params.n == 1 and not self.is_aborted and not self.is_failed


class Witness:
    """Knows what every record must say."""

    def __init__(
        self, foretelling: Foretelling, config: ModelConfig, options: EngineOptions, stats: EngineStats
    ) -> None:
        self.living: dict[str, WitnessedRequest] = {}
        self._foretelling = foretelling
        self._config = config
        self._options = options
        self._limit = stats.max_model_len
        self._pool_tokens = stats.usable_blocks * options.block_size

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        """Note a request that is about to be added."""
        truth = self._foretelling.history(self._config)
        truth.extend(prompt)
        self.living[request_id] = WitnessedRequest(
            list(prompt), params, [truth.copy() for _ in range(params.n)], [0] * params.n
        )

    def may_fork(self, parent_id: str) -> bool:
        """Say whether the parent's history leaves room for a child; the engine would refuse one by an error."""
        parent = self.living[parent_id]
        return len(parent.prompt) + len(parent.tokens) <= min(self._limit, self._pool_tokens)

    def fork(self, parent_id: str, child_id: str, params: SamplingParams) -> None:
        """Note a fork that is about to be made."""
        parent = self.living[parent_id]
        self.living[child_id] = WitnessedRequest(
            [*parent.prompt, *parent.tokens], params, [parent.truths[0].copy()], [0]
        )

    def aborted(self, request_id: str) -> None:
        """Note that a living request was aborted."""
        if request_id in self.living:
            self.living[request_id].is_aborted = True

    def step_failed(self, sequence_ids: set[str]) -> None:
        """Note that the step of these sequences failed."""
        for sequence_id in sequence_ids:
            request = self.living.get(sequence_id.split("/")[0])
            if request is not None:
                request.is_failed = True

    def observe(self, output: RequestOutput) -> Observation:
        """Compare a record with the truth; a finished request is forgotten."""
        request = self.living.get(output.request_id)
        if request is None:
            return Observation(0, [f"request {output.request_id} has a record after its end, or was never added"])
        problems: list[str] = []
        tokens = 0
        for answer in output.outputs:
            name = f"request {output.request_id} answer {answer.index}"
            tokens += self._compare_tokens(name, request, answer, problems)
            self._compare_ending(name, request, answer, problems)
        if output.finished:
            unended = [answer.index for answer in output.outputs if answer.finish_reason is None]
            if unended:
                problems.append(f"request {output.request_id} is finished, but answers {unended} have no reason")
            del self.living[output.request_id]
        return Observation(tokens, problems)

    def _compare_tokens(
        self, name: str, request: WitnessedRequest, answer: CompletionOutput, problems: list[str]
    ) -> int:
        new = answer.token_ids[request.seen[answer.index] :]
        truth = request.truths[answer.index]
        for token in new:
            expected = truth.next_token()
            if token != expected:
                place = len(request.prompt) + request.seen[answer.index]
                problems.append(f"{name}: token at position {place} is {token}, the oracle says {expected}")
                return 0
            truth.extend([token])
            request.seen[answer.index] += 1
        if answer.index == 0:
            request.tokens.extend(new)
        return len(new)

    def _compare_ending(
        self, name: str, request: WitnessedRequest, answer: CompletionOutput, problems: list[str]
    ) -> None:
        emitted = len(answer.token_ids)
        ends_by_token = bool(emitted) and answer.token_ids[-1] == self._config.eos_token_id
        length = len(request.prompt) + emitted
        is_justified = {
            None: True,
            "stop": ends_by_token and not request.params.ignore_eos,
            "length": emitted == request.params.max_tokens or length == self._limit + 1,
            "abort": request.is_aborted or request.is_failed,
            "ignored": emitted == 0 and len(request.prompt) > min(self._limit, self._largest_prompt),
            "insufficient_system_resource": self._options.stop_preempted_requests or length > self._pool_tokens,
        }
        if not is_justified.get(answer.finish_reason, False):
            problems.append(f"{name}: ended with {answer.finish_reason!r} after {emitted} tokens: {answer.message}")

    @property
    def _largest_prompt(self) -> int:
        """The longest prompt that can be admitted."""
        if self._options.enable_chunked_prefill:
            history = self._options.max_prefill_history_tokens
            return self._pool_tokens if history is None else min(self._pool_tokens, history)
        return min(self._pool_tokens, self._options.max_num_batched_tokens)
