"""What raises ends what it must end and nothing else; nothing leaks, and the engine stays usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepinfer.errors import ArgumentError
from deepinfer_conformance.drivers import (
    Calls,
    Fault,
    FaultKind,
    FaultyDriver,
    InjectedFaultError,
    NullDriver,
    OracleDriver,
)

DENSE_PRODUCTS_OF_A_STEP = 29


class CutOffError(Exception):
    """Raised by the tests in the middle of something."""


class HookedWorker:
    """The engine's worker with a hook before launch and one after read-back."""

    def __init__(self, worker: Any, hook: Callable[[str], None]) -> None:
        self._worker = worker
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def copy(self, step: Any) -> None:
        self._hook("before launch")
        self._worker.copy(step)

    def run(self, *args: Any) -> Any:
        result = self._worker.run(*args)
        self._hook("after read-back")
        return result


def interrupt(seconds: float = 0.0) -> None:
    raise KeyboardInterrupt


def at(place: str, number: int) -> Callable[[str], None]:
    """A hook that interrupts the ``number``-th time that ``place`` is passed."""
    passed = []

    def hook(here: str) -> None:
        passed.append(here)
        if here == place and passed.count(place) == number:
            raise KeyboardInterrupt

    return hook


def cut_off(owner: Any, name: str, *, after: bool) -> None:
    """Let the next call of a method be cut off, before or after it has done its work."""
    method = getattr(owner, name)

    def once(*args: Any, **keywords: Any) -> Any:
        setattr(owner, name, method)
        if after:
            method(*args, **keywords)
        raise CutOffError

    setattr(owner, name, once)


def strike(calls: int, kind: FaultKind = FaultKind.RAISE, op: str = "attention.sparse") -> FaultyDriver:
    return FaultyDriver(OracleDriver(), [Fault(op=op, kind=kind, calls=Calls.at(calls), delay_s=1.0)], sleep=interrupt)


# attention.sparse runs four times a step, once per layer.
@pytest.mark.parametrize(
    ("call", "error"),
    [
        pytest.param(2, InjectedFaultError, id="first chunk"),
        pytest.param(7, InjectedFaultError, id="second chunk"),
        pytest.param(14, InjectedFaultError, id="decode"),
        pytest.param(14, torch.OutOfMemoryError, id="decode, out of memory"),
        pytest.param(7, KeyboardInterrupt, id="chunk in launch, interrupted"),
        pytest.param(14, KeyboardInterrupt, id="decode in launch, interrupted"),
    ],
)
def test_a_fault_ends_the_requests_of_its_step_and_no_other(drive, expected, prompt_of, call, error) -> None:
    kinds = {KeyboardInterrupt: FaultKind.DELAY, torch.OutOfMemoryError: FaultKind.OUT_OF_MEMORY}
    engine = drive(strike(call, kinds.get(error, FaultKind.RAISE)), max_num_batched_tokens=8, max_num_seqs=1)
    engine.add("struck", prompt_of(12), max_tokens=5)
    engine.add("spared", prompt_of(9, 1), max_tokens=5)
    with pytest.raises(error):
        engine.drain()
    assert engine.engine.has_unfinished_requests()
    engine.drain()
    struck, spared = engine.answer("struck"), engine.answer("spared")
    assert struck.finish_reason == "abort"
    assert error.__name__ in struck.message
    assert list(struck.token_ids) == expected(prompt_of(12), 5)[: len(struck.token_ids)]
    assert (spared.finish_reason, list(spared.token_ids)) == ("length", expected(prompt_of(9, 1), 5))


@pytest.mark.parametrize("place", ["before launch", "after read-back"])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_an_interrupt_at_every_hook_leaves_the_engine_usable(oracle, expected, prompt_of, place, number) -> None:
    engine = oracle(max_num_batched_tokens=8, max_num_seqs=2)
    worker = engine.engine._loop.worker
    engine.engine._loop.worker = HookedWorker(worker, at(place, number))
    for name in ("a", "b", "c"):
        engine.add(name, prompt_of(11, ord(name)), max_tokens=4)
    with pytest.raises(KeyboardInterrupt):
        engine.drain()
    engine.engine.check_invariants()
    engine.drain()
    assert "abort" in {engine.answer(name).finish_reason for name in "abc"}
    for name in ("a", "b", "c"):
        told = engine.tokens(name)
        assert told == expected(prompt_of(11, ord(name)), 4)[: len(told)]
    engine.add("next", prompt_of(11), max_tokens=4)
    engine.drain()
    assert engine.tokens("next") == expected(prompt_of(11), 4)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("method", ["schedule", "commit", "take_terminals"])
def test_a_step_cut_off_between_its_books_ends_every_request_once(
    oracle, expected, prompt_of, method, steps, after
) -> None:
    engine = oracle(max_num_batched_tokens=8)
    engine.add("a", prompt_of(11), max_tokens=9)
    engine.add("b", prompt_of(3, 1), max_tokens=9)
    engine.add("refused", [])
    engine.step(steps)
    cut_off(engine.engine._books.scheduler, method, after=after)
    with pytest.raises(CutOffError):
        engine.engine.step()
    engine.drain()
    for name in ("a", "b"):
        answer = engine.answer(name)
        assert answer.finish_reason == "abort"
        assert "interrupted" in answer.message
    assert engine.answer("refused").finish_reason == "ignored"
    engine.add("a", prompt_of(11), max_tokens=9)
    engine.drain()
    assert engine.tokens("a") == expected(prompt_of(11), 9)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_answer_cut_off_while_it_takes_a_token_stays_whole(uniform, prompt_of, after) -> None:
    engine = uniform()
    engine.add("a", prompt_of(3), max_tokens=9, logprobs=1)
    engine.step(2)
    cut_off(engine.engine._books.table, "note_growth", after=after)
    with pytest.raises(CutOffError):
        engine.engine.step()
    engine.drain()
    answer = engine.answer("a")
    assert answer.finish_reason == "abort"
    assert len(answer.logprobs) == len(answer.token_ids) == 3


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", ["add", "abort", "discard", "fork"])
def test_a_call_between_steps_that_is_cut_off_leaves_the_engine_usable(
    oracle, expected, prompt_of, call, after
) -> None:
    engine = oracle()
    engine.add("first", prompt_of(5), max_tokens=9)
    engine.step(2)
    method, act = {
        "add": ("add", lambda: engine.engine.add_request("second", prompt_of(4))),
        "abort": ("abort", lambda: engine.engine.abort_request("first")),
        "discard": ("abort", lambda: engine.engine.discard_requests(["first"])),
        "fork": ("fork", lambda: engine.engine.fork_request("first", "second")),
    }[call]
    cut_off(engine.engine._books.scheduler, method, after=after)
    with pytest.raises(CutOffError):
        act()
    engine.records["second"] = []
    ended = {output.request_id: output for output in engine.step()}
    assert ended["first"].outputs[0].finish_reason == "abort"
    assert set(ended) == ({"first", "second"} if call in ("add", "fork") else {"first"})
    if "second" not in ended:
        del engine.records["second"]
    engine.audit()
    engine.add("second", prompt_of(5), max_tokens=9)
    engine.drain()
    assert engine.tokens("second") == expected(prompt_of(5), 9)


def test_a_driver_that_always_fails_ends_every_request(drive, prompt_of) -> None:
    driver = FaultyDriver(NullDriver(), [Fault(op="memory.*", kind=FaultKind.RAISE)])
    engine = drive(driver, max_num_batched_tokens=7)
    for number in range(3):
        engine.add(str(number), prompt_of(7, number))
    failed = 0
    while failed < 10 and engine.engine.stats().num_waiting:
        with pytest.raises(InjectedFaultError):
            engine.engine.step()
        failed += 1
    engine.drain()
    assert failed == 3
    assert {engine.answer(str(number)).finish_reason for number in range(3)} == {"abort"}


def test_a_failed_copy_of_a_fork_is_made_good_by_computing_it_again(oracle, expected, prompt_of) -> None:
    """The child waits for a seat, so it is not in the step that carries its copies."""
    engine = oracle(max_num_seqs=1, num_state_slots=4)
    engine.engine._loop.worker = HookedWorker(engine.engine._loop.worker, at("before launch", 4))
    engine.add("parent", prompt_of(6), max_tokens=20)
    engine.step(3)
    engine.fork("parent", "child", max_tokens=5)
    engine.poison("nan")
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.drain()
    history = [*prompt_of(6), *engine.tokens("parent")]
    assert engine.answer("parent").finish_reason == "abort"
    assert engine.tokens("child") == expected(history, 5)


def test_a_request_whose_step_failed_cannot_be_forked(drive, prompt_of) -> None:
    engine = drive(strike(2))
    engine.add("parent", prompt_of(6))
    with pytest.raises(InjectedFaultError):
        engine.step()
    with pytest.raises(ArgumentError, match="no living request 'parent'"):
        engine.fork("parent", "child")
    assert engine.engine.abort_request("parent") is False
    engine.drain()
    assert engine.answer("parent").finish_reason == "abort"


@pytest.mark.parametrize(("amount", "words"), [("nan", "NaN"), ("inf", "NaN or +inf")])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_row_that_is_not_a_number_ends_its_request_alone(drive, expected, prompt_of, step, amount, words) -> None:
    """Row 0 is the longest history's; the head is the last of a step's dense products."""
    fault = Fault(
        op="linear.dense",
        kind=FaultKind.NAN if amount == "nan" else FaultKind.VALUE,
        calls=Calls.at(DENSE_PRODUCTS_OF_A_STEP * step),
        row=0,
        element=5,
        amount=float("inf"),
    )
    engine = drive(FaultyDriver(OracleDriver(), [fault]))
    engine.add("struck", prompt_of(9), max_tokens=6, logprobs=2)
    engine.add("spared", prompt_of(4, 1), max_tokens=6, logprobs=2)
    engine.drain()
    struck, spared = engine.answer("struck"), engine.answer("spared")
    assert struck.finish_reason == "invalid"
    assert words in struck.message
    assert len(struck.token_ids) == len(struck.logprobs) == step - 1
    assert (spared.finish_reason, list(spared.token_ids)) == ("length", expected(prompt_of(4, 1), 6))
    assert all(0 <= token < 101 for token in struck.token_ids)


def test_a_request_with_every_token_masked_ends_alone_with_a_text(uniform, prompt_of) -> None:
    engine = uniform()
    engine.add("masked", prompt_of(4), max_tokens=6, allowed_token_ids=[7], blacklist_token_ids=[7])
    engine.add("spared", prompt_of(4, 1), max_tokens=6, allowed_token_ids=[7])
    engine.drain()
    masked = engine.answer("masked")
    assert (masked.finish_reason, masked.token_ids) == ("invalid", ())
    assert "every token is masked" in masked.message
    assert engine.tokens("spared") == [7] * 6
