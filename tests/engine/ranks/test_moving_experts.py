"""Experts that move while the ranks serve: no bit of an answer changes, whatever moves and whenever."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.accelerator import LostRanksError, OpOptions, PreparedWeight
from deepinfer.accelerator.ops.base import OpGroup
from deepinfer.errors import ArgumentError, InvariantError, OpRefusedError
from deepinfer_cpu_ref import Driver as ReferenceDriver

Together = Callable[..., list[Any]]
PROMPTS = [[5, 6, 7, 60, 61], [8, 9], [10] * 11, [4, 4, 4, 4]]
PARAMS = SamplingParams(max_tokens=5, seed=3, logprobs=3, ignore_eos=True)
TOP_K = 2
EVERY_STEP = {"expert_balancing": "greedy", "expert_balancing_interval": 1, "expert_balancing_window": 1}


def experts_of(seat: Any) -> dict[tuple[int, int], set[str]]:
    """Return what this rank's slots hold, by layer and expert: the digests of all parts together."""
    spread, found = seat.spread, {}
    for layer in range(spread.shape.layers):
        for expert, slot in zip(spread.held(layer), spread._slots(layer), strict=True):
            content = b"".join(tensor.view(-1).view(torch.uint8).numpy().tobytes() for tensor in slot.tensors)
            found.setdefault((layer, expert), set()).add(hashlib.sha256(content).hexdigest())
    return found


def union(ranks: list[dict[tuple[int, int], set[str]]]) -> dict[tuple[int, int], set[str]]:
    return {key: set().union(*(rank.get(key, set()) for rank in ranks)) for rank in ranks for key in rank}


def busy(seat: Any) -> bool:
    return bool(seat.groups.votes.any_rank(says_yes=seat.engine.has_unfinished_requests()))


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"redundant_experts": 1}),
        (3, {"redundant_experts": 2, "numerics": "served", "async_scheduling": True}),
    ],
)
def test_answers_are_those_of_one_rank_to_the_bit_while_everything_moves(
    together: Together, tiny_directory: Any, world: int, options: dict[str, Any]
) -> None:
    def act(seat: Any) -> Any:
        engine, rank, last = seat.engine, seat.groups.rank, {}
        seat.turn_experts()
        before = experts_of(seat)
        for number, prompt in enumerate(PROMPTS[: 4 * rank]):  # rank 0 has nothing to do
            engine.add_request(str(number), prompt, PARAMS)
        while busy(seat):
            last.update({record.request_id: record for record in engine.step()})
        answers = [last[name].as_json()["outputs"] for name in sorted(last)]
        calls = [call for call in seat.recorder.calls if call.group.startswith("expert")]
        return answers, before, experts_of(seat), calls, engine.worker.balance

    found = together(
        world, act, ReferenceDriver, batch_invariant=True, expert_parallel_size=world, **EVERY_STEP, **options
    )
    numbers = {name: value for name, value in options.items() if name != "redundant_experts"}
    alone = LLM(tiny_directory, "cpu_ref", block_size=4, num_blocks=64, max_num_seqs=8, batch_invariant=True, **numbers)
    expected = [record.as_json()["outputs"] for record in alone.generate(PROMPTS, PARAMS, use_tqdm=False)]
    for rank, (answers, _, _, calls, report) in enumerate(found):
        assert answers == (expected if rank else [])
        assert calls == found[0][3]
        assert report.changes == report.plans == report.steps >= 5
        # All slots but those whose new expert is the old one: 6 slots of 4 experts.
        assert report.moved_experts >= report.steps * 4 * 4
        assert report.moved_bytes > 0
    assert len({(each[4].moved_experts, each[4].moved_bytes, each[4].busiest_over_mean) for each in found}) == 1
    assert {"all_reduce_sum", "all_gather", "all_to_all"} == {call.op for call in found[0][3]}
    before, after = (union([each[place] for each in found]) for place in (1, 2))
    assert all(len(digests) == 1 for digests in before.values())
    assert after == before  # every slot holds what its expert was, all copies alike


def test_only_valid_rows_are_counted_and_every_one_of_them(together: Together) -> None:
    def act(seat: Any) -> Any:
        engine, rank = seat.engine, seat.groups.rank
        policy, rows = seat.turn_experts(), []
        for number, prompt in enumerate(PROMPTS[: 2 * rank]):
            engine.add_request(str(number), prompt, PARAMS)
        while busy(seat):
            engine.step()
            rows.append(sum(row.q for row in engine.last_step.rows))
        return [window.counts_TLE for window in policy.windows], rows

    found = together(2, act, ReferenceDriver, expert_parallel_size=2, **EVERY_STEP)
    windows = found[0][0]
    assert all((one == other).all() for one, other in zip(windows, found[1][0], strict=True))
    rows = [sum(step) for step in zip(*(each[1] for each in found), strict=True)]
    assert rows[0] == 7
    assert rows[-1] == 2
    for counts_TLE, step_rows in zip(windows, rows, strict=True):
        assert counts_TLE.shape[0] == 1  # counting begins anew after each plan
        assert (counts_TLE.sum(axis=(0, 2)) == step_rows * TOP_K).all()


def test_placeholders_of_drafts_are_not_counted(together: Together) -> None:
    def act(seat: Any) -> Any:
        engine = seat.engine
        policy = seat.turn_experts()
        if seat.groups.rank:
            engine.add_request("a", [65, 66, 67], SamplingParams(max_tokens=1, temperature=0))
            engine.add_request("b", [70], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        while busy(seat):
            engine.step()
        stats = engine.stats()
        return [window.counts_TLE for window in policy.windows], stats.drafted_tokens, seat.spread.shape.layers

    options = {"model": None, "num_speculative_tokens": 2, "max_model_len": 48, "num_blocks": 49}
    idle, busy_one = together(2, act, ReferenceDriver, expert_parallel_size=2, **EVERY_STEP, **options)
    windows, drafted, layers = busy_one[0], idle[1] + busy_one[1], idle[2]
    # A row a prompt token, one for each decode step of the request, one for each draft that was one.
    top_k = windows[0].sum() // (4 * layers)
    assert sum(each.sum() for each in windows[1:]) == (len(windows) - 1 + drafted) * top_k * layers


def test_steps_without_load_move_nothing_and_counting_goes_on(together: Together) -> None:
    def act(seat: Any) -> Any:
        engine, reports = seat.engine, []
        for _ in range(6):
            engine.step()
        reports.append(engine.worker.balance)
        if seat.groups.rank:
            engine.add_request("a", [5, 6, 7] * 9, PARAMS)
        while busy(seat):
            engine.step()
        return [*reports, engine.worker.balance]

    options = {**EVERY_STEP, "expert_balancing_interval": 4, "expert_balancing_window": 2, "redundant_experts": 2}
    for quiet, lively in together(2, act, ReferenceDriver, expert_parallel_size=2, **options):
        assert (quiet.steps, quiet.plans, quiet.changes, quiet.moved_bytes) == (6, 2, 0, 0)
        assert (quiet.busiest_over_mean, quiet.planned_busiest_over_mean) == (1.0, 1.0)
        assert lively.plans > 2
        assert lively.changes > 0
        assert lively.planned_busiest_over_mean <= lively.busiest_over_mean


@pytest.mark.parametrize(
    ("stage", "how"),
    [
        ("all_reduce_sum", "raises"),
        ("all_gather", "is silent"),
        ("all_to_all", "raises"),
        ("all_to_all", "is silent"),
    ],
)
def test_a_rank_that_fails_in_a_move_is_named_by_the_others_in_time(
    together: Together, strike: Any, stage: str, how: str
) -> None:
    deadline_s = 5.0

    def act(seat: Any) -> Any:
        engine, turning = seat.engine, seat.turn_experts()
        plan = turning.plan

        def struck_plan(*arguments: Any) -> Any:
            strike(seat.groups.experts, stage, how)
            return plan(*arguments)

        if seat.groups.rank == 1:
            if stage == "all_reduce_sum":  # which comes before the plan, and in nothing but a plan
                strike(seat.groups.experts, stage, how)
            else:
                turning.plan = struck_plan
        engine.add_request("a", [5, 6, 7], PARAMS)
        begun_s = time.monotonic()
        try:
            engine.step()
        except strike.error as error:
            return error, seat.groups.is_broken
        except LostRanksError as error:
            took_s = time.monotonic() - begun_s
            strike.end()
            return error, took_s
        return None

    options = {**EVERY_STEP, "rank_deadline_s": deadline_s}
    (error, took_s), fault = together(2, act, ReferenceDriver, expert_parallel_size=2, **options)
    assert isinstance(fault[0], strike.error)
    assert fault[1]
    assert isinstance(error, LostRanksError)
    assert error.missing == (1,)
    assert "expert group of ranks 0, 1" in str(error)
    assert took_s < deadline_s + 8


def test_ranks_of_two_minds_move_nothing_and_all_of_them_say_so(together: Together) -> None:
    def act(seat: Any) -> Any:
        before, turning = experts_of(seat), seat.turn_experts()
        if seat.groups.rank:
            turning.plan = lambda window, layout_LS, ranks: layout_LS.copy()
        with pytest.raises(InvariantError, match="ranks 1 of the expert group planned another layout"):
            seat.engine.step()
        return experts_of(seat) == before

    assert together(2, act, ReferenceDriver, expert_parallel_size=2, **EVERY_STEP) == [True, True]


def test_experts_that_cannot_take_each_others_place_are_refused_at_the_start(together: Together) -> None:
    class Immovable(ReferenceDriver):
        """A driver of another make: it never heard of moves."""

        def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
            groups = dict(super().op_groups(options))
            experts: Any = groups["experts"]
            prepare = experts.prepare

            def prepared(*arguments: Any) -> Any:
                weight = prepare(*arguments)
                weight.expert_slots = partial(PreparedWeight.expert_slots, weight)
                return weight

            experts.prepare = prepared
            return groups

    with pytest.raises(OpRefusedError, match=r"layers\.\d\.ffn\.experts.*expert_balancing='off'"):
        together(2, lambda _: None, Immovable, expert_parallel_size=2, **EVERY_STEP)

    class Unlike(ReferenceDriver):
        """Every rank prepares its experts in a way of its own."""

        def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
            groups = dict(super().op_groups(options))
            experts: Any = groups["experts"]
            prepare, form = experts.prepare, f"form {id(self)}"

            def prepared(*arguments: Any) -> Any:
                weight = prepare(*arguments)
                right = weight.expert_slots
                weight.expert_slots = lambda: tuple(replace(slot, form=form) for slot in right())
                return weight

            experts.prepare = prepared
            return groups

    with pytest.raises(ArgumentError, match="ranks 1 of the group prepared theirs unlike rank 0"):
        together(2, lambda _: None, Unlike, expert_parallel_size=2, **EVERY_STEP)
