"""LLM: one record per prompt, in order, whatever happens to one of them; nothing left behind, whatever happens."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import deepinfer
from deepinfer import LLM, CompletionOutput, RequestOutput, SamplingParams
from deepinfer.engine.build import build_engine_on
from deepinfer.engine.options import EngineOptions
from deepinfer.errors import ArgumentError, CheckpointError, TokenizerError
from deepinfer.model.checkpoint import packaged_model_path
from deepinfer.settings import Settings
from deepinfer_conformance.drivers import Calls, Fault, FaultKind, FaultyDriver, InjectedFaultError, NullDriver
from deepinfer_cpu_ref import Driver as ReferenceDriver

GREEDY = SamplingParams(temperature=0, max_tokens=3)
VOCABULARY = 1376  # of the packaged model


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(driver: Any = None, **options: Any) -> LLM:
    given = EngineOptions(**{"num_blocks": 64, "max_num_seqs": 4, **options})
    return LLM.from_engine(build_engine_on(driver or NullDriver(), None, given, Settings()))


@pytest.fixture
def llm() -> LLM:
    """The packaged model on the null driver: tokens are 0, or what golden_token_ids says."""
    return make()


def clean(llm: LLM) -> bool:
    stats = llm.engine.stats()
    llm.engine.check_invariants()
    return (
        not llm.engine.has_unfinished_requests()
        and (stats.free_blocks, stats.free_state_slots) == (stats.usable_blocks, stats.usable_state_slots)
        and stats.num_waiting == stats.num_running == 0
    )


def says(*ids: int, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=len(ids), golden_token_ids=ids, ignore_eos=True, **params)


# --- results ---------------------------------------------------------------------------------------------------------


def test_the_packaged_model_answers_on_the_reference_driver() -> None:
    llm = make(ReferenceDriver())
    (output,) = llm.generate("Once upon a time", replace(GREEDY, ignore_eos=True), use_tqdm=False)
    assert isinstance(output, RequestOutput)
    assert output.prompt == "Once upon a time"
    assert output.prompt_token_ids == tuple(llm.engine.tokenizer.encode("Once upon a time"))
    (answer,) = output.outputs
    assert isinstance(answer, CompletionOutput)
    assert len(answer.token_ids) == 3
    assert answer.text == llm.engine.tokenizer.decode(answer.token_ids)
    best = llm.logits(output.prompt_token_ids)[-1].argmax()
    assert answer.token_ids[0] == int(best)


def test_results_come_in_the_order_of_the_prompts_one_each_refused_ones_included(llm) -> None:
    prompts = [[5] * 9, "", [6000], "a text", [], [7], [5] * 5000, "x" * 40]
    params = [says(*range(20, 20 + count)) for count in (6, 1, 1, 2, 1, 5, 1, 3)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == [
        "length", "ignored", "ignored", "length", "ignored", "length", "ignored", "length",
    ]  # fmt: skip
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 0, 0, 2, 0, 5, 0, 3]
    assert [output.prompt for output in outputs] == [None, "", None, "a text", None, None, None, "x" * 40]
    assert all(output.outputs[0].message for output in outputs if output.outputs[0].finish_reason == "ignored")
    assert all(output.finished for output in outputs)
    assert clean(llm)


@pytest.mark.parametrize(
    ("prompts", "read"),
    [
        ("hello", ["hello"]),
        (["hello"], ["hello"]),
        ([5, 6], [(5, 6)]),
        ((5, 6), [(5, 6)]),
        ([[5, 6]], [(5, 6)]),
        ([(5, 6), "hello"], [(5, 6), "hello"]),
        (np.array([5, 6]), [(5, 6)]),
        (np.array([[5, 6], [7, 8]]), [(5, 6), (7, 8)]),
        ([np.array([5, 6], np.uint16), [7]], [(5, 6), (7,)]),
        (np.array(["hello", "you"]), ["hello", "you"]),
        (torch.tensor([5, 6]), [(5, 6)]),
        (torch.tensor([[5, 6], [7, 8]]), [(5, 6), (7, 8)]),
        ((prompt for prompt in ("hello", [5])), ["hello", (5,)]),
        ([], []),
        ([[]], [()]),
    ],
)
def test_prompts_are_read_in_every_usual_form(llm, prompts, read) -> None:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt if output.prompt is not None else output.prompt_token_ids for output in outputs] == read


def test_parameters_are_shared_or_one_per_prompt(llm) -> None:
    shared = llm.generate([[5], [6]], says(7), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in shared] == [(7,), (7,)]
    single = llm.generate([[5], [6]], [says(7), says(8, 9)], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in single] == [(7,), (8, 9)]
    default = llm.generate([[5]], use_tqdm=False)
    assert len(default[0].outputs[0].token_ids) == SamplingParams().max_tokens


def test_a_call_after_another_returns_only_its_own(llm) -> None:
    first = llm.generate([[5], [6]], GREEDY, use_tqdm=False)
    second = llm.generate([[7]], GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in second] == [(7,)]
    assert {output.request_id for output in first}.isdisjoint(output.request_id for output in second)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_everything_that_is_wrong_with_a_call_is_told_at_once_and_nothing_is_queued(llm) -> None:
    prompts = ["good", 5.5, [1, "x"], "half \ud800", None, {3: 4}]
    with pytest.raises(ArgumentError) as refused:
        llm.generate(prompts, [SamplingParams(), {"n": 1}], use_tqdm=False)
    text = str(refused.value)
    for words in (
        "prompt 1 is of type float",
        "prompt 2 holds values of type str",
        "prompt 3: the text has a lone",
        "prompt 4 is of type NoneType",
        "prompt 5 is a mapping with the keys [3]",
        "sampling_params hold values of type dict",
        "2 sampling parameters for 6 prompts",
    ):
        assert words in text
    assert len(refused.value.problems) == 7
    assert clean(llm)


@pytest.mark.parametrize("prompts", [None, 5, b"bytes", {"a"}])
def test_prompts_of_a_wrong_type_are_refused(llm, prompts) -> None:
    with pytest.raises(ArgumentError, match="prompts are of type"):
        llm.generate(prompts)


@pytest.mark.parametrize("params", [5, "greedy", {"n": 1}])
def test_parameters_of_a_wrong_type_are_refused(llm, params) -> None:
    with pytest.raises(ArgumentError, match="sampling_params are of type"):
        llm.generate("a", params)


def test_a_lone_surrogate_is_the_tokenizers_error_and_names_its_prompt(llm) -> None:
    with pytest.raises(TokenizerError, match=r"prompt 1: .*surrogate.*; prompt 3: .*surrogate"):
        llm.generate(["fine", "\ud800", "fine", "x\udc00"], use_tqdm=False)
    assert clean(llm)


def test_text_without_a_tokenizer_is_refused_by_prompt(tmp_path) -> None:
    (tmp_path / "model.safetensors").symlink_to(packaged_model_path() / "model.safetensors")
    config = json.loads((packaged_model_path() / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["engram_compressed_vocab_size"] = VOCABULARY  # so that no map is read from a tokenizer
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    engine = build_engine_on(NullDriver(), tmp_path, EngineOptions(num_blocks=8), Settings())
    llm = LLM.from_engine(engine)
    with pytest.raises(ArgumentError, match=r"prompt 1 is text, but the model has no tokenizer\.json"):
        llm.generate([[5], "text"])
    (output,) = llm.generate([[5]], GREEDY, use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", (0, 0, 0))


def test_requests_that_somebody_else_queued_are_neither_run_nor_lost(llm) -> None:
    llm.engine.add_request("mine", [5], GREEDY)
    with pytest.raises(
        ArgumentError,
        match=r"the engine still has 1 unfinished requests that this call did not add; run llm\.engine\.step",
    ):
        llm.generate("a")
    with pytest.raises(ArgumentError, match="unfinished"):
        llm.stream("a")
    with pytest.raises(ArgumentError, match="unfinished"):
        llm.logits([5])
    records = []
    while llm.engine.has_unfinished_requests():
        records += llm.engine.step()
    assert records[-1].request_id == "mine"
    assert len(llm.generate("a", GREEDY, use_tqdm=False)) == 1


def test_options_and_models_are_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="did you mean 'block_size'"):
        LLM(blocksize=4)
    with pytest.raises(CheckpointError, match="no such place"):
        LLM(model="no such place", accelerator="null")


def test_the_public_names_are_there_and_no_others() -> None:
    for name in deepinfer.__all__:
        assert getattr(deepinfer, name) is not None
    assert set(deepinfer.__all__) <= set(dir(deepinfer))
    with pytest.raises(AttributeError, match="it has LLM"):
        _ = deepinfer.Engine


# --- progress, streams -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_the_bar_counts_prompts_and_reaches_exactly_its_total(llm, capsys, n) -> None:
    prompts = [[5], [], [600], [6] * 9, [7]]
    llm.generate(prompts, SamplingParams(n=n, max_tokens=2))
    shown = capsys.readouterr().err
    assert shown.rstrip().split("\r")[-1].startswith("generating: 100%")
    assert "5/5" in shown
    assert "6/5" not in shown
    llm.generate(prompts, GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_a_stream_grows_and_ends_like_the_whole(llm) -> None:
    ids = [token for letter in "xxENDyy" for token in llm.engine.tokenizer.encode(letter)]
    params = says(*ids, stop=["END"])
    records = list(llm.stream(["a", [5, 6], []], params))
    whole = llm.generate(["a", [5, 6], []], params, use_tqdm=False)
    assert len([record for record in records if record.finished]) == 3
    by_id = itertools.groupby(sorted(records, key=lambda record: int(record.request_id)), lambda r: r.request_id)
    for (_, grown), last in zip(by_id, whole, strict=True):
        texts = [record.outputs[0].text for record in grown]
        assert texts[-1] == last.outputs[0].text
        assert all(later.startswith(sooner) for sooner, later in itertools.pairwise(texts))
    assert whole[0].outputs[0].text == "xx"
    assert clean(llm)


def test_a_stream_is_refused_at_the_call_and_queues_at_the_first_record(llm) -> None:
    with pytest.raises(ArgumentError, match="prompt 0"):
        llm.stream([5.5])
    stream = llm.stream([[5], [6]], GREEDY)
    assert clean(llm)
    assert len(llm.generate([[7]], GREEDY, use_tqdm=False)) == 1
    assert next(stream).finished is False
    with pytest.raises(ArgumentError, match="unfinished"):
        llm.generate([[7]])
    stream.close()
    assert clean(llm)


def test_two_streams_do_not_mix(llm) -> None:
    first, second = llm.stream([[5]], GREEDY), llm.stream([[6]], GREEDY)
    next(first)
    with pytest.raises(ArgumentError, match="unfinished"):
        next(second)
    assert [record.finished for record in first] == [False, True]


# --- failures --------------------------------------------------------------------------------------------------------


def interrupting(llm: LLM, hook: str, number: int) -> Callable[[], None]:
    """Interrupt the next calls at the ``number``-th passing of a hook; return what takes the trap away.

    One step at a time the worker is called, planned ahead the pipeline.
    """
    loop = llm.engine._loop
    where = "worker" if loop.pipeline is None else "pipeline"
    trapped = getattr(loop, where)
    before, after = ("copy", "run") if where == "worker" else ("launch", "read")
    passed = itertools.count(1)

    class Trap:
        def __getattr__(self, name: str) -> Any:
            return partial(self.called, name) if name in (before, after) else getattr(trapped, name)

        def called(self, name: str, *args: Any) -> Any:
            self.at("before launch", name == before)
            result = getattr(trapped, name)(*args)
            self.at("after read-back", name == after)
            return result

        def at(self, here: str, is_met: bool) -> None:  # noqa: FBT001
            if is_met and here == hook and next(passed) == number:
                raise KeyboardInterrupt

    setattr(loop, where, Trap())
    return lambda: setattr(loop, where, trapped)


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("hook", ["before launch", "after read-back"])
@pytest.mark.parametrize("number", range(1, 6))
def test_a_call_interrupted_at_any_step_leaves_nothing_and_the_next_returns_only_its_own(
    hook: str,
    number: int,
    is_ahead: bool,  # noqa: FBT001
) -> None:
    llm = make(max_num_batched_tokens=16, async_scheduling=is_ahead)
    untrap = interrupting(llm, hook, number)
    prompts = [[5] * 9, "", "a text", [600], [7] * 20]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, SamplingParams(max_tokens=4), use_tqdm=False)
    assert clean(llm)
    untrap()
    outputs = llm.generate([[8], [], [9]], says(20, 21), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [(8,), (), (9,)]
    assert [output.outputs[0].token_ids for output in outputs] == [(20, 21), (), (20, 21)]


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("method", ["add", "schedule", "commit", "abort"])
def test_a_call_cut_off_between_two_books_leaves_nothing_to_the_next(method, number) -> None:
    """``abort`` is what a first Ctrl-C leads to: a second one cuts it off."""
    llm = make(max_num_batched_tokens=16)
    scheduler = llm.engine._books.scheduler
    kept, passed = getattr(scheduler, method), itertools.count(1)

    def cut_off(*args: Any, **keywords: Any) -> Any:
        result = kept(*args, **keywords)
        if next(passed) == number:
            raise KeyboardInterrupt
        return result

    setattr(scheduler, method, cut_off)
    stream = llm.stream([[5] * 9, [6], [7] * 30], SamplingParams(max_tokens=5))
    if method == "abort":
        next(stream)
    with pytest.raises(KeyboardInterrupt):
        stream.close() if method == "abort" else list(stream)
    outputs = llm.generate([[8], [9]], says(20, 21), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [(20, 21), (20, 21)]
    assert clean(llm)


def test_a_fault_of_the_driver_passes_through_and_leaves_nothing() -> None:
    driver = FaultyDriver(NullDriver(), [Fault(op="attention.sparse", kind=FaultKind.RAISE, calls=Calls.at(11))])
    llm = make(driver)
    with pytest.raises(InjectedFaultError):
        llm.generate([[5], [6], []], SamplingParams(max_tokens=4), use_tqdm=False)
    assert clean(llm)
    assert [output.outputs[0].token_ids for output in llm.generate([[7], [8]], says(9), use_tqdm=False)] == [(9,)] * 2


def test_a_bar_that_cannot_be_drawn_leaves_nothing_queued(llm, monkeypatch) -> None:
    def broken(*args: Any, **keywords: Any) -> Any:
        raise BrokenPipeError

    monkeypatch.setattr("deepinfer.llm.tqdm", broken)
    with pytest.raises(BrokenPipeError):
        llm.generate([[5]])
    assert clean(llm)


def test_logits_of_the_face_are_those_of_the_engine(llm) -> None:
    assert llm.logits([5, 6, 7]).shape == (3, VOCABULARY)
    with pytest.raises(ArgumentError, match=str(VOCABULARY)):
        llm.logits([VOCABULARY])
    with pytest.raises(ArgumentError, match="flags"):
        llm.logits([5], [True, False])
    assert clean(llm)
