"""An engine whose ranks are lost gives everything up: every request has its last record, whatever the device says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from deepinfer import SamplingParams
from deepinfer_conformance.drivers import OracleDriver

WHY = "rank 1 did not join"


def begun(drive: Callable[..., Any], *, ahead: bool) -> Any:
    """Return an engine with one request that has ended, one that grows, and one that was refused."""
    engine = drive(OracleDriver(), async_scheduling=ahead).engine
    for name, prompt, most in (("ends", [5, 6], 1), ("grows", [7], 50), ("refused", [], 5)):
        engine.add_request(name, prompt, SamplingParams(max_tokens=most, temperature=0, ignore_eos=True))
    engine._books.collect_terminals()
    engine._loop.advance()  # a step that ended before its records were handed out
    engine._loop.advance()
    return engine


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("torn", [False, True])
def test_every_request_has_its_last_record(drive: Callable[..., Any], *, ahead: bool, torn: bool) -> None:
    engine = begun(drive, ahead=ahead)
    if not torn:
        engine._books.collect_terminals()
    engine._books.is_torn = torn  # as where a call was cut off
    records = engine.give_up(WHY)
    assert [record.request_id for record in records] == ["ends", "grows", "refused"]
    assert all(record.finished for record in records)
    ends, grows, refused = (record.outputs[0] for record in records)
    # Where the books cannot be trusted, nobody knows whether it had ended: its tokens are all there, though.
    assert (ends.finish_reason, len(ends.token_ids)) == ("abort" if torn else "length", 1)
    assert (grows.finish_reason, grows.message) == ("abort", WHY)
    assert len(grows.token_ids) >= 1
    assert refused.finish_reason == "ignored"
    assert not engine.has_unfinished_requests()
    assert engine.give_up(WHY) == []
    engine.check_invariants()
    assert engine.stats().free_blocks == engine.stats().usable_blocks
    engine.close()


def test_a_device_that_has_failed_is_no_reason_to_lose_the_records(
    drive: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = begun(drive, ahead=True)

    def fail() -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine._loop.pipeline._stream, "record_event", fail)
    with caplog.at_level(logging.ERROR, logger="deepinfer"):
        records = engine.give_up(WHY)
    assert [record.request_id for record in records] == ["ends", "grows", "refused"]
    assert all(record.finished for record in records)
    assert not engine.has_unfinished_requests()
    assert "the device is gone" in caplog.text
