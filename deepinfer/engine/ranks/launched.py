"""One of several processes that a launcher has started: all run the same program and make the same calls."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike

import torch

from deepinfer.accelerator import LostRanksError
from deepinfer.engine.admission import Submission
from deepinfer.engine.options import EngineOptions
from deepinfer.engine.outputs import EngineStats, RequestOutput
from deepinfer.engine.ranks.building import build_rank
from deepinfer.engine.ranks.living import given_up_record, ids_of, refuse_duplicates
from deepinfer.engine.ranks.seeding import with_seed
from deepinfer.errors import RankFailedError
from deepinfer.parallel.ranks.messages import all_gather_bytes
from deepinfer.parallel.ranks.reports import BalanceReport
from deepinfer.sampling.params import SamplingParams
from deepinfer.settings import LaunchedRank, Settings
from deepinfer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Living:
    """A request that may be unfinished on some rank: who serves it, and what the caller passed."""

    group: int
    submission: Submission


class LaunchedEngine:
    """This rank's engine, used as if it served everything.

    Every process makes the same calls with the same arguments, and finds the same terminal records. Each context group,
    of one rank by default, serves its share of the requests: they are dealt out in turns. Records of growth come from
    this rank's own requests only; the terminal records of the others' come together, when nobody has work left.

    When a rank is lost, the exception that says so passes through. Then there is no group any more: the next call of
    :meth:`step` returns the terminal record of each unfinished request, of this rank's own with what they got so far,
    and calls that need the other ranks raise RankFailedError. So it is with a call that was cut off (Ctrl-C), for the
    others wait for what it left out.

    Attributes:
        engine: this rank's.
        tokenizer: None when the checkpoint has none.
    """

    def __init__(
        self,
        place: LaunchedRank,
        model: str | PathLike[str] | None,
        accelerator: str | None,
        options: EngineOptions,
        settings: Settings,
    ) -> None:
        """Join the other ranks and build this one's engine."""
        self.engine, self._groups = build_rank(place, model, accelerator, options, settings)
        self.tokenizer: Tokenizer | None = self.engine.tokenizer
        self._twins = self.engine.options.context_parallel_size
        self._seeds = random.Random(options.seed)
        self._arrivals = 0
        self._living: dict[str, _Living] = {}
        self._finished: list[RequestOutput] = []
        self._untold: list[RequestOutput] = []
        self._failure: RankFailedError | None = None

    @property
    def rank(self) -> int:
        """This process's number."""
        return self._groups.rank

    @property
    def _group(self) -> int:
        """The number of this rank's context group."""
        return self.rank // self._twins

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
        """Queue a request at the rank whose turn it is; as :meth:`Engine.add_request`."""
        submission = Submission.read(
            request_id, prompt_token_ids, params, prompt=prompt, image_spans=image_spans, embeddings=embeddings
        )
        refuse_duplicates(ids_of(submission, self.engine.rules), self._living)
        with self._together():
            submission = with_seed(submission, self.engine.rules, self._seeds)
            group = self._arrivals % (self._groups.world_size // self._twins)
            if group == self._group:
                self.engine.add_request(
                    request_id,
                    submission.prompt_token_ids,
                    submission.params,
                    prompt=prompt,
                    image_spans=submission.image_spans,
                    embeddings=submission.embeddings_PD,
                )
            self._arrivals += 1
            self._living[request_id] = _Living(group, replace(submission, embeddings_PD=None))

    def abort_request(self, request_id: str) -> bool:
        """End a request; False if it is unknown or has ended. Every rank gets the same answer."""
        living = self._living.get(request_id)
        if living is None:
            return False
        with self._together():
            ended = living.group == self._group and self.engine.abort_request(request_id)
            return self._groups.votes.any_rank(says_yes=ended)

    def discard_requests(self, request_ids: Iterable[str]) -> None:
        """Abort requests and drop their records; unknown ids are passed over."""
        gone = [request_id for request_id in request_ids if request_id in self._living]
        if gone and self._failure is None:
            with self._together():
                self.engine.discard_requests(gone)
        for request_id in gone:
            del self._living[request_id]
        self._finished = [record for record in self._finished if record.request_id not in gone]

    def has_unfinished_requests(self) -> bool:
        """Return True while a terminal record is still to come, the same on every rank."""
        return bool(self._living)

    def step(self) -> list[RequestOutput]:
        """Run one step of the group and return this rank's records, and all others' when nobody has work left."""
        if self._failure is not None:
            return self._last_records(str(self._failure))
        with self._together(in_step=True):
            fault = self._step_alone()
            if self._groups.votes.any_rank(says_yes=fault is not None or self.engine.has_unfinished_requests()):
                if fault is not None:
                    raise fault
                return self._told()
            everybody = all_gather_bytes(self._groups.host, pickle.dumps(self._finished))
            others: list[RequestOutput] = []
            for rank, message in enumerate(everybody):
                # A context group's ranks have the same records: its first one's will do; one's own are here already.
                if rank % self._twins == 0 and rank // self._twins != self._group:
                    others += pickle.loads(message)  # noqa: S301 - from a process of our own group
        self._finished = []
        self._living = {}
        return self._told() + others

    def stats(self) -> EngineStats:
        """Return this rank's counts."""
        return self.engine.stats()

    def expert_balance(self) -> BalanceReport | None:
        """Return what balancing has done with this rank's experts; None where it is off."""
        return self.engine.worker.balance

    def close(self) -> None:
        """End what this rank's engine has started."""
        if self._failure is not None:
            self.engine.give_up(str(self._failure))
        self.engine.close()

    # ------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _together(self, *, in_step: bool = False) -> Iterator[None]:
        """Make a call for which the other ranks must be there, and find out whether they are lost by it."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except BaseException as error:
            # A call that was cut off has left out what the others wait for, or may have: nobody can tell.
            if not isinstance(error, Exception) or self._groups.are_lost_by(error, in_step=in_step):
                self._failure = self._failure_of(error)
            raise

    def _failure_of(self, error: BaseException) -> RankFailedError:
        if isinstance(error, RankFailedError):
            return error
        if isinstance(error, LostRanksError):
            return RankFailedError(error.missing, str(error))
        return RankFailedError([self.rank], f"rank {self.rank} raised {type(error).__name__}: {error}")

    def _step_alone(self) -> Exception | None:
        """Run this rank's part of a step; return what it has raised, unless the other ranks are lost by it."""
        try:
            self._untold = self.engine.step()
        except Exception as error:
            if self._groups.are_lost_by(error, in_step=True):
                raise
            return error  # the others vote on what is left, and this rank with them
        self._finished += [record for record in self._untold if record.finished]
        return None

    def _told(self) -> list[RequestOutput]:
        """Return the records of this step, which are about to reach the caller."""
        records, self._untold = self._untold, []
        return records

    def _last_records(self, why: str) -> list[RequestOutput]:
        """Return the terminal record of each request that has none, in the order of admission."""
        untold = {record.request_id: record for record in self._untold if record.finished}
        told = {record.request_id for record in self._finished} - set(untold)
        own = untold | {record.request_id: record for record in self.engine.give_up(why)}
        records = [
            own.get(request_id) or given_up_record(living.submission, None, why)
            for request_id, living in self._living.items()
            if request_id not in told
        ]
        self._finished, self._untold, self._living = [], [], {}
        return records
