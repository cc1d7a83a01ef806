"""Drafts through the whole engine, on the packaged model: what is emitted, listed and ended is that of plain decoding.

Most prompts are no text of its world, so that it is asked to ignore its stop token. Where accepted drafts are wanted,
the rounds are computed as ever, and then a script takes their place: the plain run's tokens, every fifth one wrong.

Reported faults: 5, 14, 29, 30, 35, 62.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from deepinfer import LLM, RequestOutput, SamplingParams
from deepinfer.accelerator.ops.sampling import RowStatus
from deepinfer.engine.speculation import ModelSpeculation, Newest, Round
from deepinfer.errors import ConfigurationError
from deepinfer.sampling.sampler import SampledRow
from deepinfer.scheduling.step import ScheduledStep

ROOMY = {"max_num_seqs": 8, "num_blocks": 40, "block_size": 8, "max_num_batched_tokens": 24, "batch_invariant": True}
TIGHT = {**ROOMY, "num_blocks": 10}
MOST_TOKENS = 9

# One request for each way in which a token can depend on those before it, or on what is asked about it.
MIX: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0, "logprobs": 3, "prompt_logprobs": 1},
    {"temperature": 1, "seed": 1, "logprobs": 2},
    {"temperature": 0.6, "seed": 2, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "logprobs": 1, "n": 2},
    {"temperature": 0.5, "seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    {"temperature": 1, "seed": 4, "logit_bias": {7: 9.0, 9: 9.0}, "blacklist_token_ids": (9,), "raw_logprobs": True}
    | {"logprobs": 4},
    {"temperature": 1, "seed": 5, "allowed_token_ids": (1, 5, 6), "min_tokens": 4, "logprobs": 2},
    {"temperature": 1, "seed": 6, "golden_token_ids": (-1, 40, 41, -1, 42), "logprobs": 2},
)
PROMPTS: tuple[Any, ...] = ("Hello world", [5, 6, 7] * 9, "a", [3] * 12, "xyz", [400, 2, 9], list(range(30, 47)))

Drafts = Mapping[str, Sequence[int]]


class Script:
    """Replaces the drafts of every round."""

    def __init__(self, tokens: Drafts, *, wrong_one_in: int = 5, vocab_size: int = 1376) -> None:
        self.tokens = tokens
        self.wrong_one_in = wrong_one_in
        self.vocab_size = vocab_size
        self.round = ModelSpeculation._round

    def drafts(self, request_id: str, made: int, count: int) -> list[int]:
        """Drafts behind the first ``made`` outputs and the newest one."""
        known = [*self.tokens.get(request_id, ()), *([11] * (made + count + 1))]
        places = range(made + 1, made + 1 + count)
        return [(known[at] + (at % self.wrong_one_in == 3)) % self.vocab_size for at in places]

    def __call__(self, speculation: Any, step: ScheduledStep, newest: Newest, pools: Any) -> Round:
        made = self.round(speculation, step, newest, pools)
        outputs = [
            context - sequence.num_prompt_tokens
            for context, sequence in zip(newest.block.context_R.tolist(), step.sequences, strict=True)
        ]
        rows = [
            self.drafts(sequence.request_id, max(count, 0), speculation.drafts)
            for sequence, count in zip(step.sequences, outputs, strict=True)
        ]
        token_ids_Rn = torch.tensor(rows)
        if made.distributions is not None:  # drawn from a distribution that allows nothing else
            made.distributions.ids_RnK.fill_(-1)
            made.distributions.ids_RnK[:, :, 0] = token_ids_Rn
            made.distributions.weights_RnK.fill_(0)
            made.distributions.weights_RnK[:, :, 0] = 2**31
            made.distributions.sums_Rn.fill_(2**31)
        return made._replace(token_ids_Rn=token_ids_Rn)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(tokens: Drafts, **options: int) -> None:
        scripted = Script(tokens, **options)
        monkeypatch.setattr(ModelSpeculation, "_round", lambda *args: scripted(*args))

    return install


def ask(prompts: Sequence[Any], params: Sequence[SamplingParams], **options: Any) -> tuple[list[RequestOutput], LLM]:
    llm = LLM(**options)
    before = llm.engine.stats()
    records = llm.generate(list(prompts), list(params), use_tqdm=False)
    stats = llm.engine.stats()
    llm.engine.check_invariants()
    assert (stats.free_blocks, stats.free_state_slots) == (before.free_blocks, before.free_state_slots)
    return records, llm


def tokens_of(records: Sequence[RequestOutput]) -> dict[str, tuple[int, ...]]:
    """Tokens by the ids under which the scheduler knows the answers."""
    return {
        record.request_id if len(record.outputs) == 1 else f"{record.request_id}/{answer.index}": answer.token_ids
        for record in records
        for answer in record.outputs
    }


def shown(records: Sequence[RequestOutput]) -> list[Any]:
    """Everything that a user sees."""
    return [
        (
            *(record.prompt_logprobs, answer.text, answer.token_ids, answer.logprobs),
            *(answer.finish_reason, answer.stop_reason, answer.message),
        )
        for record in records
        for answer in record.outputs
    ]


def mixed() -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=MOST_TOKENS - number % 3, ignore_eos="min_tokens" not in values, **values)
        for number, values in enumerate(MIX)
    ]


@pytest.fixture(scope="module")
def plain() -> list[RequestOutput]:
    return ask(PROMPTS, mixed(), **ROOMY)[0]


AHEAD = {"async_scheduling": True}


@pytest.mark.parametrize(
    ("drafts", "sizes"),
    [
        *[(1, TIGHT), (2, ROOMY), (3, ROOMY), (4, TIGHT), (5, ROOMY)],
        *[(1, {**ROOMY, **AHEAD}), (2, {**TIGHT, **AHEAD}), (3, {**ROOMY, **AHEAD})],
    ],
)
def test_coupled_drafts_change_nothing_that_a_user_sees(plain, script, drafts: int, sizes: dict[str, Any]) -> None:
    """Level R4, faults 33 and 62: whatever is asked for, drafts accepted and rejected, requests preempted or not."""
    script(tokens_of(plain))
    records, llm = ask(PROMPTS, mixed(), num_speculative_tokens=drafts, verification="coupled", **sizes)
    assert shown(records) == shown(plain)
    stats = llm.engine.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert (stats.preemptions > 0) is (sizes["num_blocks"] == TIGHT["num_blocks"])


@pytest.mark.parametrize("sizes", [ROOMY, TIGHT])
def test_planning_ahead_changes_nothing_that_a_user_sees(plain, sizes: dict[str, Any]) -> None:
    records, llm = ask(PROMPTS, mixed(), **AHEAD, **sizes)
    assert shown(records) == shown(plain)
    assert (llm.engine.stats().preemptions > 0) is (sizes is TIGHT)


@pytest.mark.parametrize(("drafts", "wrong_one_in"), [(1, 2), (2, 5), (3, 10**9)])
def test_standard_drafts_planned_ahead_give_what_they_give_one_step_at_a_time(
    plain, script, drafts: int, wrong_one_in: int
) -> None:
    """The same draws for the same tokens and drafts, however many of them were accepted in the step before."""
    script(tokens_of(plain), wrong_one_in=wrong_one_in)
    options = {"num_speculative_tokens": drafts, **ROOMY}
    one_by_one, llm = ask(PROMPTS, mixed(), **options)
    ahead, llm_ahead = ask(PROMPTS, mixed(), **AHEAD, **options)
    assert shown(ahead) == shown(one_by_one)
    before, after = llm.engine.stats(), llm_ahead.engine.stats()
    assert (after.drafted_tokens, after.accepted_tokens) == (before.drafted_tokens, before.accepted_tokens)
    assert after.accepted_tokens > 0


def test_the_models_own_drafts_change_nothing_in_coupled_verification(plain) -> None:
    records, llm = ask(PROMPTS, mixed(), num_speculative_tokens=3, verification="coupled", **TIGHT)
    assert shown(records) == shown(plain)
    assert llm.engine.stats().drafted_tokens > 0


GREEDY = [
    SamplingParams(temperature=0, max_tokens=8, logprobs=2, presence_penalty=value, ignore_eos=True)
    for value in (0, 0.5, 1)
]


@pytest.fixture(scope="module")
def greedy() -> list[RequestOutput]:
    return ask(PROMPTS[:3], GREEDY, **ROOMY)[0]


@pytest.mark.parametrize("is_scripted", [True, False])
def test_standard_drafts_change_nothing_at_temperature_0(greedy, script, is_scripted: bool) -> None:  # noqa: FBT001
    if is_scripted:
        script(tokens_of(greedy))
    records, llm = ask(PROMPTS[:3], GREEDY, num_speculative_tokens=4, **ROOMY)
    assert shown(records) == shown(greedy)
    stats = llm.engine.stats()
    assert is_scripted <= stats.accepted_tokens < stats.drafted_tokens


def test_a_drafted_token_takes_no_step_of_its_own(greedy, script) -> None:
    script(tokens_of(greedy), wrong_one_in=10**9)
    one_by_one = {**ROOMY, "async_scheduling": False}
    _, plain_llm = ask(["Hello world"], GREEDY[:1], **one_by_one)
    _, llm = ask(["Hello world"], GREEDY[:1], num_speculative_tokens=5, **one_by_one)
    assert plain_llm.engine.stats().steps == 8
    assert llm.engine.stats().steps == 3  # one token, six tokens, and the last one


def test_standard_drafts_repeat_themselves_alone_and_among_others() -> None:
    """Fault 35: mixed settings, each as alone, whatever the order."""
    options = {"num_speculative_tokens": 2, **ROOMY}
    values = ({"temperature": 1}, {"temperature": 0.4, "top_k": 5}, {"temperature": 2, "top_p": 0.5})
    params = [SamplingParams(seed=9, max_tokens=4, logprobs=1, **each) for each in values]
    together, llm = ask(PROMPTS[:3], params, **options)
    turned = llm.generate([*PROMPTS[2::-1]], params[::-1], use_tqdm=False)
    assert shown(turned[::-1]) == shown(together)
    alone = [llm.generate([prompt], [each], use_tqdm=False)[0] for prompt, each in zip(PROMPTS, params, strict=False)]
    assert shown(alone) == shown(together)


@pytest.mark.parametrize(("nth", "is_ahead"), [(1, False), (3, False), (4, False), (3, True)])
def test_stops_inside_a_run_end_everything_at_once(greedy, script, nth: int, is_ahead: bool) -> None:  # noqa: FBT001
    """Fault 14: ids, text, log-probabilities and reason; with exact drafts the run reaches beyond the stop."""
    first = greedy[0].outputs[0]
    tokens = first.token_ids
    tokenizer = LLM(**ROOMY).get_tokenizer()
    word = tokenizer.decode(tokens[nth : nth + 1])
    ways: list[dict[str, Any]] = [{"stop_token_ids": (tokens[nth],)}, {"stop": (word,)}]
    ways += [{"stop": (word,), "include_stop_str_in_output": True}, {"max_tokens": nth + 1}]
    params = [
        SamplingParams(**{"temperature": 0, "max_tokens": 8, "logprobs": 2, "ignore_eos": True, **way}) for way in ways
    ]
    expected, _ = ask([PROMPTS[0]] * len(ways), params, **ROOMY)
    script(dict.fromkeys(map(str, range(len(ways))), tokens), wrong_one_in=10**9)
    options = {"num_speculative_tokens": 5, "async_scheduling": is_ahead, **ROOMY}
    records, llm = ask([PROMPTS[0]] * len(ways), params, **options)
    assert shown(records) == shown(expected)
    assert llm.engine.stats().accepted_tokens > 0
    for record in records:
        assert len(record.outputs[0].logprobs) == len(record.outputs[0].token_ids) <= nth + 1


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("verification", ["standard", "coupled"])
def test_the_context_limit_cuts_drafts_and_answers_as_without_them(
    script,
    verification: str,
    is_ahead: bool,  # noqa: FBT001
) -> None:
    """Fault 5."""
    sizes = {**ROOMY, "max_model_len": 32}
    prompts = [[7 + length] * length for length in (26, 29, 31, 32)]
    params = [SamplingParams(temperature=0, max_tokens=90, logprobs=1, ignore_eos=True) for _ in prompts]
    expected, _ = ask(prompts, params, **sizes)
    script(tokens_of(expected))
    options = {"num_speculative_tokens": 5, "verification": verification, "async_scheduling": is_ahead, **sizes}
    records, _ = ask(prompts, params, **options)
    assert shown(records) == shown(expected)
    assert [len(record.outputs[0].token_ids) for record in records] == [7, 4, 2, 1]
    assert {record.outputs[0].finish_reason for record in records} == {"length"}


def lives(
    drafts: int, script: Callable[..., None] | None, tokens: Drafts, *, is_ahead: bool = False
) -> Iterator[tuple[str, Any]]:
    """Requests that are forked and aborted between steps, by ids of ours."""
    if script is not None:
        script(tokens)
    llm = LLM(num_speculative_tokens=drafts, verification="coupled", async_scheduling=is_ahead, **ROOMY)
    engine = llm.engine
    engine.add_request("parent", [5, 6, 7, 8, 9], SamplingParams(seed=1, max_tokens=12, logprobs=1, ignore_eos=True))
    engine.add_request("gone", [9] * 7, SamplingParams(seed=2, max_tokens=30, ignore_eos=True))
    last: dict[str, RequestOutput] = {}
    forked = False
    while engine.has_unfinished_requests():
        for record in engine.step():
            last[record.request_id] = record
        engine.check_invariants()
        parent = last.get("parent")
        if not forked and parent is not None and len(parent.outputs[0].token_ids) >= 2:
            made = len(parent.outputs[0].token_ids)
            engine.abort_request("gone")
            engine.fork_request(
                "parent", "child", SamplingParams(seed=1, max_tokens=13 - made, logprobs=1, ignore_eos=True)
            )
            forked = True
            yield "made", made
    assert engine.stats().free_blocks == engine.stats().usable_blocks
    yield from last.items()


@pytest.mark.parametrize("is_ahead", [False, True])
def test_forks_and_aborts_between_steps_leave_no_draft_behind(script, is_ahead: bool) -> None:  # noqa: FBT001
    """Fault 29: a fork begins with placeholders and goes on as its parent, whose seed it has, goes on."""
    expected = dict(lives(0, None, {}))
    parent = expected["parent"].outputs[0]
    found = dict(lives(3, script, {"parent": parent.token_ids, "child": parent.token_ids}, is_ahead=is_ahead))
    assert found["gone"].outputs[0].finish_reason == "abort"
    answer = found["parent"].outputs[0]
    assert (answer.token_ids, answer.logprobs) == (parent.token_ids, parent.logprobs)
    child = found["child"].outputs[0]
    assert (child.token_ids[:-1], child.logprobs[:-1]) == (
        parent.token_ids[found["made"] :],
        parent.logprobs[found["made"] :],
    )


def test_a_slot_that_changed_hands_holds_no_drafts() -> None:
    """Fault 29: the fork gets the slot, not the drafts, of a request that is gone; its first step gives one token."""
    engine = LLM(num_speculative_tokens=3, num_state_slots=3, async_scheduling=False, **ROOMY).engine
    engine.add_request("parent", [5, 6, 7], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    engine.add_request("gone", [9] * 7, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    engine.step()
    engine.step()
    assert engine.stats().drafted_tokens == 6
    engine.abort_request("gone")
    engine.fork_request("parent", "child", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    records = {record.request_id: record for record in engine.step()}
    assert engine.stats().drafted_tokens == 9  # the parent's
    assert len(records["child"].outputs[0].token_ids) == 1
    engine.step()
    assert engine.stats().drafted_tokens == 15


def test_an_interrupted_engine_begins_again_without_drafts(script, greedy) -> None:
    """Fault 30: the epochs begin anew, and so must what lies under them."""
    llm = LLM(num_speculative_tokens=3, **ROOMY)
    script({str(number): [11] * 20 for number in range(9)})
    stream = llm.stream([PROMPTS[0]], SamplingParams(temperature=1, seed=3, max_tokens=20))
    next(stream)
    llm.engine._books.is_torn = True  # as if Ctrl-C had struck between two changes that belong together
    stream.close()
    speculation = llm.engine.worker.speculation
    assert speculation is not None
    assert (speculation._epoch_Z == -1).all()
    assert shown(llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)) == shown(greedy)


def test_a_truncated_prompt_is_drafted_for_as_it_is_decoded(script) -> None:
    sizes = {**ROOMY, "truncated_prefill": "compact", "truncated_prefill_keep_tokens": 40}
    params = [SamplingParams(temperature=1, seed=4, max_tokens=6, logprobs=1, ignore_eos=True)]
    expected, _ = ask([[8, 9, 10] * 20], params, **sizes)
    options = {"num_speculative_tokens": 3, "verification": "coupled", **sizes}
    assert shown(ask([[8, 9, 10] * 20], params, **options)[0]) == shown(expected)
    script(tokens_of(expected))
    assert shown(ask([[8, 9, 10] * 20], params, **options)[0]) == shown(expected)


def test_a_row_without_a_token_ends_the_run_before_it(greedy) -> None:
    llm = LLM(num_speculative_tokens=3, async_scheduling=False, **ROOMY)
    engine = llm.engine
    engine.add_request("a", [5, 6, 7], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    engine.step()
    worker = engine._loop.worker
    run = worker.run

    def failing(*args: Any) -> Any:
        (result,) = run(*args)
        rows = (*result.rows[:1], SampledRow(-1, RowStatus.NAN, None))
        return [result._replace(rows=rows, accepted=1)]

    worker.run = failing  # type: ignore[method-assign]
    (record,) = engine.step()
    assert (record.outputs[0].finish_reason, len(record.outputs[0].token_ids)) == ("invalid", 2)
    assert not engine.has_unfinished_requests()
    engine.check_invariants()


def test_a_model_without_draft_stages_is_refused_in_words(drive) -> None:
    with pytest.raises(ConfigurationError, match="no draft stage; run it with num_speculative_tokens=0"):
        drive(num_speculative_tokens=2)
