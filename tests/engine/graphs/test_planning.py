"""Whether decode steps are recorded: from claims and options, with every reason against it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from deepinfer.accelerator import Capabilities, OpOptions, Repeatability, make_plan
from deepinfer.engine.graphs.planning import GraphPlan, plan_graphs
from deepinfer.engine.options import EngineOptions
from deepinfer.errors import PlanError
from deepinfer.settings import Settings
from deepinfer_conformance.mutants.hosts import Borrowed
from deepinfer_cpu_ref import Driver as ReferenceDriver


class DeviceDriver(Borrowed):
    """The reference's claims, but for a few, on something that is no host."""

    def __init__(self, **changed: object) -> None:
        super().__init__()
        self.changed = changed

    @property
    def device(self) -> torch.device:
        return torch.device("meta")

    def capabilities(self) -> Capabilities:
        claims = super().capabilities()
        ops = {op: dataclasses.replace(claims.ops[op], **change) for op, change in self.changed.items()}
        return dataclasses.replace(claims, ops={**claims.ops, **ops})


def planned(driver: Borrowed, settings: Settings | None = None, **options: bool | int | None) -> GraphPlan:
    return plan_graphs(driver, make_plan(driver, OpOptions()), EngineOptions(**options), settings or Settings())


def test_a_device_records_unless_it_is_told_not_to() -> None:
    made = planned(DeviceDriver(), max_num_seqs=4, num_speculative_tokens=5)
    assert made == GraphPlan((1, 2, 4, 8, 16, 24), is_recorded=True, why_not="")
    assert not planned(DeviceDriver(), decode_graphs=False).is_recorded
    assert not planned(DeviceDriver(), Settings(decode_graphs=False)).is_recorded


def test_options_go_before_the_environment() -> None:
    settings = Settings(decode_graphs=False, graph_interval=4)
    made = planned(DeviceDriver(), settings, decode_graphs=True, graph_interval=2, max_num_seqs=5)
    assert (made.is_recorded, made.sizes) == (True, (1, 2, 4, 5))
    assert planned(DeviceDriver(), settings, max_num_seqs=9).sizes == (1, 2, 4, 8, 9)


def test_every_reason_is_given_at_once_and_refuses_what_was_asked_for() -> None:
    driver = DeviceDriver(
        **{
            "norm.rms": {"graph_safe": False},
            "experts.local": {"repeatability": Repeatability.NONE},
            "sampling.sample": {"graph_safe": False},  # is not recorded
            "memory.gather_rows": {"graph_safe": False},
        }
    )
    made = planned(driver)
    assert not made.is_recorded
    assert made.why_not == (
        "driver 'borrowed' does not claim norm.rms as graph-safe; experts.local does not repeat itself (R1), so that a "
        "graph could not be tried"
    )
    with pytest.raises(PlanError) as refused:
        planned(driver, decode_graphs=True)
    assert len(refused.value.problems) == 2


def test_an_op_that_falls_back_cannot_be_recorded() -> None:
    class Lacking(DeviceDriver):
        def capabilities(self) -> Capabilities:
            claims = super().capabilities()
            return dataclasses.replace(claims, ops={op: each for op, each in claims.ops.items() if op != "norm.rms"})

    driver = Lacking()
    plan = make_plan(driver, OpOptions(), allow_fallback=["norm.rms"], reference=ReferenceDriver())
    made = plan_graphs(driver, plan, EngineOptions(), Settings())
    assert made.why_not == "norm.rms runs on cpu_ref, whose calls no graph of 'borrowed' holds"
