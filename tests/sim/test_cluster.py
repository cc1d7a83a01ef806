"""The simulated group follows its cost model and the scheduler's votes to the millisecond, as worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.errors import ArgumentError
from deepinfer.scheduling.config import SchedulerConfig
from deepinfer.sim.cluster.arrivals import Arrival, drawn_arrivals, read_trace
from deepinfer.sim.cluster.cluster import Cluster, ClusterRun, ClusterSettings
from deepinfer.sim.cluster.costs import CostModel
from deepinfer.sim.cluster.experts import ExpertSettings
from deepinfer.sim.cluster.report import ClusterReport

ROUND = CostModel(decode_ms=10, decode_row_ms=1, prefill_ms=100, prefill_token_ms=1)


def config(**changes: int) -> SchedulerConfig:
    sizes = {"num_blocks": 400, "num_state_slots": 40, "max_model_len": 2048, "block_size": 16, **changes}
    return SchedulerConfig(**sizes)


def run(ranks: int, arrivals: list[Arrival], costs: CostModel = ROUND, **changes: object) -> ClusterRun:
    scheduler = changes.pop("scheduler", None) or config()
    return Cluster(ClusterSettings(ranks, scheduler, costs, **changes), arrivals).run()


def test_the_default_decode_step_is_the_fitted_line() -> None:
    costs = CostModel()
    # 16 requests with 5 drafts: 96 rows in 10.4 ms; 9 rows fewer save 0.15 ms; 169 fewer of a large step 2.8 ms.
    assert costs.decode_step_ms(96) == pytest.approx(10.4128)
    assert costs.decode_step_ms(96) - costs.decode_step_ms(87) == pytest.approx(0.1512)
    assert costs.decode_step_ms(576) - costs.decode_step_ms(407) == pytest.approx(2.8392)


def test_the_default_prompt_step_goes_through_the_published_points() -> None:
    costs = CostModel()
    assert costs.prefill_step_ms(4096) == pytest.approx(68)
    assert costs.prefill_step_ms(32_768) == pytest.approx(376)


def test_imbalance_stretches_the_experts_share_of_what_grows() -> None:
    assert ROUND.decode_step_ms(20, 1.5) == 10 + 20 * 1.25
    assert ROUND.move_ms(100_000_000) == 2


def test_one_rank_that_is_sent_all_at_once_takes_one_prompt_step_and_a_step_a_token() -> None:
    done = run(1, [Arrival(0, 30, 6)] * 3)
    assert (done.prompt_steps, done.decode_steps, done.placeholder_steps) == (1, 5, 0)
    assert done.now_ms == 100 + 90 + 5 * (10 + 3)
    assert done.first_token_ms == [190] * 3
    assert done.gap_ms == [13] * 15
    assert (done.finished, done.failed, done.output_tokens) == (3, 0, 18)


def test_the_fullest_rank_sets_the_pace_and_idle_ranks_run_placeholders() -> None:
    done = run(3, [Arrival(0, 30, 3), Arrival(0, 50, 2)])
    # Prompt step: ranks 0 and 1 have rows, rank 2 a placeholder. Then one step of both, and one of rank 0 alone.
    assert done.now_ms == 100 + 50 + 11 + 11
    assert done.placeholder_steps == 1 + 1 + 2
    assert ClusterReport.of(done, 3).placeholder_share == pytest.approx(4 / 9, abs=1e-6)


def test_a_request_that_comes_late_waits_for_the_vote_that_one_rank_can_win() -> None:
    scheduler = config(prefill_attempt_interval=5, prefill_any_attempt_interval=7)
    # The prompt step ends at 110 ms and every decode step takes 11 ms; the second request arrives in the first.
    done = run(2, [Arrival(0, 10, 40), Arrival(115, 10, 2)], scheduler=scheduler)
    # After 5 decode steps all ranks must want it, and rank 0 has nobody waiting; after 7 one rank is enough.
    assert done.first_token_ms[1] == 110 + 7 * 11 + 110 - 115
    alone = run(1, [Arrival(0, 10, 40), Arrival(115, 10, 2)], scheduler=scheduler)
    assert alone.first_token_ms[1] == 110 + 5 * 11 + 110 - 115


def test_time_jumps_to_the_next_arrival_when_nobody_has_work() -> None:
    done = run(2, [Arrival(5_000, 10, 1), Arrival(9_000, 10, 1)])
    assert done.now_ms == 9_110
    assert done.first_token_ms == [110, 110]


def test_accepted_drafts_come_in_one_step() -> None:
    scheduler = config(num_speculative_tokens=3)
    sure = run(1, [Arrival(0, 10, 9)], scheduler=scheduler, acceptance=1.0)
    assert sure.output_tokens == 9
    never = run(1, [Arrival(0, 10, 9)], scheduler=scheduler, acceptance=0.0)
    # One token from the prompt, then 4 a step against 1 a step.
    assert (sure.decode_steps, never.decode_steps) == (2, 8)
    assert sorted(sure.gap_ms) == [0] * 6 + [14] * 2


def test_a_request_that_cannot_be_served_counts_as_failed() -> None:
    done = run(1, [Arrival(0, 5_000, 3), Arrival(0, 10, 1)])
    assert (done.finished, done.failed) == (1, 1)


def test_a_run_is_a_function_of_its_seed() -> None:
    arrivals = drawn_arrivals(30, per_second=40, prompt_tokens=50, output_tokens=20, seed=4)
    assert arrivals == drawn_arrivals(30, per_second=40, prompt_tokens=50, output_tokens=20, seed=4)
    experts = ExpertSettings(layers=2, experts=16, redundant=4, interval_steps=20, window_steps=5)
    first, again = (run(4, list(arrivals), experts=experts, seed=1) for _ in range(2))
    assert first == again
    assert first != run(4, list(arrivals), experts=experts, seed=2)


def test_a_balancer_that_plans_evens_out_what_one_that_keeps_does_not() -> None:
    arrivals = [Arrival(0, 200, 120)] * 24
    runs = {
        policy: run(
            4,
            arrivals,
            experts=ExpertSettings(policy, skew=1.2, layers=2, experts=16, redundant=4, interval_steps=40),
        )
        for policy in ("keep", "balanced")
    }
    assert (runs["keep"].moved_slots, runs["keep"].move_ms) == (0, 0)
    assert runs["balanced"].moved_slots > 0
    assert runs["balanced"].move_ms > 0
    # The first plan is due after 10 of 120 steps.
    before, after = ([sum(each.busiest_over_mean[20:]) for each in runs.values()][index] for index in (0, 1))
    assert after < before * 0.9


def test_drawn_requests_have_the_means_that_were_asked_for() -> None:
    arrivals = drawn_arrivals(4000, per_second=10, prompt_tokens=300, output_tokens=50, seed=0)
    assert arrivals[-1].at_ms == pytest.approx(400_000, rel=0.05)
    assert sum(each.prompt_tokens for each in arrivals) / 4000 == pytest.approx(300, rel=0.05)
    assert sum(each.output_tokens for each in arrivals) / 4000 == pytest.approx(50, rel=0.05)
    assert {each.at_ms for each in drawn_arrivals(5, per_second=0, prompt_tokens=1, output_tokens=1, seed=0)} == {0}


def test_a_trace_is_sorted_and_every_bad_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    good = '{"at_ms": %d, "prompt_tokens": 3, "output_tokens": 2}\n'
    file.write_text(good % 9 + "\n" + good % 4)
    assert read_trace(file) == (Arrival(4, 3, 2), Arrival(9, 3, 2))
    file.write_text(good % -1 + '{"at_ms": 0}\n' + "x\n")
    with pytest.raises(ArgumentError) as caught:
        read_trace(file)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["line 1", "line 2", "line 3"]
    file.write_text("\n")
    with pytest.raises(ArgumentError, match="no request"):
        read_trace(file)


def test_impossible_settings_are_refused_at_once() -> None:
    with pytest.raises(ArgumentError) as caught:
        ClusterSettings(0, config(), acceptance=2)
    assert len(caught.value.problems) == 2
    with pytest.raises(ArgumentError) as caught:
        CostModel(decode_ms=-1, prefill_ms=float("nan"), expert_share=2, link_bytes_per_ms=0)
    assert len(caught.value.problems) == 4
