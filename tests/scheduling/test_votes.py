"""When prefill is tried: the chances of one rank, and the agreement of several."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from deepinfer.scheduling.config import EngineType, SchedulerConfig
from deepinfer.scheduling.scheduler import Scheduler
from deepinfer.scheduling.sequence import Sequence, StopRules
from deepinfer.scheduling.votes import SoloVotes, StepClock

TRACES = json.loads((Path(__file__).parents[1] / "data" / "scheduler_traces.json").read_text())["scenarios"]


def kinds(bench: Any, count: int) -> list[str]:
    return [bench.step().kind for _ in range(count)]


def test_chances_come_at_the_multiples_of_both_intervals() -> None:
    clock = StepClock(70, 100)
    chances = []
    for _ in range(215):
        if clock.prefill_is_tried(SoloVotes(), wants=True, can_decode=True):
            chances.append(clock.decode_step)
        clock.count_decode_step()
    assert chances == [0, 70, 100, 140, 200, 210]


def test_a_prompt_step_restarts_the_count() -> None:
    clock = StepClock(5, 7)
    for _ in range(3):
        clock.count_decode_step()
    clock.count_prompt_step()
    assert clock.decode_step == 0
    assert clock.prefill_is_tried(SoloVotes(), wants=True, can_decode=True)


def test_a_request_that_comes_after_the_first_decode_step_waits_for_five_of_them(
    make_bench: Callable[..., Any],
) -> None:
    bench = make_bench(prefill_attempt_interval=5, prefill_any_attempt_interval=7)
    bench.add("a", 5, max_tokens=100)
    assert kinds(bench, 2) == ["prefill", "decode"]
    bench.add("b", 5, max_tokens=100)
    assert kinds(bench, 5) == ["decode"] * 4 + ["prefill"]


def test_a_request_that_waits_when_the_prefill_ends_enters_in_the_next_step(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(prefill_attempt_interval=5, prefill_any_attempt_interval=7, max_num_batched_tokens=8)
    bench.add("a", 8, max_tokens=100)
    bench.add("b", 8, max_tokens=100)
    assert kinds(bench, 3) == ["prefill", "prefill", "decode"]


def test_a_point_that_passes_without_work_does_not_restart_the_count(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(prefill_attempt_interval=5, prefill_any_attempt_interval=7)
    bench.add("a", 5, max_tokens=100)
    assert kinds(bench, 7) == ["prefill"] + ["decode"] * 6
    bench.add("b", 5, max_tokens=100)
    assert kinds(bench, 2) == ["decode", "prefill"]


@pytest.mark.parametrize("interval", [1, 70, 10**6])
def test_an_engine_with_nothing_to_decode_tries_prefill_at_once(make_bench: Callable[..., Any], interval: int) -> None:
    bench = make_bench(prefill_attempt_interval=interval, prefill_any_attempt_interval=interval)
    for name in ("a", "b", "c"):
        assert kinds(bench, 1) == ["empty"]
        bench.add(name, 5, max_tokens=2)
        assert kinds(bench, 2) == ["prefill", "decode"]


def test_a_lone_preempted_request_is_recomputed_in_the_next_step(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(prefill_attempt_interval=70)
    bench.add("a", 5, max_tokens=100)
    assert kinds(bench, 4) == ["prefill", "decode", "decode", "decode"]
    step = bench.scheduler.schedule()
    bench.worker.run(step)
    bench.scheduler.cancel(step)
    assert kinds(bench, 2) == ["prefill", "decode"]


def test_above_the_watermark_no_prompt_step_is_wanted(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(num_blocks=21, max_num_batched_tokens=128)
    bench.add("a", 72, max_tokens=6)
    assert kinds(bench, 1) == ["prefill"]
    bench.add("b", 4, max_tokens=1)
    assert kinds(bench, 1) == ["prefill"]  # 18 of 20 blocks: at the mark
    assert kinds(bench, 1) == ["decode"]
    bench.add("c", 4, max_tokens=1)
    assert kinds(bench, 5) == ["decode"] * 4 + ["prefill"]  # 19 of 20, though c would fit, until a has ended


def test_a_head_that_is_not_ready_is_not_wanted(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    sequence = bench.add("a", 5, schedulable=False)
    assert kinds(bench, 2) == ["empty", "empty"]
    sequence.schedulable = True
    assert kinds(bench, 2) == ["prefill", "decode"]


def test_a_prompt_engine_runs_prompt_steps_only_and_hands_over_what_it_computed(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(engine_type=EngineType.PROMPT, max_num_seqs=2)
    for name in ("a", "b", "c"):
        bench.add(name, 5, max_tokens=100)
    assert [row[0] for row in bench.rows(bench.step())] == ["a", "b"]
    assert kinds(bench, 2) == ["empty", "empty"]
    handed = bench.scheduler.hand_over("a")
    assert list(handed.output_token_ids) == bench.emitted["a"]
    assert [row[0] for row in bench.rows(bench.step())] == ["c"]
    for name in ("b", "c"):
        bench.scheduler.hand_over(name)
    bench.audit()
    assert bench.terminals == {}  # another engine reports their end


def test_a_completion_engine_decodes_what_it_receives_and_refuses_prompts(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(engine_type=EngineType.COMPLETION, stop_preempted_requests=True, num_blocks=6)
    bench.add("fresh", 5)
    assert bench.scheduler.try_receive(Sequence("a", range(2, 14), StopRules(3)))
    assert not bench.scheduler.try_receive(Sequence("b", range(2, 14), StopRules(3)))
    assert bench.scheduler.try_receive(Sequence("long", range(2, 40), StopRules(3)))
    bench.worker.run = lambda step: [9] * step.num_requests
    assert bench.rows(bench.step()) == [("a", 11, 1, 12)]
    bench.drain()
    reasons = {name: record.finish_reason for name, record in bench.terminals.items()}
    assert reasons == {"fresh": "ignored", "a": "length", "long": "ignored"}


# --- several ranks -----------------------------------------------------------------------------------------------


@dataclass
class ThreadVotes:
    """Ranks as threads that meet at a barrier for every vote; records what was asked."""

    barrier: threading.Barrier
    answers: list[bool]
    rank: int
    asked: list[str] = field(default_factory=list)

    def _meet(self, question: str, *, says_yes: bool) -> list[bool]:
        self.asked.append(question)
        self.answers[self.rank] = says_yes
        self.barrier.wait(5)
        answers = list(self.answers)
        self.barrier.wait(5)
        return answers

    def any_rank(self, *, says_yes: bool) -> bool:
        return any(self._meet("any", says_yes=says_yes))

    def every_rank(self, *, says_yes: bool) -> bool:
        return all(self._meet("every", says_yes=says_yes))


def run_ranks(act: Callable[[int, ThreadVotes], Any], count: int) -> tuple[list[Any], list[ThreadVotes]]:
    barrier = threading.Barrier(count)
    answers = [False] * count
    votes = [ThreadVotes(barrier, answers, rank) for rank in range(count)]
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        try:
            results[rank] = act(rank, votes[rank])
        except BaseException as error:
            results[rank] = error
            barrier.abort()
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results, votes


HEADS = ("nothing", "fits", "does not fit")


def rank_scheduler(votes: ThreadVotes, head: str, *, is_running: bool, decode_step: int) -> Scheduler:
    config = SchedulerConfig(
        block_size=4,
        num_blocks=20,
        num_state_slots=9,
        max_model_len=256,
        max_num_seqs=4,
        prefill_attempt_interval=3,
        prefill_any_attempt_interval=6,
        cache_usage_watermark=1.0,
    )
    scheduler = Scheduler(config)
    if is_running:
        scheduler.add(Sequence("runner", [5] * 8, StopRules(1000)))
        scheduler.commit(scheduler.schedule(), [7])
    scheduler._votes = votes
    scheduler.clock.decode_step = decode_step
    if head == "fits":
        scheduler.add(Sequence("head", [5] * 4, StopRules(1000)))
    elif head == "does not fit":
        scheduler.add(Sequence("head", [5] * 72, StopRules(1000)))
    return scheduler


def four_steps(scheduler: Scheduler) -> list[tuple[str, str, int]]:
    seen = []
    for _ in range(4):
        step = scheduler.schedule()
        scheduler.commit(step, [7] * step.num_requests)
        seen.append((step.group_kind, step.kind, scheduler.clock.decode_step))
    return seen


@pytest.mark.parametrize("decode_step", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("heads", list(product(HEADS, repeat=3)), ids=" / ".join)
def test_all_ranks_run_the_same_kind_and_someone_advances(heads: tuple[str, str, str], decode_step: int) -> None:
    def act(rank: int, votes: ThreadVotes) -> list[tuple[str, str, int]]:
        # Rank 2 has nothing to decode; ranks 0 and 1 have a runner each.
        return four_steps(rank_scheduler(votes, heads[rank], is_running=rank < 2, decode_step=decode_step))

    ranks, votes = run_ranks(act, 3)
    assert votes[0].asked == votes[1].asked == votes[2].asked
    for steps in zip(*ranks, strict=True):
        assert len({group_kind for group_kind, _, _ in steps}) == 1
        assert len({step for _, _, step in steps}) == 1
        assert any(kind != "empty" for _, kind, _ in steps)


def test_a_rank_that_scheduled_nothing_runs_an_empty_prompt_step_and_restarts_its_count() -> None:
    def act(rank: int, votes: ThreadVotes) -> tuple[str, str, int]:
        scheduler = rank_scheduler(votes, "fits" if rank else "nothing", is_running=True, decode_step=6)
        step = scheduler.schedule()
        return step.kind, step.group_kind, scheduler.clock.decode_step

    ranks, _ = run_ranks(act, 2)
    assert ranks == [("empty", "prefill", 0), ("prefill", "prefill", 0)]


def test_an_all_point_needs_every_rank_and_an_any_point_one() -> None:
    def act_at(decode_step: int) -> list[str]:
        def act(rank: int, votes: ThreadVotes) -> str:
            scheduler = rank_scheduler(votes, "fits" if rank else "nothing", is_running=True, decode_step=decode_step)
            return scheduler.schedule().group_kind

        return run_ranks(act, 2)[0]

    assert act_at(3) == ["decode", "decode"]
    assert act_at(6) == ["prefill", "prefill"]


def test_two_ranks_decide_as_the_original_did() -> None:
    """The file's other scenario of two ranks is a fact about the original alone: ours tries at once when all idle.

    For the same reason its steps in which nobody has work are left out, and what happens before them happens later.
    """
    (scenario,) = (each for each in TRACES if each["needs"] == ["ranks"] and each["name"].startswith("votes_empty"))
    given = scenario["config"]
    config = SchedulerConfig(
        block_size=given["block_size"],
        num_blocks=given["num_blocks"],
        num_state_slots=given["state_slots"],
        max_num_seqs=given["max_num_seqs"],
        max_num_batched_tokens=given["max_num_batched_tokens"],
        max_model_len=given["max_model_len"],
        prefill_attempt_interval=given["all_interval"],
        prefill_any_attempt_interval=given["any_interval"],
    )
    theirs = [step for step in scenario["steps"] if step["rank0"]["ids"] or step["rank1"]["ids"]]

    def act(rank: int, votes: ThreadVotes) -> list[tuple[str, set[str]]]:
        scheduler = Scheduler(config, votes)
        due = [event for event in scenario["events"] if event["rank"] == rank]
        decided = []
        for other in theirs:
            while due and due[0]["before_step"] <= other["step"]:
                event = due.pop(0)
                assert event["do"] == "add"
                prompt = [5] * event["prompt_len"]
                scheduler.add(Sequence(event["id"], prompt, StopRules(event["max_tokens"])))
            step = scheduler.schedule()
            scheduler.commit(step, [7] * step.num_requests)
            decided.append((step.group_kind, {sequence.request_id for sequence in step.sequences}))
        return decided

    ranks, votes = run_ranks(act, 2)
    for rank, decided in enumerate(ranks):
        assert decided == [(step[f"rank{rank}"]["kind"], set(step[f"rank{rank}"]["ids"])) for step in theirs]
    assert votes[0].asked == votes[1].asked


def test_a_request_starts_at_the_first_step_when_nothing_decodes_and_at_the_first_chance_otherwise() -> None:
    def act(rank: int, votes: ThreadVotes) -> list[str]:
        config = SchedulerConfig(
            block_size=4, num_blocks=20, num_state_slots=9, max_model_len=256, max_num_seqs=4
        )  # chances come every 70 and 100 decode steps
        scheduler = Scheduler(config, votes)
        if rank:
            scheduler.add(Sequence("text", [5] * 6, StopRules(1000)))
        steps = []
        for _ in range(3):
            step = scheduler.schedule()
            scheduler.commit(step, [7] * step.num_requests)
            steps.append(step.group_kind if step.num_requests else f"empty {step.group_kind}")
        return steps

    ranks, _ = run_ranks(act, 2)
    assert ranks == [["empty prefill", "empty decode", "empty decode"], ["prefill", "decode", "decode"]]
