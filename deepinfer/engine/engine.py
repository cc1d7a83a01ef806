"""The engine: requests in, one step at a time, records out. One engine is one rank with its own memory."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from deepinfer.accelerator import Plan, Stream
from deepinfer.engine.admission import AdmissionRules, Submission, fork_problems, parent_problems, read_mask, spans_of
from deepinfer.engine.answers import Answer, Request, sequence_ids
from deepinfer.engine.forms import WaitingForms, compiler_of
from deepinfer.engine.memory import PoolPlan
from deepinfer.engine.options import EngineOptions
from deepinfer.engine.outputs import EngineStats, RequestOutput, StepRecord, StepTimes
from deepinfer.engine.pipeline import Pipeline
from deepinfer.engine.request_table import RequestTable
from deepinfer.engine.runs import asked_runs, taken_runs
from deepinfer.engine.worker import LogitsRequest, RowExtras, Worker
from deepinfer.errors import ArgumentError, RankFailedError
from deepinfer.model.config import ModelConfig
from deepinfer.parallel.ranks.groups import RankGroups
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.prompt import PromptLogProbabilities
from deepinfer.sampling.streams import random_seed
from deepinfer.sampling.verification import VerifiedRun
from deepinfer.scheduling.config import SchedulerConfig
from deepinfer.scheduling.scheduler import Scheduler
from deepinfer.scheduling.sequence import Sequence as ScheduledSequence
from deepinfer.scheduling.states import Status
from deepinfer.scheduling.step import ScheduledStep
from deepinfer.scheduling.table import NO_TOKEN
from deepinfer.tokenizer import Tokenizer

_LONGEST_WAIT_S = 0.05  # for a form, when nothing else is to be done
_LOGITS_PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, seed=0)


class Engine:
    """A step loop over one scheduler and one worker. Build it with :func:`deepinfer.engine.build.build_engine`.

    No call leaves the engine unusable, however it ends. A driver's fault ends the requests of its step. A call that is
    cut off between two changes that belong together (Ctrl-C can strike anywhere) ends every request: the next call
    finds the mark, gives up the scheduler whose books nobody can trust, and starts with a fresh one.

    Calls come from one thread at a time.

    Attributes:
        config: the model.
        options: the engine's options.
        plan: who computes each op.
        tokenizer: None when the checkpoint has none; then prompts are ids and texts stay empty.
        rules: what is refused.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: EngineOptions,
        pools: PoolPlan,
        scheduler_config: SchedulerConfig,
        worker: Worker,
        plan: Plan,
        tokenizer: Tokenizer | None,
        stream: Stream | None = None,
        ranks: RankGroups | None = None,
    ) -> None:
        """Put an engine together; ``stream`` is for asynchronous scheduling, ``ranks`` for steps with other engines."""
        self.config = config
        self.options = options
        self.plan = plan
        self.tokenizer = tokenizer
        self._pools = pools
        self._worker = worker
        self._scheduler_config = scheduler_config
        self._ranks = ranks
        self._scheduler = self._new_scheduler()
        self.rules = AdmissionRules(
            config,
            pools.max_model_len,
            has_tokenizer=tokenizer is not None,
            makes_one_token=options.engine_type == "prompt",
            leaves_rows_out=options.is_prefill_truncated,
        )
        self._table = RequestTable()
        self._forms = WaitingForms(partial(compiler_of, tokenizer, config), [config.eos_token_id])
        self._seeds = random.Random(options.seed)
        self._last_step: ScheduledStep | None = None
        self._steps = 0
        self._emitted_tokens = 0
        self._drafted_tokens = 0
        self._accepted_tokens = 0
        self._preemptions = 0
        self._is_torn = self._is_launched = False
        self._pipeline = None if stream is None else Pipeline(stream, worker.lengths)
        self._called_s = self._computed_s = 0.0

    @property
    def worker(self) -> Worker:
        """The worker, whose pools tests may poison."""
        return self._worker

    @property
    def times(self) -> StepTimes:
        """What the steps cost so far."""
        if self._pipeline is None:
            return StepTimes(self._called_s, self._computed_s, self._computed_s)
        return self._pipeline.times(self._called_s)

    @property
    def last_step(self) -> StepRecord:
        """What the last call of :meth:`step` ran, launched for the next call to read, or saw fail."""
        return StepRecord("empty", ()) if self._last_step is None else StepRecord.of(self._last_step)

    # --- requests -----------------------------------------------------------------------------------------------

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
            request_id: unique among living requests; the id of one whose terminal record came may be used again.
            prompt_token_ids: the prompt.
            params: how to sample; None means the defaults.
            prompt: the prompt's text, for the record only.
            image_spans: (start, stop) positions that hold images.
            embeddings: float [len(prompt), hidden]; rows at image positions replace the embedding of their id.

        Raises:
            DuplicateRequestError: the id, or one of its siblings' ids, is alive.
            TypeError: listing every argument of a wrong type. Every other refusal is the request's own record.
        """
        submission = Submission.read(
            request_id, prompt_token_ids, params, prompt=prompt, image_spans=image_spans, embeddings=embeddings
        )
        self._admit(submission)

    def fork_request(self, parent_id: str, child_id: str, params: SamplingParams | None = None) -> None:
        """Start a request that continues from all that its parent holds, prompt and outputs.

        The child's prompt is the parent's whole history. Its outputs, and with them ``max_tokens``, penalties and text,
        count from there; its first token has the index that the parent's next token has.

        Raises:
            ArgumentError: the parent is unknown, has ended, or has siblings; or the parameters are refused.
            DuplicateRequestError: the child's id is alive.
            TypeError: listing every argument of a wrong type.
        """
        self._repair()
        parent = self._table.find(parent_id)
        siblings, is_alive = 0 if parent is None else len(parent.answers), self._scheduler.find(parent_id) is not None
        problems = parent_problems(parent_id, siblings, is_held=parent_id in self._forms, is_alive=is_alive)
        history = () if parent is None or problems else parent.history
        submission = Submission.read(child_id, history, params)
        problems += fork_problems(submission.params)
        problems += self.rules.refusals(submission) if history else submission.params.problems(self.config.vocab_size)
        if parent is None or problems:
            raise ArgumentError(f"fork of {parent_id!r}", problems)
        self._table.refuse_duplicates([child_id])
        request = self._new_request(submission, RowExtras(embeddings_PD=parent.extras.embeddings_PD))
        (answer,) = request.answers
        with self._changing():
            self._table.add(request)
            self._scheduler.fork(parent_id, answer.sequence_id, answer.stop_rules)

    def abort_request(self, request_id: str) -> bool:
        """End a request, siblings included, in whatever state it is; False if it is unknown or has ended.

        Its memory is free at once, or after the step in flight; its record, ``abort``, comes from the next step.
        """
        self._repair()
        request = self._table.find(request_id)
        if request is None:
            return False
        with self._changing():
            if request_id in self._forms:
                self._end_unscheduled(request, Status.FINISHED_ABORTED, "")
                return True
            ended = [self._scheduler.abort(answer.sequence_id) for answer in request.living()]
        return any(ended)

    def discard_requests(self, request_ids: Iterable[str]) -> None:
        """Abort requests and drop their records, so that nothing of them is left; unknown ids are passed over."""
        self._repair()
        requests = [request for request_id in request_ids if (request := self._table.find(request_id)) is not None]
        with self._changing():
            self._forms.forget(request.request_id for request in requests)
            for request in requests:
                for answer in request.living():
                    self._scheduler.abort(answer.sequence_id)
            self._collect_terminals()
            self._table.discard(requests)
            if not self.has_unfinished_requests():
                self._settle()

    def has_unfinished_requests(self) -> bool:
        """Return True while a terminal record is still to come."""
        return len(self._table) > 0

    # --- steps --------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step and return the records of every request that grew or ended, in the order of their admission.

        With asynchronous scheduling the records are those of the step before (docs/async-scheduling.md).

        When the driver's part of the step raises (a fault, Ctrl-C while it computes), the exception passes through,
        every request of the step ends with reason ``abort`` and a message, and their records come from the next call.
        Requests that were not in the step go on. An op sees all rows of a step at once, so its fault belongs to no
        single request; what does (logits that are NaN, a row with every token masked) ends that request alone.
        """
        self._repair()
        begun = time.perf_counter()
        self._is_torn = True
        self._schedule_prepared()
        self._collect_terminals()
        if self._pipeline is None:
            self._step_alone()
        else:
            self._step_ahead(self._pipeline)
        self._collect_terminals()
        records = self._table.take_records()
        self._is_torn = False
        self._called_s += time.perf_counter() - begun
        return records

    def compute_logits(
        self, request_id: str, ids: Sequence[int], image_mask: Sequence[bool] | None = None
    ) -> torch.Tensor:
        """Return float32 logits [len(ids), vocab], through chunked prefill and the caches.

        Args:
            request_id: an id that is not alive, for the time of the call.
            ids: token ids.
            image_mask: true where a position lies in an image span; runs of true positions are spans.

        Raises:
            ArgumentError: with every reason; one is that others are unfinished, whose records would have no reader.
            TypeError: listing every argument of a wrong type.
        """
        mask = None if image_mask is None else read_mask(image_mask)
        submission = Submission.read(request_id, ids, _LOGITS_PARAMS, image_spans=spans_of(mask or ()))
        num_ids = len(submission.prompt_token_ids)
        problems = [*self.rules.refusals(submission), *self.rules.logits_problems(num_ids, mask)]
        if self.has_unfinished_requests():
            problems.append(f"{len(self._table)} requests are unfinished; run step() until they end, or abort them")
        if problems:
            raise ArgumentError("logits", problems)
        collected = LogitsRequest([])
        records: list[RequestOutput] = []
        try:
            self._admit(submission, collected)
            while self.has_unfinished_requests():
                records += self.step()
        finally:
            self.discard_requests([request_id])
        if collected.collected < num_ids:
            answer = records[-1].outputs[0]
            raise ArgumentError("logits", [answer.message or f"the request ended with {answer.finish_reason!r}"])
        return torch.cat(collected.rows)

    def close(self) -> None:
        """End the processes and threads that the engine started; requests that wait for a form are aborted."""
        self._repair()
        for request_id in self._forms.request_ids:
            self.abort_request(request_id)
        self._forms.close()
        if self._pipeline is not None:
            self._pipeline.close()

    # --- what can be seen ---------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise InvariantError if the scheduler, the memory or the request tables contradict each other."""
        self._repair()
        self._scheduler.check_invariants()
        with self._changing():
            self._collect_terminals()
        scheduled = [sequence.request_id for sequence in self._scheduler.roster]
        self._table.check_invariants([*scheduled, *self._forms.sequence_ids])

    def stats(self) -> EngineStats:
        """Return counts of the engine as it stands."""
        self._repair()
        counts = self._worker.counts()
        living = [self._scheduler.find(sequence_id) for sequence_id in self._table.living_ids]
        return EngineStats(
            free_blocks=self._scheduler.free_blocks,
            free_state_slots=self._scheduler.free_state_slots,
            num_waiting=self._scheduler.num_waiting + len(self._forms.sequence_ids),
            num_running=self._scheduler.num_running,
            num_unfinished=self._table.num_unfinished,
            usable_blocks=self._pools.num_blocks - 1,
            usable_state_slots=self._pools.num_state_slots - 1,
            max_model_len=self._pools.max_model_len,
            longest_request=self._pools.longest_request,
            steps=self._steps,
            emitted_tokens=self._emitted_tokens,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
            preemptions=self._preemptions + sum(sequence.preemptions for sequence in living if sequence is not None),
            replayed_steps=counts.replayed_steps,
            verified_by_place=counts.verified_by_place,
            accepted_by_place=counts.accepted_by_place,
            confidence_error=counts.confidence_error,
            chance_ranges=counts.chance_ranges,
        )

    # ------------------------------------------------------------------------------------------------------------

    def _admit(self, submission: Submission, logits: LogitsRequest | None = None) -> None:
        self._repair()
        request_id, ids, params = submission.request_id, submission.prompt_token_ids, submission.params
        refusals = self.rules.refusals(submission)
        self._table.refuse_duplicates([request_id] if refusals else [request_id, *sequence_ids(request_id, params.n)])
        if refusals:
            request = Request(submission, (), RowExtras(), refusal="; ".join(refusals))
        else:
            listed = None if params.prompt_logprobs is None else PromptLogProbabilities(ids, params.prompt_logprobs)
            request = self._new_request(submission, RowExtras(submission.embeddings_PD, listed, logits))
        sequences = [
            ScheduledSequence(answer.sequence_id, ids, answer.stop_rules, image_spans=submission.image_spans)
            for answer in request.answers
        ]
        with self._changing():
            self._table.add(request)
            if sequences and params.structured_outputs is not None:
                self._forms.hold(request, sequences, params.structured_outputs)
                return
            for sequence in sequences:
                self._scheduler.add(sequence)

    def _schedule_prepared(self) -> None:
        """Hand the requests whose form is compiled to the scheduler; end those whose form cannot be."""
        for request, sequences, problem in self._forms.take_prepared():
            if problem:
                self._end_unscheduled(request, Status.FINISHED_GRAMMAR_FAILED, problem)
            else:
                for sequence in sequences:
                    self._scheduler.add(sequence)

    def _end_unscheduled(self, request: Request, status: Status, text: str) -> None:
        self._forms.forget([request.request_id])
        self._table.finish([answer.end_unscheduled(status, text) for answer in request.living()])

    def _new_request(self, submission: Submission, extras: RowExtras) -> Request:
        asked = submission.params.seed
        seed = asked if asked is not None else random_seed(self._seeds)
        return Request.create(submission, extras, seed=seed, config=self.config, tokenizer=self.tokenizer)

    def _step_alone(self) -> None:
        """Plan a step, run it and commit it."""
        step = self._last_step = self._scheduler.schedule()
        self._steps += 1
        if step.kind == "empty":  # it carries no copies either
            self._stand_by()
            return
        answers = self._answers(step)
        with self._computing(step):
            begun = time.perf_counter()
            self._worker.copy(step)
            drafts = self._worker.drafts(step)
            asked = asked_runs(step, answers, drafts, (step.cached_R + 1).tolist(), (~step.is_partial_R).tolist())
            self._drafted_tokens += asked.drafted_tokens
            runs = self._worker.run(step, asked.requests, [each.extras for each in answers])
            self._computed_s += time.perf_counter() - begun
        self._commit(step, answers, runs)

    def _step_ahead(self, pipeline: Pipeline) -> None:
        """Plan a step and launch its layers, read and commit the step before it, launch its sampling.

        A prompt step is read at once, and so is a step that nobody waits for: its memory goes back.
        """
        step = self._last_step = self._scheduler.schedule(self._settle)
        self._steps += 1
        if step.kind == "empty":
            if not self._settle() or self._ranks is not None:
                self._stand_by()
            return
        answers = self._answers(step)
        with self._computing(step):
            flight = pipeline.launch(self._worker, step, answers)
        while pipeline.oldest is not flight:
            self._settle()
        if self._scheduler.current_rows(step).any():
            lengths = self._scheduler.lengths(step)
            with self._computing(step):
                drafts = pipeline.drafts(flight, lengths)
                asked = asked_runs(step, answers, drafts, lengths, self._scheduler.due_rows(step).tolist())
                self._drafted_tokens += asked.drafted_tokens
                pipeline.judge(self._worker, flight, asked.requests)
        if step.kind == "prefill" or not self._scheduler.has_unfinished():
            self._settle()

    def _stand_by(self) -> None:
        """Spend a step without rows: wait for a form, or take part in the step of the other ranks."""
        if self._ranks is None:
            self._forms.wait(_LONGEST_WAIT_S)
        else:
            self._worker.stand_by()

    def _settle(self) -> bool:
        """Wait for the oldest step in flight and commit it; False if there is none."""
        pipeline = self._pipeline
        if pipeline is None or pipeline.oldest is None:
            return False
        with self._computing(pipeline.oldest.step):
            flight, runs = pipeline.read()
        self._commit(flight.step, flight.answers, runs)
        return True

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self._scheduler_config, self._ranks.votes if self._ranks else None, self._worker.lengths)

    def _answers(self, step: ScheduledStep) -> list[Answer]:
        return [self._table.answer(sequence.request_id) for sequence in step.sequences]

    def _commit(self, step: ScheduledStep, answers: Sequence[Answer], runs: Sequence[VerifiedRun]) -> None:
        # Somebody may have ended while the step ran; the result of an unfinished chunk is thrown away.
        is_due = self._scheduler.due_rows(step).tolist()
        max_model_len = self._scheduler_config.max_model_len
        emitted, failures, accepted = taken_runs(step, answers, runs, is_due, max_model_len)
        self._accepted_tokens += accepted
        if self._scheduler_config.num_speculative_tokens:
            self._scheduler.commit_runs(step, emitted, failures)
        else:
            self._scheduler.commit(step, [taken[-1] if taken else NO_TOKEN for taken in emitted], failures)
        for answer, taken in zip(answers, emitted, strict=True):
            if not taken:
                continue
            self._emitted_tokens += len(taken)
            self._table.note_growth(answer)
            if answer.form_failure:
                self._scheduler.finish(answer.sequence_id, Status.FINISHED_GRAMMAR_FAILED, text=answer.form_failure)
            elif answer.found_stop is not None:
                self._scheduler.finish(answer.sequence_id, Status.FINISHED_STOPPED, answer.found_stop)

    def _give_up(self, steps: Sequence[ScheduledStep], text: str) -> None:
        """End the requests of the first of these steps; what else they carried, forks' copies too, is computed anew."""
        self._last_step = steps[0]
        for sequence in steps[0].sequences:
            if self._scheduler.find(sequence.request_id) is sequence:  # not a newer request of the same id
                self._scheduler.finish(sequence.request_id, Status.FINISHED_ABORTED, text=text)
        for step in steps:
            self._scheduler.cancel(step)

    @contextmanager
    def _computing(self, step: ScheduledStep) -> Iterator[None]:
        """Give up a step whose part on the device raises, and those behind it, which would have read its results.

        While the device computes, calls that come from inside find the books in order.
        """
        self._is_launched = True
        try:
            yield
        except BaseException as error:
            lost = [step] if self._pipeline is None else self._pipeline.give_up(step)
            self._give_up(lost, f"the step failed: {type(error).__name__}: {error}")
            self._is_torn = False
            raise
        finally:
            self._is_launched = False

    def _collect_terminals(self) -> None:
        terminals = self._scheduler.take_terminals()
        self._preemptions += sum(terminal.preemptions for terminal in terminals)
        self._table.finish(terminals)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Mark the books as torn unless the block comes to its end."""
        before, self._is_torn = self._is_torn, True
        yield
        self._is_torn = before

    def _repair(self) -> None:
        """End every request and begin with a fresh scheduler if an earlier call was cut off half-way."""
        # While a step computes its mark is set, and calls that come from inside find the books in order.
        if self._is_torn and not self._is_launched:
            if self._ranks is not None:  # a fresh scheduler would vote otherwise than those of the other ranks
                raise RankFailedError([self._ranks.rank], "a call was cut off while it kept its books")
            self._table.abort_all("the engine was interrupted while it kept its books; every request was given up")
            self._forms.clear()
            if self._pipeline is not None:
                self._pipeline.abandon()
            self._scheduler = self._new_scheduler()
            self._worker.forget()
            self._is_torn = False
