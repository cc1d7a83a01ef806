"""All ranks run the same kind of step, and the same exchanges in the same order, whatever each has to do."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from deepinfer import SamplingParams
from deepinfer.accelerator import Collectives, ExpertSlot, OpOptions, PreparedWeight, RankPlace, StoredExpert
from deepinfer.accelerator.ops.base import OpGroup
from deepinfer.accelerator.ops.sampling import RowStatus
from deepinfer.engine.worker import Worker
from deepinfer.parallel.ranks.recording import RecordedCall
from deepinfer.sampling.sampler import SampledRow
from deepinfer.sampling.verification import VerifiedRun
from deepinfer_conformance.drivers import NullDriver, OracleDriver
from deepinfer_conformance.drivers.null.layers import NullExperts
from deepinfer_cpu_ref import Driver as ReferenceDriver

Together = Callable[..., list[Any]]


def lead_a_life(seed: int, steps: int, *, busy: float) -> Callable[[Any], Any]:
    """Arrivals, aborts and forks at random, of each rank's own; long droughts leave ranks, and at times all, idle."""

    def act(seat: Any) -> Any:
        engine, draw = seat.engine, random.Random(f"{seed} {seat.groups.rank}")
        weather = random.Random(seed)  # the same on every rank: when the group is quiet
        kinds, living, number = [], [], 0
        if engine.worker.balance is not None:
            seat.turn_experts()
        prompted = 0
        for step in range(steps):
            chance = busy if (step // 50 + seat.groups.rank) % 3 else 0.0
            if weather.random() < 0.002:
                engine.discard_requests(living)
                living.clear()
            if draw.random() < chance and len(living) < 12:
                number += 1
                params = SamplingParams(
                    max_tokens=draw.randint(1, 30), n=draw.choice([1, 1, 1, 2]), ignore_eos=True, temperature=0
                )
                engine.add_request(f"r{number}", [draw.randint(2, 90)] * draw.randint(1, 60), params)
                living.append(f"r{number}")
            if living and draw.random() < 0.03:
                living.remove(gone := draw.choice(living))
                engine.abort_request(gone)
            parents = [row.request_id for row in engine.last_step.rows if row.request_id in living]
            if parents and draw.random() < 0.05 and len(living) < 12:
                number += 1
                engine.fork_request(draw.choice(parents), f"r{number}", SamplingParams(max_tokens=5, temperature=0))
                living.append(f"r{number}")
            finished = {record.request_id for record in engine.step() if record.finished}
            living = [each for each in living if each not in finished]
            prompted += engine.last_step.kind == "prefill"
            kinds.append(engine.last_step.kind)
        while seat.groups.votes.any_rank(says_yes=engine.has_unfinished_requests()):
            engine.step()
        engine.check_invariants()
        clock = (
            engine._books.scheduler.clock.decode_step,
            engine.worker.balance and replace(engine.worker.balance, seconds=0),
        )
        return seat.recorder.calls, kinds, clock, engine.stats()

    return act


class Exchanging(NullDriver):
    """Computes nothing, and exchanges it in earnest."""

    def join_group(self, place: RankPlace) -> Collectives:
        return ReferenceDriver().join_group(place)


class Held(PreparedWeight):
    """Experts of a few bytes each, which nobody computes with."""

    def __init__(self, count: int) -> None:
        self.name, self.nbytes = "held", 3 * count
        self._bytes_Eb = torch.zeros(count, 3, dtype=torch.uint8)

    def expert_slots(self) -> tuple[ExpertSlot, ...]:
        return tuple(ExpertSlot("held", (row_b,)) for row_b in self._bytes_Eb)


class HeldExperts(NullExperts):
    def prepare(self, experts: Sequence[StoredExpert], limit: float) -> PreparedWeight:
        return Held(len(experts))


class Moving(Exchanging):
    """Moves bytes of experts in earnest too."""

    def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
        return {**super().op_groups(options), "experts": HeldExperts(options)}


class Quick(Worker):
    """Every row emits the same token; no layer runs."""

    def run(self, step: Any, requests: Any, extras: Any) -> list[VerifiedRun]:
        return [VerifiedRun((SampledRow(7, RowStatus.OK, None),), 0) for _ in requests]


@pytest.mark.parametrize(
    ("world", "steps", "worker", "options"),
    [
        (2, 200, Worker, {"async_scheduling": True}),
        (2, 200, Worker, {"spread_ngram_tables": True}),
        (
            *(3, 60, Worker),
            {
                "expert_parallel_size": 3,
                "redundant_experts": 1,
                "expert_balancing_interval": 4,
                "spread_ngram_tables": True,
            },
        ),
        (3, 2000, Quick, {}),
    ],
)
def test_every_rank_makes_the_same_exchanges_in_the_same_order(
    together: Together, world: int, steps: int, worker: type[Worker], options: dict[str, Any]
) -> None:
    life = lead_a_life(5, steps, busy=0.2)
    found = together(world, life, Moving, worker_type=worker, prefill_attempt_interval=7, **options)
    calls, _, clock, _ = found[0]
    assert len(calls) > steps
    assert {call.op for call in calls} >= {"all_gather"}
    balance = clock[1]
    if balance is not None:
        assert balance.changes == (balance.steps + 3) // 4
        assert RecordedCall("expert group of ranks 0, 1, 2", "all_to_all", (3,), "uint8") in calls
    for other_calls, other_kinds, other_clock, stats in found:
        assert other_calls == calls
        assert other_clock == clock
        assert {"prefill", "decode", "empty"} <= set(other_kinds)
        assert (stats.free_blocks, stats.num_unfinished) == (stats.usable_blocks, 0)
    for together_now in zip(*(each[1] for each in found), strict=True):
        assert len({kind for kind in together_now if kind != "empty"}) <= 1, together_now


def test_a_rank_without_work_takes_part_in_the_steps_of_the_others(together: Together) -> None:
    def act(seat: Any) -> Any:
        if seat.groups.rank == 1:
            seat.engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        kinds = []
        while seat.groups.votes.any_rank(says_yes=seat.engine.has_unfinished_requests()):
            seat.engine.step()
            kinds.append(seat.engine.last_step.kind)
        return kinds

    idle, busy = together(2, act)
    assert busy == ["prefill", "decode", "decode", "decode"]
    assert idle == ["empty"] * 4


def test_text_starts_at_the_first_step_whether_or_not_others_bring_images(together: Together) -> None:
    def act(seat: Any) -> Any:
        params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        spans = [(0, 2)] if seat.groups.rank == 1 else []
        seat.engine.add_request("a", [5, 6, 7], params, image_spans=spans)
        first = seat.engine.step()
        kind = seat.engine.last_step.kind
        return kind, len(first[0].outputs[0].token_ids), seat.engine.step()[0].finished

    assert together(2, act) == [("prefill", 1, True)] * 2


def test_tokens_are_those_of_an_engine_alone(together: Together, expected: Callable[..., list[int]]) -> None:
    prompts = {rank: [3 + rank, 40, 41 - rank, 8] for rank in range(3)}

    def act(seat: Any) -> Any:
        rank = seat.groups.rank
        seat.engine.add_request("a", prompts[rank], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
        records = []
        while seat.groups.votes.any_rank(says_yes=seat.engine.has_unfinished_requests()):
            records += seat.engine.step()
        return list(records[-1].outputs[0].token_ids)

    found = together(3, act, OracleDriver)
    assert found == [expected(prompts[rank], 6) for rank in range(3)]


def test_pools_are_as_large_as_the_rank_with_the_least_memory_can_have_them(together: Together) -> None:
    class Narrow(OracleDriver):
        numbers = iter([1, 3, 2])

        def __init__(self) -> None:
            super().__init__()
            self.share = next(self.numbers)

        def memory(self) -> Any:
            info = super().memory()
            return type(info)(2**30, 2**20 * 2 * self.share, 0)

    def act(seat: Any) -> Any:
        stats = seat.engine.stats()
        return stats.usable_blocks, stats.max_model_len

    found = together(3, act, Narrow, num_blocks=None, max_num_seqs=2)
    assert len(set(found)) == 1
    assert found[0][0] > 1
