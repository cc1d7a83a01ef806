"""Everything that the simulation knows about its requests, and what it holds against the engine's records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepinfer.engine.options import EngineOptions
from deepinfer.engine.outputs import CompletionOutput, EngineStats, RequestOutput
from deepinfer.model.config import ModelConfig
from deepinfer.sampling.params import SamplingParams
from deepinfer.sim.truth import History
from deepinfer.sim.wishes import Foreteller, Wishes


class Observation(NamedTuple):
    """What one record showed: new tokens that were compared, and what was wrong."""

    tokens: int
    problems: list[str]


@dataclass(slots=True)
class WitnessedRequest:
    """One living request as the simulation knows it.

    Attributes:
        prompt: its prompt; of a fork, its parent's history.
        wishes: what it asked for.
        truths: one history per answer, extended by the tokens that were seen.
        outputs: tokens seen per answer.
        is_aborted: it was aborted from outside.
        is_failed: a step that it was in has failed.
    """

    prompt: list[int]
    wishes: Wishes
    truths: list[History]
    outputs: list[list[int]]
    is_aborted: bool = False
    is_failed: bool = False

    @property
    def params(self) -> SamplingParams:
        """Its parameters."""
        return self.wishes.params

    @property
    def work_tokens(self) -> int:
        """Positions that it may have to compute."""
        return (len(self.prompt) + self.params.max_tokens) * self.params.n

    @property
    def can_be_forked(self) -> bool:
        """Whether the engine would take a fork of it; one with a form may still wait for that."""
        has_begun = self.params.structured_outputs is None or bool(self.outputs[0])
        return self.params.n == 1 and has_begun and not self.is_aborted and not self.is_failed


class Witness:
    """Knows what every record must say."""

    def __init__(
        self,
        foreteller: Foreteller,
        config: ModelConfig,
        options: EngineOptions,
        stats: EngineStats,
        *,
        knows_draws: bool = True,
    ) -> None:
        """Begin without requests; without ``knows_draws`` what is drawn from equal logits is anybody's guess."""
        self.living: dict[str, WitnessedRequest] = {}
        self._foreteller = foreteller
        self._knows_draws = knows_draws
        self._config = config
        self._options = options
        self._limit = stats.max_model_len
        self._pool_tokens = stats.usable_blocks * options.block_size

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        """Note a request that is about to be added."""
        truth = self._foreteller.empty_history()
        truth.extend(prompt)
        wishes = self._foreteller.learn(request_id, params)
        truths = [truth.copy() for _ in range(params.n)]
        self.living[request_id] = WitnessedRequest(list(prompt), wishes, truths, [[] for _ in truths])

    def may_fork(self, parent_id: str) -> bool:
        """Say whether a request could have a child now, and its history leaves room for one."""
        parent = self.living.get(parent_id)
        if parent is None or not parent.can_be_forked:
            return False
        return len(parent.prompt) + len(parent.outputs[0]) <= min(self._limit, self._pool_tokens)

    def fork(self, parent_id: str, child_id: str, params: SamplingParams) -> None:
        """Note a fork that is about to be made."""
        parent = self.living[parent_id]
        wishes = self._foreteller.learn(child_id, params)
        history = [*parent.prompt, *parent.outputs[0]]
        self.living[child_id] = WitnessedRequest(history, wishes, [parent.truths[0].copy()], [[]])

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
            tokens += self._compare_tokens(name, output.request_id, answer, problems)
            self._compare_ending(name, request, answer, problems)
        if output.finished:
            unended = [answer.index for answer in output.outputs if answer.finish_reason is None]
            if unended:
                problems.append(f"request {output.request_id} is finished, but answers {unended} have no reason")
            del self.living[output.request_id]
        return Observation(tokens, problems)

    def _compare_tokens(self, name: str, request_id: str, answer: CompletionOutput, problems: list[str]) -> int:
        request = self.living[request_id]
        outputs, truth = request.outputs[answer.index], request.truths[answer.index]
        new = answer.token_ids[len(outputs) :]
        for token in new:
            place = len(request.prompt) + len(outputs)
            if outputs and outputs[-1] in request.wishes.ends:
                problems.append(f"{name}: token at position {place} follows its end")
                return 0
            expected = self._foreteller.next_token(f"{request_id}/{answer.index}", truth, outputs, place)
            if token != expected and not self._is_guess(request, truth, outputs, token):
                problems.append(f"{name}: token at position {place} is {token}, the oracle says {expected}")
                return 0
            truth.extend([token])
            outputs.append(token)
        return len(new)

    def _is_guess(self, request: WitnessedRequest, truth: History, outputs: Sequence[int], token: int) -> bool:
        """Return whether a token is as good as any: drawn from equal logits, nobody knows how."""
        if self._knows_draws or request.params.temperature == 0:
            return False
        allowed_V = request.wishes.choices(outputs)
        return bool(allowed_V[token]) and not allowed_V[truth.next_token()]

    def _compare_ending(
        self, name: str, request: WitnessedRequest, answer: CompletionOutput, problems: list[str]
    ) -> None:
        wishes, outputs, emitted = request.wishes, answer.token_ids, len(answer.token_ids)
        length = len(request.prompt) + emitted
        is_stuck = answer.finish_reason is not None and not wishes.choices(outputs).any()
        is_justified = {
            None: True,
            "stop": (bool(emitted) and outputs[-1] in wishes.ends) or (is_stuck and wishes.stands_at_an_end(outputs)),
            "length": emitted == request.params.max_tokens or length == self._limit + 1,
            "abort": request.is_aborted or request.is_failed,
            "grammar_failed": wishes.cannot_begin or (is_stuck and not wishes.stands_at_an_end(outputs)),
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
