"""Structured output together with drafts: masks per row, and a matcher that moves on by committed tokens only.

Reported fault 31. The drafts are scripted: the plain run's tokens, tokens that the form forbids, and tokens behind its
end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from deepinfer import LLM, RequestOutput, SamplingParams
from deepinfer.engine.speculation import ModelSpeculation, Newest, Round
from deepinfer.scheduling.step import ScheduledStep

SIZES: dict[str, Any] = {"max_num_seqs": 4, "block_size": 8, "num_blocks": 40, "batch_invariant": True}


def form(**values: Any) -> SamplingParams:
    wanted = {name: values.pop(name) for name in ("regex", "ebnf", "json_schema") if name in values}
    return SamplingParams(**{"temperature": 1, "max_tokens": 14, "structured_outputs": wanted or None, **values})


# A form with an end, three that are cut by the length and fill the cache, a banned end, a stop inside the form, and a
# free neighbour.
PARAMS = [
    form(seed=1, regex="(ab){1,4}c", logprobs=2),
    form(seed=2, regex="[a-z]{200}", max_tokens=12),
    form(seed=6, regex="[a-z]{200}", max_tokens=12),
    form(seed=7, regex="[a-z]{200}", max_tokens=12),
    form(temperature=0, regex="abc", min_tokens=6),
    form(seed=4, ebnf='root ::= "x" root | "y"', stop=("xx",)),
    form(seed=5, max_tokens=8, logprobs=2),
]


def ask(llm: LLM, params: Sequence[SamplingParams] = PARAMS) -> list[RequestOutput]:
    records = llm.generate(["Hello! Hello! Hello"] * len(params), list(params), use_tqdm=False)
    llm.engine.check_invariants()
    assert llm.engine.stats().free_blocks == llm.engine.stats().usable_blocks
    return records


def shown(records: Sequence[RequestOutput]) -> list[Any]:
    answers = [record.outputs[0] for record in records]
    return [
        (answer.text, answer.token_ids, answer.logprobs, answer.finish_reason, answer.stop_reason, answer.message)
        for answer in answers
    ]


@pytest.fixture(scope="module")
def plain() -> Iterator[list[RequestOutput]]:
    llm = LLM(**SIZES)
    yield ask(llm)
    llm.close()


Rule = Callable[[list[int], int], list[int]]


def script(monkeypatch: pytest.MonkeyPatch, tokens: Sequence[Sequence[int]], rule: Rule) -> None:
    """Let drafts follow a rule over the plain run's tokens that are still to come."""
    computed = ModelSpeculation._round

    def scripted(speculation: Any, step: ScheduledStep, newest: Newest, pools: Any) -> Round:
        made = computed(speculation, step, newest, pools)
        rows = []
        for context, sequence in zip(newest.block.context_R.tolist(), step.sequences, strict=True):
            behind = [*tokens[int(sequence.request_id) % len(tokens)]][context - sequence.num_prompt_tokens + 1 :]
            rows.append(rule([*behind, *[97] * speculation.drafts], speculation.drafts))
        token_ids_Rn = torch.tensor(rows)
        if made.distributions is not None:
            made.distributions.ids_RnK.fill_(-1)
            made.distributions.ids_RnK[:, :, 0] = token_ids_Rn
            made.distributions.weights_RnK.fill_(0)
            made.distributions.weights_RnK[:, :, 0] = 2**31
            made.distributions.sums_Rn.fill_(2**31)
        return made._replace(token_ids_Rn=token_ids_Rn)

    monkeypatch.setattr(ModelSpeculation, "_round", scripted)


RULES: dict[str, Rule] = {
    "exact, and beyond the end": lambda behind, count: behind[:count],
    "forbidden at the first place": lambda behind, count: [500, *behind[1:count]],
    "forbidden at the second place": lambda behind, count: [behind[0], 500, *behind[2:count]],
    "the end at once": lambda behind, count: [1, *behind[:count]][:count],
    "rejected in every step": lambda behind, count: [(token + 1) % 1376 for token in behind[:count]],
}


@pytest.fixture(scope="module", params=[False, True], ids=["one by one", "ahead"])
def coupled(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Four blocks of eight positions: too few for all answers at once. The forms are compiled beforehand."""
    options = {"num_blocks": 5, "num_speculative_tokens": 3, "verification": "coupled"}
    llm = LLM(**SIZES | options, async_scheduling=request.param)
    ask(llm)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def standard() -> Iterator[LLM]:
    llm = LLM(**SIZES, num_speculative_tokens=3)
    yield llm
    llm.close()


@pytest.mark.parametrize("rule", RULES)
def test_coupled_drafts_change_no_structured_answer(
    plain: list[RequestOutput], coupled: LLM, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    script(monkeypatch, [record.outputs[0].token_ids for record in plain], RULES[rule])
    before = coupled.engine.stats()
    assert shown(ask(coupled)) == shown(plain)
    after = coupled.engine.stats()
    assert after.drafted_tokens > before.drafted_tokens
    if "exact" in rule or "second" in rule:
        assert after.accepted_tokens > before.accepted_tokens
    if "rejected" in rule:
        assert after.preemptions > before.preemptions


def test_planning_ahead_changes_no_structured_answer(plain: list[RequestOutput]) -> None:
    """A mask is that of committed tokens: it is made after the step before was read."""
    llm = LLM(**SIZES, async_scheduling=True)
    assert shown(ask(llm)) == shown(plain)
    llm.close()


@pytest.mark.parametrize("rule", list(RULES)[:3])
def test_standard_drafts_leave_every_answer_in_its_language(
    plain: list[RequestOutput], standard: LLM, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    script(monkeypatch, [record.outputs[0].token_ids for record in plain], RULES[rule])
    records = ask(standard)
    languages = [r"(ab){1,4}c", *[r"[a-z]*"] * 3, r"abc", r"x*y?"]
    for record, language in zip(records, languages, strict=False):
        (answer,) = record.outputs
        assert answer.finish_reason in ("stop", "length"), answer
        if answer.finish_reason == "stop" and answer.stop_reason is None:
            assert re.fullmatch(language, answer.text)
    assert shown(records)[4] == shown(plain)[4]  # temperature 0
