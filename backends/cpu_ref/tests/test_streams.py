"""The queue with a thread: order, exceptions, times, and no thread that outlives its stream."""

from __future__ import annotations

import gc
import threading

import pytest

from deepinfer_cpu_ref import Driver
from deepinfer_cpu_ref.streams import ThreadStream


def threads_of_streams() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "deepinfer-cpu_ref-stream"}


@pytest.fixture(autouse=True)
def _no_thread_is_left():  # type: ignore[no-untyped-def]
    gc.collect()
    before = threads_of_streams()
    yield
    gc.collect()
    for thread in threads_of_streams() - before:
        thread.join(60)
    assert threads_of_streams() <= before


def test_work_runs_in_order_in_another_thread_while_the_caller_goes_on() -> None:
    stream = ThreadStream()
    may_go = threading.Event()
    seen: list[object] = []

    def first() -> None:
        may_go.wait()
        seen.append(threading.current_thread())

    marks = [stream.enqueue(first), stream.enqueue(lambda: seen.append("second"))]
    assert [mark.done() for mark in marks] == [False, False]
    may_go.set()
    marks[1].wait()
    assert seen[0] is not threading.current_thread()
    assert seen[1] == "second"
    assert all(mark.done() and (mark.elapsed_s or 0) >= 0 for mark in marks)


def test_an_exception_comes_out_of_the_wait_with_its_type_and_later_work_runs() -> None:
    class OddError(BaseException):
        pass

    stream = ThreadStream()

    def fail() -> None:
        raise OddError("odd")

    failed, later = stream.enqueue(fail), stream.record_event()
    later.wait()
    for _ in range(2):
        with pytest.raises(OddError, match="odd"):
            failed.wait()


def test_a_stream_waits_for_another_ones_event_without_its_exception() -> None:
    first, second = ThreadStream(), ThreadStream()
    may_go = threading.Event()

    def fail() -> None:
        may_go.wait()
        raise ValueError("the first one's")

    failed = first.enqueue(fail)
    second.wait_event(failed)
    after = second.record_event()
    assert not after.done()
    may_go.set()
    after.wait()
    assert failed.done()


def test_closing_ends_the_thread_after_its_work_and_the_stream_can_go_on() -> None:
    stream = ThreadStream()
    done: list[int] = []
    stream.enqueue(lambda: done.append(1))
    (thread,) = threads_of_streams()
    stream.close()
    stream.close()
    assert (done, thread.is_alive()) == ([1], False)
    stream.enqueue(lambda: done.append(2)).wait()
    assert done == [1, 2]


def test_work_that_was_done_holds_nothing_and_a_stream_that_nobody_holds_ends() -> None:
    class Thing:
        pass

    stream = ThreadStream()
    thing = Thing()
    held = [thing]
    stream.enqueue(lambda things=held: things.clear()).wait()  # type: ignore[misc]
    stream.record_event().wait()
    (thread,) = threads_of_streams()
    del stream
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_the_driver_waits_for_all_its_streams() -> None:
    driver = Driver()
    streams = [driver.new_stream() for _ in range(2)]
    done: list[int] = []
    for number, stream in enumerate(streams):
        stream.enqueue(lambda number=number: done.append(number))  # type: ignore[misc]
    driver.synchronize()
    assert sorted(done) == [0, 1]
