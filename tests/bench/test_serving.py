"""Batches through a real engine, and the figures that are read off their times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer.accelerator.selection import select
from deepinfer.bench.environment import describe_environment
from deepinfer.bench.generation import BatchRun, GenerationSettings, StepTime, random_prompts
from deepinfer.bench.model import ModelFacts, model_problems, model_source
from deepinfer.bench.serving import Served, ServingSettings, serve
from deepinfer.errors import ArgumentError
from deepinfer.settings import Settings

ENVIRONMENT = Settings()
FACTS = ModelFacts("m", "float32", 1, "float32", "portable", "released", "cpu_ref", 0.5, 1, "mark")


def served(settings: GenerationSettings, **arguments: object) -> Served:
    with model_source(None) as source:
        return serve(source, select("cpu_ref", ENVIRONMENT).driver(), settings, ENVIRONMENT, **arguments)  # type: ignore[arg-type]


def read_off(*runs: BatchRun) -> Served:
    return Served(ServingSettings(FACTS, GenerationSettings((2,))), describe_environment(), (runs,))


TWO_REQUESTS = BatchRun(
    seconds=10.0,
    steps=(
        StepTime("prefill", 2.0, 30, 1),
        StepTime("prefill", 1.0, 15, 1),
        StepTime("decode", 4.0, 2, 2),
        StepTime("decode", 2.0, 2, 2),
    ),
    token_times=((2.0, 7.0, 9.0), (3.0, 7.0, 9.0)),
)


def test_rates_count_each_kind_of_step_by_itself_and_the_whole_run() -> None:
    (result,) = read_off(TWO_REQUESTS).throughput().results
    assert result.batch_size == 2
    assert result.prefill_tokens_per_s == 15
    assert result.decode_tokens_per_s == pytest.approx(4 / 6, abs=0.01)
    assert result.decode_step_ms == 3000
    assert result.output_tokens_per_s == 0.6
    assert result.requests_per_s == 0.2
    assert result.run_s == 10


def test_waiting_times_are_quantiles_over_requests_and_over_gaps_between_tokens() -> None:
    (result,) = read_off(TWO_REQUESTS).latency().results
    assert (result.first_token_ms_p50, result.first_token_ms_p99) == (2000, 3000)
    assert (result.token_ms_p50, result.token_ms_p90, result.token_ms_p99) == (2000, 5000, 5000)
    assert (result.request_ms_p50, result.request_ms_p99) == (9000, 9000)


def test_a_bubble_is_the_time_of_decode_steps_in_which_the_device_did_nothing() -> None:
    """The last step that was planned ahead is read by a call that runs nothing: its time and tokens count."""
    run = BatchRun(
        seconds=10.0,
        steps=(
            StepTime("prefill", 2.0, 30, 1, 1.0, 1.0),
            StepTime("decode", 0.5, 1, 0, 0.4, 0.0),
            StepTime("decode", 4.0, 1, 1, 0.6, 3.0),
            StepTime("empty", 1.5, 0, 1, 0.2, 2.5),
        ),
        token_times=((2.0, 6.5, 8.0),),
    )
    (result,) = read_off(run).latency().results
    assert (result.step_host_ms, result.step_device_ms, result.step_bubble_ms) == (600, 2750, 250)
    (rates,) = read_off(run).throughput().results
    assert (rates.decode_step_ms, rates.decode_tokens_per_s) == (3000, pytest.approx(2 / 6, abs=0.01))
    unknown = BatchRun(1.0, (StepTime("prefill", 1.0, 1, 1), StepTime("decode", 1.0, 1, 1)), ((1.0, 2.0),))
    (result,) = read_off(unknown).latency().results
    assert (result.step_device_ms, result.step_bubble_ms) == (None, None)


def test_every_batch_is_run_as_often_as_asked_and_makes_the_tokens_asked_for() -> None:
    ticks: list[None] = []
    settings = GenerationSettings((1, 3), prompt_tokens=6, output_tokens=3, repeats=2)
    found = served(settings, tick=lambda: ticks.append(None))
    assert len(ticks) == settings.all_runs == 5
    assert [[run.batch_size for run in runs] for runs in found.runs] == [[1, 1], [3, 3]]
    for run in (run for runs in found.runs for run in runs):
        assert [len(times) for times in run.token_times] == [3] * run.batch_size
        assert sum(step.tokens for step in run.steps) == 3 * run.batch_size
        assert sum(step.positions for step in run.steps if step.kind == "prefill") == 6 * run.batch_size
        assert sum(step.seconds for step in run.steps) <= run.seconds
        assert all(list(times) == sorted(times) for times in run.token_times)


def test_the_report_names_both_types_the_load_time_and_the_peak(step_clock: Callable[[], float]) -> None:
    found = served(
        GenerationSettings((1,), prompt_tokens=2, output_tokens=2, repeats=1),
        keywords={"dtype": "bfloat16"},
        clock=step_clock,
    )
    facts = found.settings.model
    assert (facts.weight_form, facts.activation_dtype) == ("released", "bfloat16")
    assert facts.load_s == 1.0
    assert facts.peak_resident_bytes > facts.checkpoint_bytes > 0
    assert found.throughput().as_json()["settings"]["model"]["accelerator"] == "cpu_ref"  # type: ignore[index]


def test_given_prompts_are_taken_in_turn() -> None:
    settings = GenerationSettings((3,), prompt_tokens=99, output_tokens=2, repeats=1)
    found = served(settings, prompts=["Hi", [5, 6, 7, 8]])
    assert found.settings.generation.prompt_tokens == 4
    assert found.settings.generation.has_given_prompts
    prefilled = sum(step.positions for step in found.runs[0][0].steps if step.kind == "prefill")
    with model_source(None) as source:
        from deepinfer.tokenizer import Tokenizer

        tokenizer = Tokenizer.from_directory(source.directory)
        assert tokenizer is not None
        assert prefilled == 2 * len(tokenizer.encode("Hi")) + 4


def test_a_prompt_that_cannot_be_served_is_an_error_with_its_reason() -> None:
    with pytest.raises(ArgumentError, match="ignored"):
        served(GenerationSettings((1,), output_tokens=2, repeats=1), prompts=[[10**6]])


def test_random_prompts_are_the_same_for_the_same_seed_and_hold_ordinary_ids() -> None:
    first = random_prompts(4, 50, 20, seed=1)
    assert first == random_prompts(4, 50, 20, seed=1)
    assert first != random_prompts(4, 50, 20, seed=2)
    assert {id_ for prompt in first for id_ in prompt} <= set(range(3, 18))
    assert random_prompts(1, 2, 1, seed=0) == [[0, 0]]


def test_a_named_configuration_gets_random_weights_that_are_gone_afterwards(tmp_path: Path) -> None:
    made: list[int] = []
    with model_source("tiny8", "bfloat16", lambda progress: made.append(progress.done_bytes)) as source:
        assert source.name == "tiny8"
        assert source.weight_form == "bfloat16"
        assert source.directory.is_dir()
        with model_source(str(source.directory)) as again:
            assert again.directory == source.directory
    assert made[-1] > 0
    assert not source.directory.exists()


def test_a_model_that_is_neither_directory_nor_name_is_refused_with_the_names(tmp_path: Path) -> None:
    assert model_problems(None) == model_problems("tiny8") == model_problems(str(tmp_path)) == []
    (problem,) = model_problems("tiny9")
    assert "tiny8" in problem
    with pytest.raises(ArgumentError, match="tiny9"), model_source("tiny9"):
        pass
    with pytest.raises(ArgumentError, match=r"config\.json"), model_source(str(tmp_path)):
        pass


@pytest.mark.parametrize("wrong", [{"batch_sizes": ()}, {"batch_sizes": (0,)}, {"output_tokens": 1}, {"repeats": 0}])
def test_settings_that_measure_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        GenerationSettings(**wrong)  # type: ignore[arg-type]
