"""Many engines of this machine behind the face of one: requests are shared out, steps are taken together."""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from deepinfer.engine.admission import AdmissionRules, Submission
from deepinfer.engine.options import EngineOptions
from deepinfer.engine.outputs import EngineStats, RequestOutput
from deepinfer.engine.ranks.growth import Received, RecordGrowth
from deepinfer.engine.ranks.living import given_up_record, ids_of, refuse_duplicates
from deepinfer.engine.ranks.messages import Beginning, ForkRequest, Parcel, RankFacts, Reply
from deepinfer.engine.ranks.processes import RankProcesses
from deepinfer.engine.ranks.seeding import with_seed
from deepinfer.errors import ArgumentError, DeepInferError, RankFailedError
from deepinfer.model.checkpoint import packaged_model_path
from deepinfer.parallel.ranks.groups import free_port
from deepinfer.parallel.ranks.reports import BalanceReport
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.streams import random_seed
from deepinfer.settings import LaunchedRank
from deepinfer.tokenizer import Tokenizer

_LOG = logging.getLogger("deepinfer")


@dataclass(slots=True, eq=False)
class _Living:
    """A request whose terminal record has not come.

    Attributes:
        rank: who serves it; the first of those that do, with context parallelism.
        arrival: its place in the order of admission.
        submission: what the caller passed.
        latest: its newest record.
        received: what has come of it, from which records are made.
    """

    rank: int
    arrival: int
    submission: Submission
    latest: RequestOutput | None = None
    received: Received = field(default_factory=Received)


class LocalRanks:
    """One engine a process on this machine, driven in lockstep; it is used like an :class:`Engine`.

    A request is served by the rank that has the fewest, and its answer does not depend on which that is (with batch
    invariance: to the bit). When a rank dies, raises where the others wait for it, or falls silent, all are ended; the
    call raises RankFailedError, and the next call of :meth:`step` returns the terminal records of what was unfinished.

    Attributes:
        config: the model.
        options: the engine's options.
        tokenizer: None when the checkpoint has none.
    """

    def __init__(
        self, model: str | PathLike[str] | None, accelerator: str | None, options: EngineOptions, world_size: int
    ) -> None:
        """Start the ranks and wait until all are ready.

        Raises:
            RankFailedError: a rank died or fell silent; what a rank's own start raises is raised as it is.
        """
        threads = max(1, torch.get_num_threads() // world_size)
        port = free_port()
        beginnings = [
            Beginning(
                LaunchedRank(rank, world_size, rank, world_size, "127.0.0.1", port),
                model,
                accelerator,
                options,
                threads,
                _LOG.getEffectiveLevel(),
            )
            for rank in range(world_size)
        ]
        self._ranks = RankProcesses(beginnings, options.rank_deadline_s)
        self._end = weakref.finalize(self, self._ranks.kill)
        try:
            facts: RankFacts = self._ranks.started()[0]
        except BaseException:
            self._end()
            raise
        self.config = facts.config
        self.options = facts.options
        self.tokenizer = Tokenizer.from_directory(Path(model) if model is not None else packaged_model_path())
        self.rules = AdmissionRules.of(
            facts.config, facts.options, facts.max_model_len, has_tokenizer=facts.has_tokenizer
        )
        self._seeds = random.Random(options.seed)
        self._living: dict[str, _Living] = {}
        self._arrivals = 0
        self._records: list[tuple[int, RequestOutput]] = []
        self._failure: DeepInferError | None = None

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self._ranks)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks."""
        return self._ranks.pids

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
        """Queue a request at the rank, or context group, that has the fewest; as :meth:`Engine.add_request`."""
        submission = Submission.read(
            request_id, prompt_token_ids, params, prompt=prompt, image_spans=image_spans, embeddings=embeddings
        )
        refuse_duplicates(ids_of(submission, self.rules), self._living)
        submission = with_seed(submission, self.rules, self._seeds)
        loads = dict.fromkeys(range(0, self.world_size, self.options.context_parallel_size), 0)
        for living in self._living.values():
            loads[living.rank] += living.submission.params.n
        rank = min(loads, key=loads.__getitem__)
        with self._noted(rank, replace(submission, embeddings_PD=None)):
            self._ask(self._twins(rank), "add", Parcel.of(submission))

    def fork_request(self, parent_id: str, child_id: str, params: SamplingParams | None = None) -> None:
        """Start a request that continues from its parent, on the parent's rank; as :meth:`Engine.fork_request`."""
        submission = Submission.read(child_id, (), params)
        parent = self._living.get(parent_id)
        if parent is None:
            raise ArgumentError(f"fork of {parent_id!r}", [f"there is no living request {parent_id!r} to fork"])
        refuse_duplicates([child_id], self._living)
        before, params = self._seeds.getstate(), submission.params
        if params.seed is None:
            params = replace(params, seed=random_seed(self._seeds))
        try:
            with self._noted(parent.rank, replace(submission, params=params)):
                self._ask(self._twins(parent.rank), "fork", ForkRequest(parent_id, child_id, params))
        except Exception:
            self._seeds.setstate(before)
            raise

    def abort_request(self, request_id: str) -> bool:
        """End a request in whatever state it is; False if it is unknown or has ended."""
        living = self._living.get(request_id)
        return living is not None and bool(self._ask(self._twins(living.rank), "abort", request_id)[0])

    def discard_requests(self, request_ids: Iterable[str]) -> None:
        """Abort requests and drop their records; unknown ids are passed over."""
        gone = set(request_ids)
        known = [request_id for request_id in self._living if request_id in gone]
        if known and self._failure is None:
            self._ask(range(self.world_size), "discard", known)
        for request_id in known:
            self._living.pop(request_id, None)
        self._records = [record for record in self._records if record[1].request_id not in gone]

    def has_unfinished_requests(self) -> bool:
        """Return True while a terminal record is still to come."""
        return bool(self._living or self._records)

    # --- steps --------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Let every rank run one step and return the records of all, in the order of their requests' admission.

        When a driver's part of a step raises on one rank, its exception passes through and that rank's requests of the
        step end, as with one engine; the other ranks' records come with the next call.
        """
        if self._failure is None:
            self._everybody("step")
        records = [record for _, record in sorted(self._records, key=lambda each: each[0])]
        self._records = []
        return records

    def close(self) -> None:
        """End the ranks; requests that are unfinished are aborted.

        Raises:
            RankFailedError: a rank had died, raised, or did not follow in time. All processes are gone then too. What a
                call before this one has raised is not said again.
        """
        if self._failure is None and self._end.alive:
            self._fail(DeepInferError("the ranks were closed; build another LLM"))
            try:
                self._ranks.close()
            finally:
                self._end()

    # --- what can be seen ---------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise InvariantError if the books of a rank contradict each other."""
        self._ask(range(self.world_size), "check")

    def stats(self) -> tuple[EngineStats, ...]:
        """Return each rank's counts."""
        return tuple(self._ask(range(self.world_size), "stats"))

    def expert_balance(self) -> tuple[BalanceReport | None, ...]:
        """Return what balancing has done with each rank's experts: moves, bytes, balance; None where it is off."""
        return tuple(self._ask(range(self.world_size), "balance"))

    def votes(self) -> tuple[int, ...]:
        """Return how many votes each rank has cast: the same number, as long as the ranks are in step."""
        return tuple(self._ask(range(self.world_size), "votes"))

    # ------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _noted(self, rank: int, submission: Submission) -> Iterator[None]:
        """Know a request before its rank does, unless the rank refuses it: Ctrl-C may come before the answer."""
        self._arrivals += 1
        arrival = self._arrivals
        self._living[submission.request_id] = _Living(rank, arrival, submission)
        try:
            yield
        except Exception:
            self._living.pop(submission.request_id, None)
            # Where the ranks were lost by it, everything that lived has got a terminal record.
            self._records = [record for record in self._records if record[0] != arrival]
            raise

    def _twins(self, rank: int) -> range:
        """Return the ranks that serve what this one serves; it is the first of them."""
        return range(rank, rank + self.options.context_parallel_size)

    def _ask(self, ranks: Iterable[int], name: str, argument: object = None) -> list[Any]:
        """Return what ranks answer; the first error among the answers is raised."""
        if self._failure is not None:
            raise self._failure
        if self._ranks.has_due():  # the call before this one was interrupted while it waited
            self._take(self._collect())
        self._ranks.send(ranks, name, argument)
        replies = self._collect()
        self._take(replies)
        for _, _, reply in replies:
            if reply.error is not None:
                raise reply.error
        return [reply.value for _, _, reply in replies]

    def _everybody(self, name: str) -> None:
        self._ask(range(self.world_size), name)

    def _collect(self) -> list[tuple[int, str, Reply]]:
        try:
            return self._ranks.collect()
        except RankFailedError as error:
            self._end()
            self._fail(error)
            raise

    def _take(self, replies: Iterable[tuple[int, str, Reply]]) -> None:
        """Keep the records that steps gave."""
        for rank, name, reply in replies:
            if name != "step" or reply.error is not None or rank % self.options.context_parallel_size:
                continue  # all ranks of a context group give the same records
            growths: list[RecordGrowth] = reply.value
            for growth in growths:
                living = self._living.get(growth.request_id)
                if living is None:
                    continue
                record = living.latest = living.received.record(growth)
                self._records.append((living.arrival, record))
                if record.finished:
                    del self._living[record.request_id]

    def _fail(self, error: DeepInferError) -> None:
        """Give everything up: each unfinished request gets its terminal record."""
        self._failure = error
        for living in self._living.values():
            self._records.append((living.arrival, given_up_record(living.submission, living.latest, str(error))))
        self._living.clear()
