"""An op of a feature is needed where the feature is asked for, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from deepinfer.accelerator import Capabilities, OpOptions, all_op_names, make_plan, needed_op_names
from deepinfer.accelerator.ops import OpGroup
from deepinfer.accelerator.ops.drafting import DraftRuns
from deepinfer.accelerator.ops.sampling import SampledTokens
from deepinfer.errors import OpRefusedError, PlanError
from deepinfer_cpu_ref import Driver as Reference

DRAFTING = [name for name in all_op_names() if name.startswith("drafting.")]


class WithoutDrafts(Reference):
    """A driver of interface 1.0."""

    name = "without_drafts"
    interface_version = (1, 0)

    def capabilities(self) -> Capabilities:
        return Capabilities({op: claim for op, claim in super().capabilities().ops.items() if op not in DRAFTING})

    def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
        return {name: group for name, group in super().op_groups(options).items() if name != "drafting"}


class WithoutMatch(Reference):
    """A driver that lacks one of them."""

    name = "without_match"

    def capabilities(self) -> Capabilities:
        return Capabilities({op: claim for op, claim in super().capabilities().ops.items() if op != "drafting.match"})


def match(plan) -> object:
    tokens = SampledTokens(torch.tensor([4, 5]), torch.zeros(2, dtype=torch.int32))
    runs = DraftRuns(torch.tensor([0]), torch.tensor([1]), torch.tensor([[4]]))
    return plan.ops.drafting.match(tokens, runs)


def test_a_driver_without_drafts_serves_every_model_without_them() -> None:
    plan = make_plan(WithoutDrafts(), OpOptions())
    assert plan.features == ()
    assert [row.op for row in plan.rows] == list(needed_op_names())
    with pytest.raises(OpRefusedError, match=r"'drafting\.match' is not implemented"):
        match(plan)


def test_it_is_refused_with_the_whole_list_when_drafts_are_asked_for() -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(WithoutDrafts(), OpOptions(), features=["drafts"])
    assert [problem.split(":")[0] for problem in caught.value.problems] == DRAFTING
    assert all("or run without drafts" in problem for problem in caught.value.problems)


def test_named_ops_of_a_feature_fall_back() -> None:
    for features in ([], ["drafts"]):
        plan = make_plan(
            WithoutDrafts(), OpOptions(), features=features, allow_fallback=DRAFTING, reference=Reference()
        )
        assert plan.fallbacks == tuple(DRAFTING)
        assert match(plan).token_ids_Rm.tolist() == [[4, 5]]  # type: ignore[attr-defined]


def test_what_the_driver_has_of_an_unasked_feature_is_bound_and_the_rest_refuses() -> None:
    plan = make_plan(WithoutMatch(), OpOptions())
    assert {row.op for row in plan.rows} == set(all_op_names()) - {"drafting.match"}
    guessed = plan.ops.drafting.guess(torch.zeros(0, 3), _no_rows(), 0.0)
    assert guessed.token_ids_B.shape == (0,)
    with pytest.raises(OpRefusedError, match=r"'drafting\.match' is not implemented"):
        match(plan)


def test_the_plan_says_what_it_was_made_for() -> None:
    plan = make_plan(Reference(), OpOptions(), features=["drafts"])
    assert plan.as_json()["features"] == ["drafts"]
    assert len(plan.rows) == len(all_op_names())


def _no_rows():
    from deepinfer.accelerator.ops.sampling import SamplingRows

    none = torch.zeros(0, dtype=torch.int64)
    return SamplingRows(none.double(), none, none.double(), none, none, none, none)
