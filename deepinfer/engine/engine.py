"""The engine: requests in, one step at a time, records out. One engine is one rank with its own memory."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from functools import partial

import torch

from deepinfer.accelerator import Plan, Stream
from deepinfer.engine.admission import AdmissionRules, Submission, fork_problems, parent_problems, read_mask, spans_of
from deepinfer.engine.answers import Request, sequence_ids
from deepinfer.engine.books import Books
from deepinfer.engine.forms import CompilerMaker, WaitingForms, compiler_of
from deepinfer.engine.memory import PoolPlan
from deepinfer.engine.options import EngineOptions
from deepinfer.engine.outputs import EngineStats, RequestOutput, StepRecord, StepTimes
from deepinfer.engine.pipeline import Pipeline
from deepinfer.engine.step_loop import StepLoop
from deepinfer.engine.worker import LogitsRequest, RowExtras, Worker
from deepinfer.errors import ArgumentError
from deepinfer.model.config import ModelConfig
from deepinfer.parallel.ranks.groups import RankGroups
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.prompt import PromptLogProbabilities
from deepinfer.sampling.streams import random_seed
from deepinfer.scheduling.config import SchedulerConfig
from deepinfer.scheduling.scheduler import Scheduler
from deepinfer.scheduling.sequence import Sequence as ScheduledSequence
from deepinfer.tokenizer import Tokenizer

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
        make_compiler: CompilerMaker | None = None,
    ) -> None:
        """Put an engine together.

        ``stream`` is for asynchronous scheduling, ``ranks`` for steps with other engines, ``make_compiler`` for forms
        that are not xgrammar's over the tokenizer.
        """
        self.config = config
        self.options = options
        self.plan = plan
        self.tokenizer = tokenizer
        self.rules = AdmissionRules.of(
            config,
            options,
            pools.max_model_len,
            has_tokenizer=tokenizer is not None,
            has_compiler=make_compiler is not None,
        )
        votes = ranks.votes if ranks is not None else None
        forms = WaitingForms(make_compiler or partial(compiler_of, tokenizer, config), [config.eos_token_id])
        self._books = Books(lambda: Scheduler(scheduler_config, votes, worker.lengths), forms)
        pipeline = None if stream is None else Pipeline(stream, worker.lengths)
        self._loop = StepLoop(self._books, worker, pipeline, scheduler_config, ranks)
        self._pools = pools
        self._seeds = random.Random(options.seed)
        self._called_s = 0.0

    @property
    def worker(self) -> Worker:
        """The worker, whose pools tests may poison."""
        return self._loop.worker

    @property
    def times(self) -> StepTimes:
        """What the steps cost so far."""
        return self._loop.times(self._called_s)

    @property
    def last_step(self) -> StepRecord:
        """What the last call of :meth:`step` ran, launched for the next call to read, or saw fail."""
        step = self._loop.last_step
        return StepRecord("empty", ()) if step is None else StepRecord.of(step)

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
        self._loop.repair()
        books = self._books
        parent = books.table.find(parent_id)
        siblings, is_alive = 0 if parent is None else len(parent.answers), books.scheduler.find(parent_id) is not None
        problems = parent_problems(parent_id, siblings, is_held=parent_id in books.forms, is_alive=is_alive)
        history = () if parent is None or problems else parent.history
        submission = Submission.read(child_id, history, params)
        problems += fork_problems(submission.params)
        problems += self.rules.refusals(submission) if history else submission.params.problems(self.config.vocab_size)
        if parent is None or problems:
            raise ArgumentError(f"fork of {parent_id!r}", problems)
        books.table.refuse_duplicates([child_id])
        books.fork(parent_id, self._new_request(submission, RowExtras(embeddings_PD=parent.extras.embeddings_PD)))

    def abort_request(self, request_id: str) -> bool:
        """End a request, siblings included, in whatever state it is; False if it is unknown or has ended.

        Its memory is free at once, or after the step in flight; its record, ``abort``, comes from the next step.
        """
        self._loop.repair()
        request = self._books.table.find(request_id)
        return request is not None and self._books.abort(request)

    def discard_requests(self, request_ids: Iterable[str]) -> None:
        """Abort requests and drop their records, so that nothing of them is left; unknown ids are passed over."""
        self._loop.repair()
        found = [self._books.table.find(request_id) for request_id in request_ids]
        with self._books.changing():
            self._books.discard([request for request in found if request is not None])
            if not self.has_unfinished_requests():
                self._loop.settle()

    def has_unfinished_requests(self) -> bool:
        """Return True while a terminal record is still to come."""
        return len(self._books.table) > 0

    # --- steps --------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step and return the records of every request that grew or ended, in the order of their admission.

        With asynchronous scheduling the records are those of the step before (docs/async-scheduling.md).

        When the driver's part of the step raises (a fault, Ctrl-C while it computes), the exception passes through,
        every request of the step ends with reason ``abort`` and a message, and their records come from the next call.
        Requests that were not in the step go on. An op sees all rows of a step at once, so its fault belongs to no
        single request; what does (logits that are NaN, a row with every token masked) ends that request alone.
        """
        self._loop.repair()
        begun = time.perf_counter()
        with self._books.changing():
            self._books.schedule_prepared()
            self._books.collect_terminals()
            self._loop.advance()
            self._books.collect_terminals()
            records = self._books.table.take_records()
        self._called_s += time.perf_counter() - begun
        return records

    def give_up(self, text: str) -> list[RequestOutput]:
        """End every request and return their terminal records: the ranks that were to run the steps are lost.

        Call it only where no further step will be run. An answer that has ended says so; every other one has what it
        got so far, reason ``abort``, and ``text`` as its message.
        """
        self._loop.give_up(text)
        return self._books.table.take_records()

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
            problems.append(
                f"{len(self._books.table)} requests are unfinished; run step() until they end, or abort them"
            )
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
        self._loop.repair()
        for request_id in self._books.forms.request_ids:
            self.abort_request(request_id)
        self._books.forms.close()
        self._loop.close()

    # --- what can be seen ---------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise InvariantError if the scheduler, the memory or the request tables contradict each other."""
        self._loop.repair()
        self._books.check_invariants()

    def stats(self) -> EngineStats:
        """Return counts of the engine as it stands."""
        self._loop.repair()
        books, loop = self._books, self._loop
        scheduler, counts = books.scheduler, loop.worker.counts()
        return EngineStats(
            free_blocks=scheduler.free_blocks,
            free_state_slots=scheduler.free_state_slots,
            num_waiting=scheduler.num_waiting + len(books.forms.sequence_ids),
            num_running=scheduler.num_running,
            num_unfinished=books.table.num_unfinished,
            usable_blocks=self._pools.num_blocks - 1,
            usable_state_slots=self._pools.num_state_slots - 1,
            max_model_len=self._pools.max_model_len,
            longest_request=self._pools.longest_request,
            steps=loop.steps,
            emitted_tokens=loop.emitted_tokens,
            drafted_tokens=loop.drafted_tokens,
            accepted_tokens=loop.accepted_tokens,
            preemptions=books.all_preemptions(),
            replayed_steps=counts.replayed_steps,
            verified_by_place=counts.verified_by_place,
            accepted_by_place=counts.accepted_by_place,
            confidence_error=counts.confidence_error,
            chance_ranges=counts.chance_ranges,
        )

    # ------------------------------------------------------------------------------------------------------------

    def _admit(self, submission: Submission, logits: LogitsRequest | None = None) -> None:
        self._loop.repair()
        request_id, ids, params = submission.request_id, submission.prompt_token_ids, submission.params
        refusals, table = self.rules.refusals(submission), self._books.table
        table.refuse_duplicates([request_id] if refusals else [request_id, *sequence_ids(request_id, params.n)])
        if refusals:
            request = Request(submission, (), RowExtras(), refusal="; ".join(refusals))
        else:
            listed = None if params.prompt_logprobs is None else PromptLogProbabilities(ids, params.prompt_logprobs)
            request = self._new_request(submission, RowExtras(submission.embeddings_PD, listed, logits))
        sequences = [
            ScheduledSequence(answer.sequence_id, ids, answer.stop_rules, image_spans=submission.image_spans)
            for answer in request.answers
        ]
        self._books.add(request, sequences, params.structured_outputs)

    def _new_request(self, submission: Submission, extras: RowExtras) -> Request:
        asked = submission.params.seed
        seed = asked if asked is not None else random_seed(self._seeds)
        return Request.create(submission, extras, seed=seed, config=self.config, tokenizer=self.tokenizer)
