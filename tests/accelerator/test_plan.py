"""The plan serves every op or says why not; nothing falls back that nobody named."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from deepinfer.accelerator import (
    AcceleratorDriver,
    Availability,
    Capabilities,
    MemoryInfo,
    OpCapability,
    OpOptions,
    Repeatability,
    all_op_names,
    make_plan,
    needed_op_names,
)
from deepinfer.accelerator.ops import MixingOps, NormOps, OpGroup
from deepinfer.errors import OpRefusedError, PlanError
from deepinfer_cpu_ref import Driver as Reference


class HalfNorm(NormOps):
    """Has rms, lacks rotary."""

    def rms(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        return x_TD * 2.0


class Partial(AcceleratorDriver):
    """A driver in its first hour: one native op."""

    name = "partial"
    interface_version = (1, 0)
    claims: Mapping[str, OpCapability] = {"norm.rms": OpCapability()}
    declared: tuple[str, ...] = ()

    @classmethod
    def availability(cls) -> Availability:
        return Availability()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def memory(self) -> MemoryInfo:
        return MemoryInfo(1, 1)

    def capabilities(self) -> Capabilities:
        return Capabilities(self.claims, declared_fallbacks=self.declared)

    def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
        return {"norm": HalfNorm()}


OTHERS = [name for name in all_op_names() if name != "norm.rms"]


def test_a_driver_that_lacks_ops_is_refused_with_the_whole_list() -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(Partial(), OpOptions())
    needed = [name for name in needed_op_names() if name != "norm.rms"]
    assert [problem.split(":")[0] for problem in caught.value.problems] == needed
    assert "DEEPINFER_ALLOW_FALLBACK" in caught.value.problems[0]


def test_named_fallbacks_run_on_the_reference_and_show_in_the_plan() -> None:
    plan = make_plan(Partial(), OpOptions(), allow_fallback=OTHERS, reference=Reference())
    assert plan.fallbacks == tuple(OTHERS)
    rows = {row.op: row for row in plan.rows}
    assert list(rows) == list(all_op_names())
    assert rows["norm.rms"].driver == "partial"
    assert rows["norm.rms"].provider == "native"
    assert rows["norm.rotary"].driver == "cpu_ref"
    assert "does not implement" in rows["norm.rotary"].note
    x_TD = torch.tensor([[3.0, 4.0]])
    assert torch.equal(plan.ops.norm.rms(x_TD, torch.ones(2), 0.0), x_TD * 2.0)
    assert plan.ops.mixing.collapse(torch.ones(1, 2, 3), torch.ones(1, 2)).tolist() == [[2.0, 2.0, 2.0]]


def test_a_drivers_own_declared_fallbacks_count_as_named() -> None:
    class Declaring(Partial):
        declared = tuple(OTHERS)

    assert make_plan(Declaring(), OpOptions(), reference=Reference()).fallbacks == tuple(OTHERS)


def test_one_forgotten_fallback_is_refused_alone() -> None:
    named = [name for name in OTHERS if name != "moves.copy"]
    with pytest.raises(PlanError) as caught:
        make_plan(Partial(), OpOptions(), allow_fallback=named, reference=Reference())
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["moves.copy"]


def test_unknown_fallback_names_are_refused_with_close_ones() -> None:
    with pytest.raises(PlanError, match=r"'attention.sparce'.*attention.sparse"):
        make_plan(Reference(), OpOptions(), allow_fallback=["attention.sparce"])


def test_ops_that_share_prepared_weights_fall_back_together() -> None:
    class LacksDense(Reference):
        name = "lacks_dense"

        def capabilities(self) -> Capabilities:
            ops = {name: claim for name, claim in super().capabilities().ops.items() if name != "linear.dense"}
            return Capabilities(ops)

    with pytest.raises(PlanError) as caught:
        make_plan(LacksDense(), OpOptions(), allow_fallback=["linear.dense"], reference=Reference())
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["linear.prepare"]
    assert "shares prepared weights with linear.dense" in caught.value.problems[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (OpOptions(activation_dtype=torch.bfloat16), "dtype bfloat16 (has float32)"),
        (OpOptions(numerics="served"), "numerics 'served' (has portable)"),
        (OpOptions(kv_cache_dtype="float32"), "cache format 'float32' (has released)"),
        (OpOptions(batch_invariant=True), "batch invariance R2 (claims R1)"),
    ],
)
def test_an_op_whose_claim_does_not_cover_the_options_is_refused(options: OpOptions, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(Partial(), options)
    (problem,) = [problem for problem in caught.value.problems if problem.startswith("norm.rms:")]
    assert words in problem


def test_an_implemented_op_without_a_claim_is_not_used() -> None:
    class Silent(Partial):
        claims: Mapping[str, OpCapability] = {}

    with pytest.raises(PlanError, match=r"norm.rms: .*claims no capability"):
        make_plan(Silent(), OpOptions())


def test_a_claimed_op_without_an_implementation_is_refused() -> None:
    class Boasting(Partial):
        claims: Mapping[str, OpCapability] = {"norm.rms": OpCapability(), "norm.rotary": OpCapability()}

    with pytest.raises(PlanError, match=r"norm.rotary: .*claims it but does not implement it"):
        make_plan(Boasting(), OpOptions())


def test_the_reference_serves_everything_in_every_mode() -> None:
    for options in (
        OpOptions(),
        OpOptions(activation_dtype=torch.float64, kv_cache_dtype="float32"),
        OpOptions(activation_dtype=torch.bfloat16, numerics="served", batch_invariant=True),
    ):
        plan = make_plan(Reference(), options)
        assert plan.fallbacks == ()


@pytest.mark.parametrize(("options", "level"), [(OpOptions(), 1), (OpOptions(batch_invariant=True), 2)])
def test_the_plan_promises_batch_invariance_only_where_it_was_demanded(options: OpOptions, level: int) -> None:
    plan = make_plan(Reference(), options)
    assert plan.repeatability == Repeatability(level)
    assert plan.as_json()["repeatability"] == f"R{level}"


def test_the_plan_reads_as_json() -> None:
    described = make_plan(Reference(), OpOptions()).as_json()
    assert described["driver"] == "cpu_ref"
    assert len(described["ops"]) == len(all_op_names())  # type: ignore[arg-type]


def test_an_op_that_nobody_implements_says_so_when_it_is_called() -> None:
    with pytest.raises(OpRefusedError, match=r"mixing.collapse"):
        MixingOps().collapse(torch.ones(1, 2, 3), torch.ones(1, 2))
