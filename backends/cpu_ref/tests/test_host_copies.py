"""The reference in the place of another driver: readable ops on that driver's device, float64 on copies on the host."""

from __future__ import annotations

import dataclasses

import torch

from deepinfer.accelerator import OP_GROUPS, OpOptions, all_op_names
from deepinfer.accelerator.ops.sampling import LogitAdjustments, TokenEntries
from deepinfer_cpu_ref import Driver
from deepinfer_cpu_ref.host_copies import HOST, moved, on_host

ELSEWHERE = torch.device("meta")


@dataclasses.dataclass(frozen=True)
class Pair:
    left: torch.Tensor
    name: str


def test_every_tensor_of_a_value_moves_and_everything_else_stays() -> None:
    value = {"a": [torch.ones(2), (Pair(torch.ones(1), "x"), None)], "b": 3}
    there = moved(value, ELSEWHERE)
    assert there["a"][0].device == there["a"][1][0].left.device == ELSEWHERE
    assert (there["a"][1][0].name, there["a"][1][1], there["b"]) == ("x", None, 3)
    assert value["a"][0].device == HOST


def test_an_op_is_computed_on_the_host_and_answers_on_the_device() -> None:
    sampling = Driver(readable=True).op_groups(OpOptions())["sampling"]
    copying = on_host(sampling, ELSEWHERE)
    seeds, streams = torch.tensor([1, 2]), torch.tensor([3, 4])
    assert copying.uniforms(seeds, streams).device == ELSEWHERE
    here = on_host(sampling, HOST)
    assert torch.equal(here.uniforms(seeds, streams), sampling.uniforms(seeds, streams))


def test_for_another_device_no_op_is_quick_and_every_op_is_there() -> None:
    quick, groups = Driver().op_groups(OpOptions()), Driver().serving(ELSEWHERE).op_groups(OpOptions())
    readable = Driver(readable=True).op_groups(OpOptions())
    assert type(quick["attention"]) is not type(readable["attention"])
    copied = {"sampling", "drafting"}
    assert all(type(groups[name]) is type(readable[name]) for name in readable.keys() - copied)
    names = [f"{kind.group}.{name}" for kind in OP_GROUPS for name in type(groups[kind.group]).implemented()]
    assert names == list(all_op_names())


def test_on_the_host_nothing_changes() -> None:
    driver = Driver()
    same, here = driver.op_groups(OpOptions()), driver.serving(HOST).op_groups(OpOptions())
    assert {name: type(group) for name, group in same.items()} == {name: type(group) for name, group in here.items()}


def test_an_op_that_writes_its_argument_is_not_computed_on_a_copy() -> None:
    adjusting = on_host(Driver(readable=True).op_groups(OpOptions())["sampling"], HOST, but=("adjust",))
    logits_BV = torch.zeros(1, 4)
    bans = TokenEntries(torch.tensor([0]), torch.tensor([2]))
    adjusting.adjust(logits_BV, LogitAdjustments(bans=bans))
    assert logits_BV[0, 2] == -torch.inf
    for name in ("sampling.adjust", "drafting.attend"):
        group, _, op = name.partition(".")
        served = Driver().serving(ELSEWHERE).op_groups(OpOptions())[group]
        assert not hasattr(getattr(served, op), "__wrapped__")
