"""Graphs on the host: what is recorded, what is refused, and that a decision from a value cannot hide."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from deepinfer.accelerator import OpOptions
from deepinfer.accelerator.ops import Ops
from deepinfer.errors import OpRefusedError
from deepinfer_cpu_ref import Driver
from deepinfer_cpu_ref.call_list import CallList

Work = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def ops(driver: Driver) -> Ops:
    return Ops(**driver.op_groups(OpOptions()))


def recorded(driver: Driver, work: Work, x: torch.Tensor) -> tuple[CallList, torch.Tensor]:
    graph = driver.new_graph()
    graph.capture_begin()
    try:
        with torch.inference_mode():
            out = work(x)
    finally:
        graph.capture_end()
    return graph, out


def test_a_replay_runs_ops_and_what_lies_between_them_on_new_values(driver: Driver, ops: Ops) -> None:
    weight = torch.ones(8)

    def work(x: torch.Tensor) -> torch.Tensor:
        doubled = ops.norm.rms((x.view(-1, 8) * 2).clamp(max=3), weight, 1e-6)
        doubled[0].add_(1)
        return torch.cat((doubled, x.view(-1, 8)))

    x, other = torch.arange(24.0), torch.arange(24.0).flip(0)
    graph, out = recorded(driver, work, x)
    assert out.equal(work(torch.arange(24.0)))
    assert [call.name for call in graph.calls].count("norm.rms") == 1
    x.copy_(other)
    for _ in range(2):  # a replay leaves nothing behind that the next one finds
        graph.replay()
        assert out.equal(work(other))


def test_what_the_host_decides_from_a_value_is_refused_while_it_is_recorded(driver: Driver, ops: Ops) -> None:
    reads: list[Work] = [
        lambda x: x * 2 if bool(x.sum() > 3) else x,
        lambda x: x + x.max().item(),
        lambda x: x[x > 1],
        lambda x: x.nonzero(),
        lambda x: x.unique(),
    ]
    for work in reads:
        with pytest.raises(OpRefusedError, match="between ops"):
            recorded(driver, work, torch.arange(6.0))
    x = torch.arange(8.0).view(1, 8)  # and afterwards the driver is as it was
    assert ops.norm.rms(x, torch.ones(8), 1e-6).shape == (1, 8)


def test_what_it_decides_behind_torchs_back_shows_in_a_replay_with_other_values(driver: Driver) -> None:
    x = torch.arange(6.0)
    graph, out = recorded(driver, lambda x: x + float(x.numpy().sum()), x)
    x.fill_(1)
    graph.replay()
    assert not out.equal(torch.full((6,), 7.0))


def test_an_op_whose_shape_depends_on_values_is_found_in_a_replay(driver: Driver, ops: Ops) -> None:
    x = torch.tensor([1.0, -1.0, 2.0])
    ops.norm.rms = driver._recorder._watched("norm.rms", lambda x, weight, eps: x[x > 0])
    graph, _ = recorded(driver, lambda x: ops.norm.rms(x, x, 1e-6), x)
    x.fill_(1)
    with pytest.raises(OpRefusedError, match=r"norm.rms returned torch.float32 \[3\] in a replay and .* \[2\]"):
        graph.replay()


def test_an_op_is_one_call_whatever_it_calls_itself(driver: Driver, ops: Ops) -> None:
    logits, table = torch.randn(3, 40), torch.randn(7, 16)
    graph, _ = recorded(driver, lambda ids: ops.linear.embed(ids, table), torch.tensor([1, 2]))
    assert [call.name for call in graph.calls] == ["linear.embed"]
    assert logits.shape == (3, 40)


def test_a_graph_is_recorded_once_and_one_at_a_time(driver: Driver) -> None:
    graph, second = driver.new_graph(), driver.new_graph()
    with pytest.raises(OpRefusedError, match="nothing to replay"):
        graph.replay()
    with pytest.raises(OpRefusedError, match="not being recorded"):
        graph.capture_end()
    graph.capture_begin()
    with pytest.raises(OpRefusedError, match="being recorded already"):
        second.capture_begin()
    graph.capture_end()
    with pytest.raises(OpRefusedError, match="take a new one"):
        graph.capture_begin()


def test_a_reference_that_stands_in_on_a_device_records_nothing(driver: Driver) -> None:
    spare = driver.serving(torch.device("meta"))
    assert not spare.capabilities().graphs
    assert not any(claim.graph_safe for claim in spare.capabilities().ops.values())
    with pytest.raises(OpRefusedError, match="does not support recorded graphs"):
        spare.new_graph()
