"""A captured graph runs nothing, replay runs everything, and what a graph must not hold is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from host_cann import Emulator
from host_cann.records import CaptureEnd, OperatorCall, Phase, Replay

WHOLE_ALLOCATION = 1 << 22


def captured(work: Callable[[], object]) -> torch.npu.NPUGraph:  # type: ignore[name-defined]
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        work()
    return graph


def test_capture_executes_nothing_and_replay_everything(host_cann_machine: Emulator) -> None:
    x, out = torch.ones(4).npu(), torch.zeros(4).npu()
    with host_cann_machine.record() as recording:
        graph = captured(lambda: out.copy_(x * 2 + 1))
        assert out.cpu().tolist() == [0.0] * 4
        x.fill_(5)
        graph.replay()
    assert out.cpu().tolist() == [11.0] * 4
    names = ("aclnnMuls", "aclnnAdds")
    assert recording.operators(Phase.CAPTURED)[:2] == names
    assert recording.operators(Phase.REPLAYED)[:2] == names
    assert [end.nodes for end in recording.of(CaptureEnd)] == [replay.nodes for replay in recording.of(Replay)]


def test_every_replay_reads_the_inputs_again(host_cann_machine: Emulator) -> None:
    x, out = torch.zeros(4).npu(), torch.zeros(4).npu()
    graph = captured(lambda: torch.neg(x, out=out))
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        graph.replay()
        assert out.cpu().tolist() == [-value] * 4


def test_a_result_of_capture_stays_unwritten_until_replay(host_cann_machine: Emulator) -> None:
    results: list[torch.Tensor] = []
    x = torch.ones(WHOLE_ALLOCATION).npu()
    graph = captured(lambda: results.append(x * 2))
    assert results[0][:2].isnan().all().item()  # poison of fresh memory
    graph.replay()
    assert results[0][:2].cpu().tolist() == [2.0, 2.0]


def test_a_side_stream_joins_the_graph(host_cann_machine: Emulator) -> None:
    x, out, side = torch.ones(4).npu(), torch.zeros(4).npu(), torch.npu.Stream()

    def work() -> None:
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            tripled = x * 3
        torch.npu.current_stream().wait_stream(side)
        out.copy_(tripled)

    with host_cann_machine.record() as recording:
        graph = captured(work)
    assert len({call.stream for call in recording.of(OperatorCall) if call.phase is Phase.CAPTURED}) == 2
    x.fill_(2)
    graph.replay()
    assert out.cpu().tolist() == [6.0] * 4


def test_a_side_stream_that_is_not_waited_for_is_an_error(host_cann_machine: Emulator) -> None:
    x, side = torch.ones(4).npu(), torch.npu.Stream()

    def work() -> None:
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            x * 3

    with pytest.raises(RuntimeError, match="nobody waited for the work of stream"):
        captured(work)


def test_a_tensor_that_was_freed_shows_at_replay(host_cann_machine: Emulator) -> None:
    inputs = [torch.ones(WHOLE_ALLOCATION).npu()]
    out = torch.zeros(WHOLE_ALLOCATION).npu()
    graph = captured(lambda: torch.neg(inputs[0], out=out))
    graph.replay()
    inputs.clear()
    torch.npu.empty_cache()
    with pytest.raises(RuntimeError, match="lies in freed device memory"):
        graph.replay()


def test_a_stale_pointer_shows_as_the_old_values(host_cann_machine: Emulator) -> None:
    inputs, out = {"x": torch.ones(4).npu()}, torch.zeros(4).npu()
    old = inputs["x"]
    graph = captured(lambda: torch.neg(inputs["x"], out=out))
    inputs["x"] = torch.full((4,), 7.0).npu()  # the mistake: a new tensor in the place of the captured one
    graph.replay()
    assert out.cpu().tolist() == [-1.0] * 4
    old.copy_(inputs["x"])
    graph.replay()
    assert out.cpu().tolist() == [-7.0] * 4


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (lambda x: x.sum().item(), "while a graph is captured"),
        (lambda x: x[x > 0], "while a graph is captured"),
        (lambda x: torch.npu.synchronize(), "while a graph is captured"),
        (lambda x: x.copy_(torch.ones(4), non_blocking=True), "pageable host memory"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(
    host_cann_machine: Emulator, work: Callable[[torch.Tensor], object], reason: str
) -> None:
    x = torch.ones(4).npu()
    with pytest.raises(RuntimeError, match=reason):
        captured(lambda: work(x))
    assert (x + 1).cpu().tolist() == [2.0] * 4


def test_a_copy_of_pinned_memory_is_repeated(host_cann_machine: Emulator) -> None:
    x, host = torch.zeros(4).npu(), torch.ones(4).pin_memory()
    graph = captured(lambda: x.copy_(host, non_blocking=True))
    host.fill_(9)
    graph.replay()
    assert x.cpu().tolist() == [9.0] * 4


def test_an_event_from_outside_of_the_capture_cannot_be_waited_for(host_cann_machine: Emulator) -> None:
    x, event = torch.ones(4).npu(), torch.npu.Event()
    event.record(torch.npu.Stream())

    def work() -> None:
        torch.npu.current_stream().wait_event(event)
        x.add_(1)

    with pytest.raises(RuntimeError, match="recorded outside of the capture"):
        captured(work)
