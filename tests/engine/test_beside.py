"""An engine that is built beside another one computes with its weights: they are in memory once."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer import SamplingParams
from deepinfer.engine.build import build_engine_on
from deepinfer.engine.engine import Engine
from deepinfer.engine.options import EngineOptions
from deepinfer.engine.speculation import ModelSpeculation
from deepinfer.errors import ArgumentError
from deepinfer.settings import Settings
from deepinfer_cpu_ref import Driver

PROMPT = list(range(9, 21))


def build(driver: Driver, beside: Engine | None = None, **options: Any) -> Engine:
    options = {"num_blocks": 20, "block_size": 8, "max_num_seqs": 2, "verification": "coupled", **options}
    return build_engine_on(driver, None, EngineOptions(**options), Settings(), beside=beside)


def answer(engine: Engine) -> list[int]:
    engine.add_request("one", PROMPT, SamplingParams(seed=3, max_tokens=12, ignore_eos=True))
    token_ids: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            token_ids = list(output.outputs[0].token_ids)
    return token_ids


def test_weights_are_in_memory_once_and_answers_are_those_of_an_engine_of_its_own() -> None:
    driver = Driver()
    first = build(driver, num_speculative_tokens=3)
    drafting, plain = (build(driver, first, num_speculative_tokens=drafts) for drafts in (2, 0))
    assert drafting.worker.weights is plain.worker.weights is first.worker.weights
    stages = [engine.worker.speculation for engine in (first, drafting)]
    assert isinstance(stages[0], ModelSpeculation)
    assert isinstance(stages[1], ModelSpeculation)
    assert stages[0].weights is stages[1].weights
    alone = answer(build(Driver()))
    assert [answer(engine) for engine in (first, drafting, plain)] == [alone] * 3


def test_stages_that_the_other_engine_lacks_are_loaded() -> None:
    driver = Driver()
    plain = build(driver)
    drafting = build(driver, plain, num_speculative_tokens=2)
    assert drafting.worker.weights is plain.worker.weights
    assert answer(drafting) == answer(plain)


def test_weights_that_were_prepared_otherwise_are_refused() -> None:
    driver = Driver()
    with pytest.raises(ArgumentError, match=r"its weights are prepared for .*float32.* are for .*bfloat16"):
        build(driver, build(driver, dtype="float32"), dtype="bfloat16")
