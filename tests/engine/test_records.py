"""Records: one terminal each, with the reason that made it; cumulative, cheap, in order, and writable as JSON."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
from pathlib import Path
from typing import get_args

import pytest

from deepinfer.engine.growing import Prefix
from deepinfer.engine.outputs import CompletionOutput, FinishReason
from deepinfer.errors import InvariantError
from deepinfer.scheduling.states import FINISH_REASONS, Status

END = 1
PAGE = Path(__file__).parents[2] / "docs" / "finish-reasons.md"


def test_a_record_copies_its_tokens_only_when_somebody_reads_them() -> None:
    """The cost of a step must not grow with the length of what was made before."""
    tokens = [5, 6, 7]
    record = CompletionOutput(0, "", Prefix(tokens, 2), None, None)
    assert isinstance(vars(record)["_token_ids"], Prefix)
    tokens.append(8)
    assert record.token_ids == (5, 6)
    assert record.token_ids is record.token_ids
    assert not isinstance(vars(record)["_token_ids"], Prefix)


def test_a_record_behaves_like_any_frozen_dataclass() -> None:
    tokens = [5, 6, 7]
    record = CompletionOutput(0, "ab", Prefix(tokens, 2), Prefix([{5: -0.5}, {6: -1.0}], 2), None)
    plain = CompletionOutput(0, "ab", (5, 6), ({5: -0.5}, {6: -1.0}), None)
    assert record == plain
    assert repr(record) == repr(plain)
    pickled = pickle.loads(pickle.dumps(record))  # noqa: S301 - our own bytes
    for twin in (copy.deepcopy(record), pickled, dataclasses.replace(record)):
        assert twin == plain
    assert dataclasses.asdict(record)["token_ids"] == (5, 6)
    assert dataclasses.replace(record, finish_reason="stop").token_ids == (5, 6)
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.token_ids = ()


def test_records_are_cumulative_and_keep_what_they_said(oracle, expected, prompt_of) -> None:
    engine = oracle()
    engine.add("a", prompt_of(5), max_tokens=6)
    engine.drain()
    tokens = expected(prompt_of(5), 6)
    assert [list(record.outputs[0].token_ids) for record in engine.records["a"]] == [
        tokens[:count] for count in range(1, 7)
    ]
    assert [record.outputs[0].finish_reason for record in engine.records["a"]] == [None] * 5 + ["length"]


def test_records_of_a_step_come_in_the_order_of_admission(drive, prompt_of) -> None:
    """Rows run longest history first; records do not."""
    engine = drive()
    lengths = {"short": 2, "long": 9, "middle": 5}
    for name, length in lengths.items():
        engine.add(name, prompt_of(length), max_tokens=3)
    engine.step()
    engine.add("refused", [])
    outputs = engine.step()
    assert [row.request_id for row in engine.steps[-1].rows] == ["long", "middle", "short"]
    assert [output.request_id for output in outputs] == ["short", "long", "middle", "refused"]
    engine.drain()


def test_an_id_may_be_used_again_after_its_terminal_record_and_gets_no_old_token(drive, prompt_of) -> None:
    engine = drive()
    engine.add("a", prompt_of(3), max_tokens=2, golden_token_ids=[7, 8])
    engine.drain()
    assert engine.tokens("a") == [7, 8]
    engine.add("a", prompt_of(3), max_tokens=2, golden_token_ids=[9, 9])
    engine.engine.abort_request("a")
    engine.drain()
    assert engine.tokens("a") == []
    engine.add("a", prompt_of(3), max_tokens=1, golden_token_ids=[6])
    engine.drain()
    assert engine.tokens("a") == [6]


def test_every_end_gives_one_terminal_record_with_its_own_reason_and_sampled_tokens_only(drive, prompt_of) -> None:
    """Two answers each; how a step's failure and a row that is not a number end is test_failures' part."""
    engine = drive(num_blocks=1 + 14, max_model_len=40, stop_preempted_requests=True)
    forced = [7] * 40
    engine.add("stop", prompt_of(3), max_tokens=9, n=2, golden_token_ids=[7, END])
    engine.add("stop id", prompt_of(3), max_tokens=9, n=2, golden_token_ids=[7, 8], stop_token_ids=[8])
    engine.add("length", prompt_of(3), max_tokens=2, n=2, golden_token_ids=forced)
    engine.add("ignored", prompt_of(80), max_tokens=2, n=2)
    engine.step(3)
    engine.add("abort", prompt_of(3), max_tokens=9, n=2, golden_token_ids=forced)
    engine.step(3)
    engine.engine.abort_request("abort")
    engine.drain()
    engine.add("memory", prompt_of(20), max_tokens=15, n=2, golden_token_ids=forced)
    engine.drain()
    told = {
        name: [(answer.finish_reason, answer.stop_reason, list(answer.token_ids)) for answer in records[-1].outputs]
        for name, records in engine.records.items()
    }
    assert told["stop"] == [("stop", None, [7, END])] * 2
    assert told["stop id"] == [("stop", 8, [7, 8])] * 2
    assert told["length"] == [("length", None, [7, 7])] * 2
    assert told["ignored"] == [("ignored", None, [])] * 2
    assert told["abort"] == [("abort", None, [7, 7, 7])] * 2
    # 14 blocks hold 28 positions of each: one of the two makes room for the other.
    assert sorted(told["memory"]) == [("insufficient_system_resource", None, [7] * 9), ("length", None, [7] * 15)]


def test_discarding_one_request_loses_no_record_of_another(drive, prompt_of) -> None:
    engine = drive()
    for name in ("kept", "gone", "aborted"):
        engine.add(name, prompt_of(3), max_tokens=2)
    engine.step()
    engine.add("refused", [])
    engine.engine.abort_request("aborted")
    engine.engine.discard_requests(["gone", "unknown"])
    del engine.records["gone"]
    engine.drain()
    reasons = {name: engine.answer(name).finish_reason for name in engine.records}
    assert reasons == {"kept": "length", "aborted": "abort", "refused": "ignored"}


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"allowed_token_ids": [4, 9], "logprobs": 5}, id="two tokens allowed, five asked"),
        pytest.param({"first_n_token_no_eos": 1, "logprobs": 200}, id="end token banned, all asked"),
        pytest.param({"top_k": 1, "logprobs": 5}, id="one kept, five asked"),
        pytest.param({"temperature": 0.0, "logprobs": 0}, id="only the chosen one"),
        pytest.param({"top_k": 1, "logprobs": 3, "raw_logprobs": True}, id="raw"),
        pytest.param({"top_k": 1, "golden_token_ids": [77], "logprobs": 2}, id="forced outside the kept set"),
    ],
)
def test_log_probabilities_can_be_written_as_json_and_list_what_has_mass(uniform, prompt_of, params) -> None:
    engine = uniform()
    engine.add("a", prompt_of(4), max_tokens=1, prompt_logprobs=2, **params)
    engine.drain()
    line = json.loads(json.dumps(engine.records["a"][-1].as_json(), allow_nan=False))
    (entry,) = line["outputs"][0]["logprobs"]
    (token,) = line["outputs"][0]["token_ids"]
    assert str(token) in entry
    assert all(math.isfinite(value) for value in entry.values())
    if params.get("allowed_token_ids"):
        assert set(entry) == {"4", "9"}
        assert sum(map(math.exp, entry.values())) == pytest.approx(1.0)
    if params.get("first_n_token_no_eos"):
        assert "1" not in entry
        assert sum(map(math.exp, entry.values())) == pytest.approx(1.0)
    assert line["prompt_logprobs"][0] is None
    assert len(line["prompt_logprobs"]) == 4


def test_the_words_of_the_records_are_those_of_the_scheduler_and_of_the_page() -> None:
    words = set(get_args(FinishReason))
    assert words == set(FINISH_REASONS.values())
    rows = [line.split("|")[1].strip().strip("`") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(words)


def test_a_table_that_lost_a_record_is_noticed(drive, prompt_of) -> None:
    engine = drive()
    engine.add("a", prompt_of(3))
    engine.step()
    table = engine.engine._books.table
    (answer,) = table.find("a").answers
    answer.finish(answer.end_unscheduled(Status.FINISHED_ABORTED, "behind the table's back"))
    with pytest.raises(InvariantError, match="'a'"):
        engine.engine.check_invariants()
