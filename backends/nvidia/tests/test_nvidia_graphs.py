"""Recorded decode steps: the same addresses at capture and replay, the right bucket, padding that does nothing."""

from __future__ import annotations

import pytest
import torch

from deepinfer.accelerator.batch import StepLayout
from deepinfer.errors import OpRefusedError
from deepinfer_nvidia.decode_graphs import DecodeGraphs, Extents, StepBuffers, buckets
from deepinfer_nvidia.streams import CudaGraph, CudaStream

HOST = torch.device("cpu")
EXTENTS = Extents(rows=2, table_blocks=4, block_size=8, ring=10, max_position=32)


@pytest.fixture
def cuda(recording_cuda):
    return recording_cuda.RecordingCuda()


def step(*rows, cached=None):
    """A decode step whose requests have so many rows."""
    requests = len(rows)
    cached = cached or [3 * number + 1 for number in range(requests)]
    request = [number for number, count in enumerate(rows) for _ in range(count)]
    position = [cached[number] + place for number, count in enumerate(rows) for place in range(count)]
    starts = torch.tensor([0, *rows]).cumsum(0)
    return StepLayout(
        kind="decode",
        block_size=8,
        ring=10,
        row_starts_R1=starts,
        cached_R=torch.tensor(cached),
        state_slots_R=torch.arange(1, requests + 1),
        block_table_RB=torch.arange(1, 2 * requests + 1).view(requests, 2),
        request_T=torch.tensor(request),
        position_T=torch.tensor(position),
        window_start_R=torch.zeros(requests, dtype=torch.int64),
        image_T=torch.zeros(len(request), dtype=torch.bool),
        valid_T=torch.ones(len(request), dtype=torch.bool),
        max_position=max(position) + 1,
        max_rows=max(rows),
    )


def addresses(layout):
    return [value.data_ptr() for name in layout.__slots__ if isinstance(value := getattr(layout, name), torch.Tensor)]


class Model:
    """A step whose result is ``1000 * id + position`` of each valid row, computed as enqueued work."""

    def __init__(self, cuda):
        self.cuda, self.seen, self.requests = cuda, [], []

    def __call__(self, layout, ids_T):
        out_T1 = torch.full((layout.rows, 1), -1, dtype=torch.int64)
        self.requests.append(layout.requests)

        def work():
            self.seen.append((addresses(layout), ids_T.data_ptr(), layout.max_position, int(layout.valid_T.sum())))
            result_T = torch.where(layout.valid_T, 1000 * ids_T + layout.position_T, 0)
            out_T1.copy_(result_T.unsqueeze(1))

        self.cuda.enqueue(work)
        return out_T1


def graphs(cuda, sizes):
    model = Model(cuda)
    return model, DecodeGraphs(model, lambda: CudaGraph(0, cuda=cuda), sizes, EXTENTS, HOST)


def test_buckets_are_powers_of_two_then_multiples_then_the_most():
    assert buckets(20) == (1, 2, 4, 8, 16, 20)
    assert buckets(3) == (1, 2, 3)
    assert buckets(8) == (1, 2, 4, 8)


def test_each_bucket_is_warmed_up_once_then_captured_largest_first(cuda):
    model, _ = graphs(cuda, (1, 4, 2))
    assert model.requests == [4, 4, 2, 2, 1, 1]
    assert len(model.seen) == 3
    assert sum(line.startswith("capture on stream") for line in cuda.log) == 3


def test_a_step_runs_in_the_smallest_bucket_that_holds_it(cuda):
    _, found = graphs(cuda, (1, 2, 4))
    assert [found.bucket_of(requests) for requests in (1, 2, 3, 4)] == [1, 2, 4, 4]
    with pytest.raises(OpRefusedError, match="the largest holds 4"):
        found.bucket_of(5)


def test_replays_read_the_addresses_and_host_integers_of_the_capture(cuda):
    model, found = graphs(cuda, (4,))
    (warm,) = model.seen
    for rows in ((1, 1, 1), (2, 1), (1,)):
        now = step(*rows)
        found.replay(now, torch.arange(now.rows))
        assert model.seen[-1][:3] == warm[:3]
    assert len(model.requests) == 2, "a replay calls no Python of the step"


@pytest.mark.parametrize("rows", [(1,), (2, 1), (1, 2, 1), (2, 2, 2, 2)])
def test_results_are_those_of_the_steps_own_rows(cuda, rows):
    model, found = graphs(cuda, (1, 2, 4))
    found.replay(step(2, 2, 2, 2, cached=[20, 20, 20, 20]), torch.arange(8))
    now = step(*rows)
    ids_T = torch.arange(7, 7 + now.rows)
    out_T1 = found.replay(now, ids_T)
    assert torch.equal(out_T1[:, 0], 1000 * ids_T + now.position_T)
    assert model.seen[-1][3] == now.rows, "padding rows are invalid"


def test_what_an_earlier_step_left_in_the_buffers_is_gone():
    buffers = StepBuffers(3, EXTENTS, HOST)
    buffers.load(step(2, 2, 2), torch.full((6,), 9))
    place_T = buffers.load(step(1), torch.tensor([5]))
    layout = buffers.layout
    assert place_T.tolist() == [0]
    assert buffers.ids_T.tolist() == [5, 0, 0, 0, 0, 0]
    assert layout.valid_T.tolist() == [True, False, False, False, False, False]
    assert layout.state_slots_R.tolist() == [1, 0, 0]
    assert layout.block_table_RB[1:].eq(0).all()
    assert layout.request_T.tolist() == [0, 0, 1, 1, 2, 2]
    assert layout.row_starts_R1.tolist() == [0, 2, 4, 6]


def test_a_step_that_does_not_fit_is_refused():
    buffers = StepBuffers(1, EXTENTS, HOST)
    with pytest.raises(OpRefusedError, match="2 requests with up to 1 rows"):
        buffers.load(step(1, 1), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(OpRefusedError, match="position 41"):
        buffers.load(step(1, cached=[40]), torch.zeros(1, dtype=torch.int64))


def test_a_graph_is_recorded_on_a_stream_of_its_own_behind_earlier_work(cuda):
    graph = CudaGraph(0, cuda=cuda)
    done = []
    graph.capture_begin()
    cuda.enqueue(lambda: done.append(1))
    assert cuda.current.name == "stream 1"
    graph.capture_end()
    assert cuda.log == [
        "synchronize",
        "stream 1 waits for default",
        "capture on stream 1 (thread_local)",
        "default waits for stream 1",
    ]
    assert cuda.current is cuda.default
    assert done == []
    graph.replay()
    graph.replay()
    assert done == [1, 1]


def test_a_graph_refuses_calls_out_of_order(cuda):
    graph = CudaGraph(0, cuda=cuda)
    for call, said in ((graph.replay, "nothing to replay"), (graph.capture_end, "not being recorded")):
        with pytest.raises(OpRefusedError, match=said):
            call()
    graph.capture_begin()
    for call, said in ((graph.capture_begin, "recorded already"), (graph.replay, "nothing to replay")):
        with pytest.raises(OpRefusedError, match=said):
            call()
    graph.capture_end()
    with pytest.raises(OpRefusedError, match="take a new one"):
        graph.capture_begin()


def test_streams_wait_for_events_of_their_kind_without_the_host(cuda):
    first, second = CudaStream(0, cuda), CudaStream(0, cuda)
    event = first.record_event()
    second.wait_event(event)
    assert event.done()
    assert cuda.log == ["stream 2 waits for event of stream 1"]


def test_work_is_issued_on_the_stream_behind_the_callers_and_timed_by_the_device(cuda):
    stream = CudaStream(0, cuda)
    seen = []
    mark = stream.enqueue(lambda: seen.append(cuda.current.name))
    assert seen == ["stream 1"]
    assert cuda.current.name == "default"
    assert cuda.log == ["stream 1 waits for default"]
    mark.wait()
    assert mark.done()
    assert mark.elapsed_s == 2.5
    assert stream.to_host(torch.ones(2)).tolist() == [1, 1]


def test_what_work_raises_comes_out_of_the_wait(cuda):
    stream = CudaStream(0, cuda)

    def fail():
        raise OpRefusedError("no such kernel")

    mark = stream.enqueue(fail)
    assert cuda.current.name == "default"
    with pytest.raises(OpRefusedError, match="no such kernel"):
        mark.wait()
