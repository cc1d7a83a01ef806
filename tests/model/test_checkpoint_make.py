"""Making checkpoints: layout, statistics, and what does not change the numbers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepinfer.errors import ArgumentError
from deepinfer.model import ModelConfig
from deepinfer.model.checkpoint import Checkpoint, Progress, StoredTensor, make_checkpoint
from deepinfer.model.inventory import GROUPS, CheckpointForm, inventory, parameters
from deepinfer.model.presets import preset
from deepinfer.model.statistics import random_values
from deepinfer.numerics import dequantise_engram_rows, dequantise_fp8_weight, dequantise_mxfp4_weight

TINY8 = preset("tiny8")
SEED = 7
"""Seed of the fixtures' checkpoints."""


def as_float32(stored: StoredTensor) -> torch.Tensor:
    if stored.scale is None:
        return stored.weight.float()
    readers: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "fp8_block32": dequantise_fp8_weight,
        "mxfp4": dequantise_mxfp4_weight,
        "engram_fp8": dequantise_engram_rows,
    }
    return readers[stored.format](stored.weight, stored.scale)


def test_every_form_holds_exactly_its_inventory(
    tmp_path: Path, sound_directory: Path, released_directory: Path
) -> None:
    directories: dict[CheckpointForm, Path] = {
        "float32": sound_directory,
        "bfloat16": make_checkpoint(TINY8, 1, tmp_path, "bfloat16"),
        "released": released_directory,
    }
    for form, directory in directories.items():
        checkpoint = Checkpoint.open(directory, groups=GROUPS)
        assert checkpoint.form == form
        assert checkpoint.config == TINY8
        expected = inventory(TINY8, form)
        assert checkpoint.names == tuple(entry.name for entry in expected)
        for entry in expected:
            assert tuple(checkpoint.tensor(entry.name).shape) == entry.shape


def test_the_released_form_is_the_float_form_quantised(released_directory: Path) -> None:
    checkpoint = Checkpoint.open(released_directory, groups=GROUPS)
    # Half a step of the coarsest code that a format can use, relative to the largest value of its group.
    tolerance = {"fp8_block32": 1 / 16, "engram_fp8": 1 / 16, "mxfp4": 1 / 4, "bfloat16": 1 / 256, "float32": 0.0}
    for parameter in checkpoint.parameters:
        values = random_values(parameter, SEED)
        stored = checkpoint.weight(parameter.name.removesuffix(".weight"))
        assert stored.format == parameter.storage
        error = (as_float32(stored).reshape(values.shape) - values).abs().max()
        assert error <= tolerance[stored.format] * values.abs().max()


def test_the_number_of_shards_changes_no_number(tmp_path: Path) -> None:
    make_checkpoint(TINY8, 1, tmp_path / "one")
    make_checkpoint(TINY8, 1, tmp_path / "many", shards=5)
    assert len(list((tmp_path / "many").glob("model-*-of-00005.safetensors"))) == 5
    one, many = Checkpoint.open(tmp_path / "one"), Checkpoint.open(tmp_path / "many")
    assert one.names == many.names
    for name in one.names:
        assert torch.equal(one.tensor(name), many.tensor(name))


def test_as_many_shards_as_parameters_are_possible_and_none_is_empty(tmp_path: Path) -> None:
    make_checkpoint(TINY8, 1, tmp_path, shards=len(parameters(TINY8)))
    assert Checkpoint.open(tmp_path, groups=GROUPS).names


def test_the_index_tells_the_bytes_of_all_tensors(released_directory: Path) -> None:
    index = json.loads((released_directory / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(entry.num_bytes for entry in inventory(TINY8, "released"))


def test_a_weight_depends_on_seed_name_and_shape_only() -> None:
    larger = dataclasses.replace(TINY8, n_routed_experts=16)
    name = "layers.5.ffn.experts.3.w1.weight"

    def values(config: ModelConfig, seed: int) -> torch.Tensor:
        return random_values(next(p for p in parameters(config) if p.name == name), seed)

    assert torch.equal(values(TINY8, 1), values(larger, 1))
    assert not torch.equal(values(TINY8, 1), values(TINY8, 2))


@pytest.mark.parametrize(
    ("name", "mean", "spread"),
    [
        ("embed.weight", 0.0, 0.12),
        ("layers.0.attn_norm.weight", 0.025, 0.0025),
        ("layers.0.ffn_norm.weight", 0.2, 0.02),
        ("layers.0.attn.q_norm.weight", 0.97, 0.097),
        ("layers.0.attn.kv_norm.weight", 0.4, 0.04),
        ("layers.2.attn.compressor.norm.weight", 0.6, 0.06),
        ("layers.2.attn.indexer.k_norm.weight", 0.5, 0.05),
        ("norm.weight", 1.0, 0.1),
        ("layers.0.attn.wq_a.weight", 0.0, 1.6 * 128**-0.5),
        ("layers.0.attn.wq_b.weight", 0.0, 0.95 * 64**-0.5),
        ("layers.0.attn.wkv.weight", 0.0, 1.8 * 128**-0.5),
        ("layers.0.attn.wo_a.weight", 0.0, 1.6 * 128**-0.5),
        ("layers.0.attn.wo_b.weight", 0.0, 1.9 * 64**-0.5),
        ("layers.2.attn.compressor.wgate.weight", 0.0, 128**-0.5),
        ("layers.2.attn.compressor.wkv.weight", 0.0, 128**-0.5),
        ("layers.0.ffn.gate.weight", 0.0, 2.9 * 128**-0.5),
        ("layers.0.ffn.experts.7.w1.weight", 0.0, 1.5 * 128**-0.5),
        ("layers.0.ffn.shared_experts.w2.weight", 0.0, 1.05 * 64**-0.5),
        ("mtp.1.ffn.experts.0.w3.weight", 0.0, 1.5 * 128**-0.5),
        ("layers.1.engram.embed.weight", 0.0, 0.12),
        ("mtp.1.markov_head.embed.weight", 0.0, 0.5),
    ],
)
def test_weights_have_the_measured_statistics(name: str, mean: float, spread: float) -> None:
    values = random_values(next(p for p in parameters(TINY8) if p.name == name), 3).double()
    deviation_of_mean = spread / values.numel() ** 0.5
    assert abs(values.mean().item() - mean) < 5 * deviation_of_mean
    assert abs(values.std().item() / spread - 1) < 5 / values.numel() ** 0.5


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    seen: list[Progress] = []
    make_checkpoint(TINY8, 1, tmp_path, progress=seen.append)
    assert [step.done_tensors for step in seen] == list(range(1, len(parameters(TINY8)) + 1))
    assert (seen[-1].done_tensors, seen[-1].done_bytes) == (seen[-1].total_tensors, seen[-1].total_bytes)


def test_nothing_is_overwritten_and_all_bad_arguments_are_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ArgumentError) as caught:
        make_checkpoint(TINY8, 1, tmp_path, "int4", shards=0)  # type: ignore[arg-type]
    assert len(caught.value.problems) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ArgumentError, match="is a file"):
        make_checkpoint(TINY8, 1, tmp_path / "out")


def test_an_interrupted_run_leaves_nothing_that_opens(tmp_path: Path) -> None:
    def stop(step: Progress) -> None:
        if step.done_tensors == step.total_tensors:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_checkpoint(TINY8, 1, tmp_path, shards=2, progress=stop)
    assert not (tmp_path / "config.json").exists()


def test_weights_are_as_readable_as_the_configuration(tmp_path: Path) -> None:
    make_checkpoint(TINY8, 1, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "config.json").stat().st_mode
