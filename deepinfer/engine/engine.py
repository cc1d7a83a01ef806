"""The engine: requests in, one step at a time, records out. One engine is one rank with its own memory."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import torch

from deepinfer.accelerator import Plan
from deepinfer.accelerator.ops.sampling import RowStatus
from deepinfer.engine.admission import checked_token_ids, image_refusals, refusals, spans_of
from deepinfer.engine.answers import Answer, Request
from deepinfer.engine.memory import PoolPlan
from deepinfer.engine.options import EngineOptions
from deepinfer.engine.outputs import EngineStats, RequestOutput, RowRecord, StepRecord
from deepinfer.engine.worker import NO_EXTRAS, LogitsRequest, RowExtras, Worker
from deepinfer.errors import ArgumentError, DuplicateRequestError, InvariantError
from deepinfer.model.config import ModelConfig
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.prompt import PromptLogProbabilities
from deepinfer.sampling.rows import RowRequest
from deepinfer.sampling.sampler import SampledRow
from deepinfer.sampling.streams import random_seed
from deepinfer.scheduling.commit import RowFailure
from deepinfer.scheduling.config import EngineType, SchedulerConfig
from deepinfer.scheduling.scheduler import Scheduler
from deepinfer.scheduling.sequence import Sequence as ScheduledSequence
from deepinfer.scheduling.states import Status
from deepinfer.scheduling.step import ScheduledStep, TerminalRecord
from deepinfer.tokenizer import Tokenizer

_FAILURES = {
    RowStatus.NAN: "the model's logits hold NaN or +inf; no token can be chosen",
    RowStatus.EMPTY: "every token is masked; no token can be chosen",
}


class Engine:
    """A step loop over one scheduler and one worker. Build it with :func:`deepinfer.engine.build.build_engine`.

    Attributes:
        config: the model.
        options: the engine's options.
        plan: who computes each op.
        tokenizer: None when the checkpoint has none; then prompts are ids and texts stay empty.
        last_step: what the last call of :meth:`step` ran.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: EngineOptions,
        pools: PoolPlan,
        worker: Worker,
        plan: Plan,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.config = config
        self.options = options
        self.plan = plan
        self.tokenizer = tokenizer
        self.last_step = StepRecord("empty", ())
        self._pools = pools
        self._worker = worker
        self._scheduler = Scheduler(_scheduler_config(config, options, pools))
        self._requests: dict[str, Request] = {}
        self._answers: dict[str, Answer] = {}
        self._refused: list[Request] = []
        self._logits: dict[str, LogitsRequest] = {}
        self._seeds = random.Random(options.seed)
        self._steps = 0
        self._emitted_tokens = 0
        self._preemptions = 0

    @property
    def worker(self) -> Worker:
        """The worker, whose pools tests may poison."""
        return self._worker

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        prompt: str | None = None,
        image_spans: Sequence[tuple[int, int]] = (),
        embeddings: torch.Tensor | None = None,
    ) -> None:
        """Queue a request. It ends in exactly one terminal record of :meth:`step`.

        Args:
            request_id: unique among living requests; the id of one that has ended may be used again.
            prompt_token_ids: the prompt.
            params: how to sample; None means the defaults.
            prompt: the prompt's text, for the record only.
            image_spans: (start, stop) positions that hold images.
            embeddings: float [len(prompt), hidden]; rows at image positions replace the embedding of their id.

        Raises:
            DuplicateRequestError: the id, or one of its siblings' ids, is alive.
            TypeError: listing every argument of a wrong type. Every other refusal is the request's own record.
        """
        params = params if params is not None else SamplingParams()
        ids = checked_token_ids(request_id, prompt_token_ids, params)
        problems = refusals(
            ids, params, self.config, self._pools.max_model_len, has_tokenizer=self.tokenizer is not None
        )
        problems += image_refusals(image_spans, embeddings, len(ids), self.config.hidden_size)
        if problems:
            self._refuse_duplicates([request_id])
            refused = Request.refused(request_id, prompt, ids, params, "; ".join(problems))
            self._requests[request_id] = refused
            self._refused.append(refused)
            return
        seed = params.seed if params.seed is not None else random_seed(self._seeds)
        request = Request.create(
            request_id, prompt, ids, params, seed=seed, config=self.config, tokenizer=self.tokenizer
        )
        self._refuse_duplicates([request_id, *(answer.sequence_id for answer in request.answers)])
        self._requests[request_id] = request
        if params.prompt_logprobs is not None:
            request.prompt_log_probabilities = PromptLogProbabilities(ids, params.prompt_logprobs)
        request.embeddings_PD = embeddings
        for answer in request.answers:
            self._answers[answer.sequence_id] = answer
            self._scheduler.add(
                ScheduledSequence(answer.sequence_id, ids, answer.stop_rules, image_spans=image_spans)
            )

    def abort_request(self, request_id: str) -> bool:
        """End a request in whatever state it is; return False if it is unknown or has ended.

        Its terminal record, reason ``abort``, comes from the next :meth:`step`.
        """
        request = self._requests.get(request_id)
        if request is None or request.is_refused:
            return False
        alive = [answer for answer in request.answers if not answer.is_finished]
        return any([self._scheduler.abort(answer.sequence_id) for answer in alive])

    def fork_request(self, parent_id: str, child_id: str, params: SamplingParams | None = None) -> None:
        """Start a request that continues from all that its parent holds, prompt and outputs.

        The child's prompt is the parent's whole history; it counts its own outputs from there.

        Raises:
            ArgumentError: the parent is unknown, has ended, or has several siblings; or the parameters are refused.
            DuplicateRequestError: the child's id is alive.
        """
        params = params if params is not None else SamplingParams()
        parent = self._requests.get(parent_id)
        problems = []
        if parent is None or parent.is_refused or parent.is_finished:
            problems.append(f"there is no living request {parent_id!r} to fork")
        elif len(parent.answers) != 1:
            problems.append(f"request {parent_id!r} has n={len(parent.answers)} siblings; fork a request with n=1")
        if params.n != 1 or params.prompt_logprobs is not None:
            problems.append("a fork takes n=1 and no prompt_logprobs")
        problems += params.problems(self.config.vocab_size)
        if problems or parent is None:
            raise ArgumentError(f"fork of {parent_id!r}", problems)
        history = (*parent.prompt_token_ids, *parent.answers[0].token_ids)
        seed = params.seed if params.seed is not None else random_seed(self._seeds)
        checked_token_ids(child_id, history, params)
        self._refuse_duplicates([child_id])
        request = Request.create(
            child_id, None, history, params, seed=seed, config=self.config, tokenizer=self.tokenizer
        )
        (answer,) = request.answers
        self._scheduler.fork(parent_id, answer.sequence_id, answer.stop_rules)
        request.embeddings_PD = parent.embeddings_PD
        self._requests[child_id] = request
        self._answers[answer.sequence_id] = answer

    def has_unfinished_requests(self) -> bool:
        """Return True while a terminal record is still to come."""
        return bool(self._requests)

    def step(self) -> list[RequestOutput]:
        """Run one step and return the records of every request that grew or ended, in the order of their admission.

        When the step raises (a driver's fault, Ctrl-C), every request of that step ends with reason ``abort``, its
        record comes from the next call, and the engine stays usable.
        """
        step = self._scheduler.schedule()
        self._steps += 1
        self.last_step = _step_record(step)
        changed: dict[str, None] = {}
        sampled = self._run(step)
        if sampled:
            self._commit(step, sampled, changed)
        self._finish(self._scheduler.take_terminals(), changed)
        for request in self._refused:
            changed[request.request_id] = None
        self._refused.clear()
        return self._records(changed)

    def compute_logits(
        self, request_id: str, ids: Sequence[int], image_mask: Sequence[bool] | None = None
    ) -> torch.Tensor:
        """Return float32 logits [len(ids), vocab], through chunked prefill and the caches.

        Raises:
            ArgumentError: the ids, or the mask, are refused, the request could not be computed, or others are
                unfinished, whose records would have no reader.
        """
        mask = list(image_mask) if image_mask is not None else []
        problems = []
        if mask and len(mask) != len(ids):
            problems.append(f"image_mask has {len(mask)} flags for {len(ids)} ids")
        if self.has_unfinished_requests():
            problems.append(f"{len(self._requests)} requests are unfinished; run step() until they end, or abort them")
        if problems:
            raise ArgumentError("logits", problems)
        collected = LogitsRequest([])
        self.add_request(
            request_id, ids, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), image_spans=spans_of(mask)
        )
        self._logits[request_id] = collected
        try:
            outputs: list[RequestOutput] = []
            while self.has_unfinished_requests():
                outputs = self.step()
            if collected.collected < len(ids):
                (answer,) = outputs[-1].outputs
                raise ArgumentError("logits", [answer.message or f"the request ended with {answer.finish_reason!r}"])
        finally:
            del self._logits[request_id]
            self.discard_requests([request_id])
        return torch.cat(collected.rows)

    def discard_requests(self, request_ids: Iterable[str]) -> None:
        """Abort requests and drop their records, so that nothing of them is left; unknown ids are passed over."""
        wanted = [request_id for request_id in request_ids if request_id in self._requests]
        for request_id in wanted:
            self.abort_request(request_id)
        self._refused = [request for request in self._refused if request.request_id not in wanted]
        self._finish(self._scheduler.take_terminals(), {})
        for request_id in wanted:
            for answer in self._requests.pop(request_id).answers:
                self._answers.pop(answer.sequence_id, None)

    def check_invariants(self) -> None:
        """Raise InvariantError if the scheduler, the memory or the request tables contradict each other."""
        self._scheduler.check_invariants()
        living = {answer.sequence_id for request in self._requests.values() for answer in request.living()}
        if living != {sequence_id for sequence_id, answer in self._answers.items() if not answer.is_finished}:
            raise InvariantError("the engine's answers and its requests name different living sequences")

    def stats(self) -> EngineStats:
        """Return counts of the engine as it stands."""
        return EngineStats(
            free_blocks=self._scheduler.free_blocks,
            free_state_slots=self._scheduler.free_state_slots,
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            num_unfinished=sum(max(1, len(request.living())) for request in self._requests.values()),
            usable_blocks=self._pools.num_blocks - 1,
            usable_state_slots=self._pools.num_state_slots - 1,
            max_model_len=self._pools.max_model_len,
            steps=self._steps,
            emitted_tokens=self._emitted_tokens,
            preemptions=self._preemptions + sum(sequence.preemptions for sequence in self._living_sequences()),
        )

    def _living_sequences(self) -> list[ScheduledSequence]:
        found = [self._scheduler.find(sequence_id) for sequence_id in self._answers]
        return [sequence for sequence in found if sequence is not None]

    def _refuse_duplicates(self, ids: Sequence[str]) -> None:
        for identifier in ids:
            if identifier in self._requests or identifier in self._answers:
                raise DuplicateRequestError(
                    f"request id {identifier!r} is alive; wait for its terminal record, abort it, or use another id"
                )

    def _run(self, step: ScheduledStep) -> list[SampledRow]:
        answers = [self._answers[sequence.request_id] for sequence in step.sequences]
        rows = [
            RowRequest(answer.sampling, k, answer.token_ids)
            for answer, k in zip(answers, step.k_R.tolist(), strict=True)
        ]
        try:
            self._worker.copy(step)
            if not rows:
                return []
            return self._worker.run(step, rows, [self._extras(answer) for answer in answers])
        except BaseException as error:
            text = f"the step failed: {type(error).__name__}: {error}"
            failures = dict.fromkeys(range(step.num_requests), RowFailure(Status.FINISHED_ABORTED, text))
            self._scheduler.commit(step, step.table_row_R * 0, failures)
            raise

    def _extras(self, answer: Answer) -> RowExtras:
        request = self._requests[answer.request_id]
        first = answer.index == 0
        logits = self._logits.get(request.request_id)
        listed = request.prompt_log_probabilities if first else None
        if logits is None and listed is None and request.embeddings_PD is None:
            return NO_EXTRAS
        return RowExtras(request.embeddings_PD, listed, logits)

    def _commit(self, step: ScheduledStep, sampled: Sequence[SampledRow], changed: dict[str, None]) -> None:
        failures = {
            number: RowFailure(Status.FINISHED_INVALID, _FAILURES[row.status])
            for number, row in enumerate(sampled)
            if row.status != RowStatus.OK and not step.is_partial_R[number]
        }
        tokens_R = step.table_row_R.copy()
        tokens_R[:] = [row.token_id for row in sampled]
        commit = self._scheduler.commit(step, tokens_R, failures)
        stopped = {end.request_id for end in commit.terminals if end.status is Status.FINISHED_STOPPED}
        for number in commit.is_emitted_R.nonzero()[0].tolist():
            answer = self._answers[step.sequences[number].request_id]
            row = sampled[number]
            answer.append(row.token_id, row.log_probabilities, ended_by_token=answer.sequence_id in stopped)
            self._emitted_tokens += 1
            changed[answer.request_id] = None
            if answer.found_stop is not None:
                self._scheduler.finish(answer.sequence_id, Status.FINISHED_STOPPED, answer.found_stop)

    def _finish(self, terminals: Iterable[TerminalRecord], changed: dict[str, None]) -> None:
        for terminal in terminals:
            self._preemptions += terminal.preemptions
            answer = self._answers.pop(terminal.request_id)
            answer.finish(terminal)
            changed[answer.request_id] = None

    def _records(self, changed: Iterable[str]) -> list[RequestOutput]:
        records = []
        for request_id in changed:
            request = self._requests[request_id]
            records.append(request.output())
            if request.is_finished:
                del self._requests[request_id]
        return records


def _scheduler_config(config: ModelConfig, options: EngineOptions, pools: PoolPlan) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=pools.num_blocks,
        num_state_slots=pools.num_state_slots,
        max_model_len=pools.max_model_len,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_prefill_history_tokens=options.max_prefill_history_tokens,
        engine_type=EngineType(options.engine_type),
        enable_chunked_prefill=options.enable_chunked_prefill,
        stop_preempted_requests=options.stop_preempted_requests,
        prefill_attempt_interval=options.prefill_attempt_interval,
        prefill_any_attempt_interval=options.prefill_any_attempt_interval,
        history_tokens=max(config.engram_max_ngram_size - 1, 0),
        num_speculative_tokens=options.num_speculative_tokens,
    )


def _step_record(step: ScheduledStep) -> StepRecord:
    rows = tuple(
        RowRecord(
            request_id=sequence.request_id,
            cached=int(cached),
            q=int(q),
            k=int(k),
            block_table=tuple(sequence.block_table.tolist()),
            state_slot=int(slot),
        )
        for sequence, cached, q, k, slot in zip(
            step.sequences, step.cached_R, step.q_R, step.k_R, step.state_slot_R, strict=True
        )
    )
    return StepRecord(step.kind, rows)
