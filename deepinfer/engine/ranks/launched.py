"""One of several processes that a launcher has started: all run the same program and make the same calls."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Sequence
from os import PathLike

import torch

from deepinfer.engine.admission import Submission
from deepinfer.engine.options import EngineOptions
from deepinfer.engine.outputs import EngineStats, RequestOutput
from deepinfer.engine.ranks.building import build_rank
from deepinfer.engine.ranks.seeding import with_seed
from deepinfer.errors import DuplicateRequestError
from deepinfer.parallel.ranks.messages import all_gather_bytes
from deepinfer.parallel.ranks.reports import BalanceReport
from deepinfer.sampling.params import SamplingParams
from deepinfer.settings import LaunchedRank, Settings
from deepinfer.tokenizer import Tokenizer


class LaunchedEngine:
    """This rank's engine, used as if it served everything.

    Every process makes the same calls with the same arguments, and finds the same terminal records. Each context group,
    of one rank by default, serves its share of the requests: they are dealt out in turns. Records of growth come from
    this rank's own requests only; the terminal records of the others' come together, when nobody has work left.

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
        self._group_of: dict[str, int] = {}
        self._finished: list[RequestOutput] = []

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
        if request_id in self._group_of:
            raise DuplicateRequestError(
                f"request id {request_id!r} is alive until its terminal record has come out of step(); "
                f"run step(), or use another id"
            )
        submission = Submission.read(
            request_id, prompt_token_ids, params, prompt=prompt, image_spans=image_spans, embeddings=embeddings
        )
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
        self._group_of[request_id] = group

    def abort_request(self, request_id: str) -> bool:
        """End a request; False if it is unknown or has ended. Every rank gets the same answer."""
        group = self._group_of.get(request_id)
        if group is None:
            return False
        ended = group == self._group and self.engine.abort_request(request_id)
        return self._groups.votes.any_rank(says_yes=ended)

    def discard_requests(self, request_ids: Iterable[str]) -> None:
        """Abort requests and drop their records; unknown ids are passed over."""
        gone = [request_id for request_id in request_ids if self._group_of.pop(request_id, None) is not None]
        self.engine.discard_requests(gone)
        self._finished = [record for record in self._finished if record.request_id not in gone]

    def has_unfinished_requests(self) -> bool:
        """Return True while a terminal record is still to come, the same on every rank."""
        return bool(self._group_of)

    def step(self) -> list[RequestOutput]:
        """Run one step of the group and return this rank's records, and all others' when nobody has work left."""
        records = self.engine.step()
        self._finished += [record for record in records if record.finished]
        if self._groups.votes.any_rank(says_yes=self.engine.has_unfinished_requests()):
            return records
        everybody = all_gather_bytes(self._groups.host, pickle.dumps(self._finished))
        for rank, message in enumerate(everybody):
            # A context group's ranks have the same records: its first one's will do, and one's own are here already.
            if rank % self._twins == 0 and rank // self._twins != self._group:
                records += pickle.loads(message)  # noqa: S301 - from a process of our own group
        self._finished = []
        self._group_of = {}
        return records

    def stats(self) -> EngineStats:
        """Return this rank's counts."""
        return self.engine.stats()

    def expert_balance(self) -> BalanceReport | None:
        """Return what balancing has done with this rank's experts; None where it is off."""
        return self.engine.worker.balance

    def close(self) -> None:
        """End what this rank's engine has started."""
        self.engine.close()
