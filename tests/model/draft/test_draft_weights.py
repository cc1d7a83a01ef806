"""Loading the draft model: every parameter finds its place, and a model without stages is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.plan import make_plan
from deepinfer.errors import ConfigurationError
from deepinfer.model import ModelConfig
from deepinfer.model.checkpoint import Checkpoint, Progress
from deepinfer.model.draft_weights import load_draft
from deepinfer.model.inventory import parameters
from deepinfer.model.linear_shapes import linear_shapes
from deepinfer.model.presets import preset
from deepinfer.model.weights import OuterWeights
from deepinfer_cpu_ref import Driver

OUTER = OuterWeights(torch.zeros(1), torch.zeros(1), None)  # type: ignore[arg-type]


def test_every_parameter_is_read_and_reported(golden_directory: Path, tiny8: ModelConfig) -> None:
    checkpoint = Checkpoint.open(golden_directory, groups=("draft",))
    ops = make_plan(Driver(), OpOptions(), features=["drafts"]).ops
    seen: list[Progress] = []
    weights = load_draft(tiny8, checkpoint, ops, torch.device("cpu"), OUTER, progress=seen.append, threads=2)
    assert seen[-1].done_bytes == seen[-1].total_bytes > 0
    assert [stage.role.stem for stage in weights.stages] == ["mtp.0", "mtp.1"]
    assert all(stage.feed_forward_block.feed_forward.top_k == 1 for stage in weights.stages)
    assert weights.outer is OUTER
    assert weights.device_bytes >= sum(
        parameter.entries("float32")[0].num_bytes for parameter in parameters(tiny8, ("draft",))
    )


def test_a_model_without_draft_stages_is_refused(golden_directory: Path, tiny8: ModelConfig) -> None:
    none = dataclasses.replace(
        tiny8, num_nextn_predict_layers=0, dspark_target_layer_ids=(), compress_ratios=tiny8.compress_ratios[:8]
    )
    checkpoint = Checkpoint.open(golden_directory, groups=("draft",))
    with pytest.raises(ConfigurationError, match="num_speculative_tokens=0"):
        load_draft(none, checkpoint, make_plan(Driver(), OpOptions()).ops, torch.device("cpu"), OUTER)


def test_every_matrix_of_the_draft_model_is_listed_for_the_self_check() -> None:
    config = preset("v41-flash")
    listed = {(s.in_features, s.out_features) for s in linear_shapes(config, OpOptions(), with_drafts=True)}
    for parameter in parameters(config, ("draft",)):
        if len(parameter.shape) == 2 and not parameter.name.endswith("embed.weight"):
            rows, columns = parameter.shape
            if parameter.name.endswith("wo_a.weight"):
                rows //= config.o_groups
            assert (columns, rows) in listed, parameter.name
    assert set(linear_shapes(config, OpOptions())) < set(linear_shapes(config, OpOptions(), with_drafts=True))
