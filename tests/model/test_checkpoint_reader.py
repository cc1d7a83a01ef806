"""Reading a sound checkpoint: views, formats, parallel loading, and groups that are not used."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer.errors import ArgumentError, CheckpointError
from deepinfer.model.checkpoint import Checkpoint, Progress, inspect_checkpoint, make_checkpoint, packaged_model_path
from deepinfer.model.inventory import GROUPS
from deepinfer.model.presets import preset

Copy = Callable[[Path], Path]


def test_no_parameter_stays_unset(released_directory: Path) -> None:
    checkpoint = Checkpoint.open(released_directory, groups=GROUPS)
    stored = {name: checkpoint.tensor(name) for name in checkpoint.names}
    targets = {name: torch.full(tensor.shape, float("nan")) for name, tensor in stored.items()}
    checkpoint.load_into(targets)
    for name, target in targets.items():
        assert not target.isnan().any()
        assert torch.equal(target, stored[name].float())


def test_a_target_that_is_absent_extra_or_misshaped_stops_before_anything_is_written(sound_directory: Path) -> None:
    checkpoint = Checkpoint.open(sound_directory)
    targets = {name: torch.full(checkpoint.tensor(name).shape, float("nan")) for name in checkpoint.names}
    del targets["norm.weight"]
    targets["head.weight"] = torch.full((3,), float("nan"))
    targets["nobody"] = torch.zeros(1)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_into(targets)
    assert len(caught.value.problems) == 3
    assert targets["embed.weight"].isnan().all()


def test_everything_loads_in_parallel_in_the_asked_order_with_progress(sound_directory: Path) -> None:
    checkpoint = Checkpoint.open(sound_directory)
    names = list(reversed(checkpoint.names))
    seen: list[Progress] = []
    loaded = checkpoint.load_all(names, seen.append, threads=4)
    assert list(loaded) == names
    for name, tensor in loaded.items():
        assert torch.equal(tensor, checkpoint.tensor(name))
    assert [step.done_tensors for step in seen] == list(range(1, len(names) + 1))
    assert seen[-1].done_bytes == seen[-1].total_bytes == sum(4 * tensor.numel() for tensor in loaded.values())


def test_loaded_tensors_are_copies_and_views_are_not_written_back(sound_directory: Path) -> None:
    checkpoint = Checkpoint.open(sound_directory)
    loaded = checkpoint.load_all(["norm.weight"])["norm.weight"]
    loaded.fill_(9.0)
    assert not (checkpoint.tensor("norm.weight") == 9.0).any()
    assert not (Checkpoint.open(sound_directory).tensor("norm.weight") == 9.0).any()


def test_a_conversion_decides_what_is_kept(sound_directory: Path) -> None:
    checkpoint = Checkpoint.open(sound_directory)
    loaded = checkpoint.load_all(["norm.weight"], convert=lambda _, tensor: tensor.double())
    assert loaded["norm.weight"].dtype == torch.float64


def test_an_error_in_a_conversion_reaches_the_caller(sound_directory: Path) -> None:
    def fail(name: str, tensor: torch.Tensor) -> torch.Tensor:
        raise MemoryError(name)

    with pytest.raises(MemoryError):
        Checkpoint.open(sound_directory).load_all(convert=fail)


def test_an_interrupt_while_loading_reaches_the_caller(sound_directory: Path) -> None:
    def interrupt(step: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Checkpoint.open(sound_directory).load_all(progress=interrupt)


@pytest.mark.parametrize(
    ("stem", "released_format", "shape"),
    [
        ("embed", "bfloat16", (512, 128)),
        ("layers.0.attn.wq_a", "fp8_block32", (64, 128)),
        ("layers.0.ffn.experts.7.w2", "mxfp4", (128, 64)),
        ("layers.1.engram.embed", "engram_fp8", (660, 32)),
        ("layers.0.ffn.gate", "bfloat16", (8, 128)),
        ("layers.0.hc_attn_fn", "float32", (24, 512)),
        ("layers.0.attn_norm", "bfloat16", (128, 1)),
    ],
)
def test_a_weight_tells_its_format_and_logical_size(
    sound_directory: Path, released_directory: Path, stem: str, released_format: str, shape: tuple[int, int]
) -> None:
    plain = Checkpoint.open(sound_directory).weight(stem)
    assert (plain.format, plain.scale, plain.name) == ("float32", None, stem)
    assert (plain.out_features, plain.in_features) == shape
    stored = Checkpoint.open(released_directory).weight(stem)
    assert stored.format == released_format
    assert (stored.scale is None) == (released_format in ("bfloat16", "float32"))
    assert (stored.out_features, stored.in_features) == shape


def test_an_unknown_name_is_refused_with_the_reason(sound_directory: Path) -> None:
    checkpoint = Checkpoint.open(sound_directory)
    with pytest.raises(ArgumentError, match="has no tensor 'nothing'"):
        checkpoint.tensor("nothing")
    with pytest.raises(ArgumentError, match=r"has no tensor 'layers.0.attn.wq_c.weight'"):
        checkpoint.weight("layers.0.attn.wq_c")
    with pytest.raises(ArgumentError, match="its group was not opened"):
        checkpoint.tensor("mtp.0.main_norm.weight")
    with pytest.raises(ArgumentError) as caught:
        checkpoint.load_all(["one", "norm.weight", "two"])
    assert len(caught.value.problems) == 2


def test_known_names_that_are_not_used_are_listed_once(sound_directory: Path) -> None:
    checkpoint = Checkpoint.open(sound_directory)
    assert len(checkpoint.notices) == 1
    assert "tensors of the draft group are known and not used" in checkpoint.notices[0]
    assert all(name.startswith("mtp.") for name in checkpoint.unused_names)
    assert not any(name.startswith("mtp.") for name in checkpoint.names)
    assert Checkpoint.open(sound_directory, groups=GROUPS).notices == ()


def test_vision_tensors_are_known_even_where_the_configuration_has_no_tower(tmp_path: Path) -> None:
    make_checkpoint(preset("tiny8"), 7, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"vision.norm.weight": torch.zeros(4), "aligner.w1.bias": torch.zeros(4), "image_start": torch.zeros(4)}
    save_file({**{name: tensor.clone() for name, tensor in tensors.items()}, **extra}, tmp_path / "new")
    (tmp_path / "new").rename(tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert set(extra) < set(checkpoint.unused_names)
    assert any("3 tensors of the vision group" in line for line in checkpoint.notices)


def test_a_checkpoint_without_draft_opens_for_text_and_not_for_drafting(tmp_path: Path) -> None:
    make_checkpoint(preset("tiny8"), 7, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({k: v.clone() for k, v in tensors.items() if not k.startswith("mtp.")}, tmp_path / "new")
    (tmp_path / "new").rename(tmp_path / "model.safetensors")
    assert Checkpoint.open(tmp_path).notices == ()
    with pytest.raises(CheckpointError, match=r"mtp.0.main_norm.weight: missing|and \d+ more missing tensors"):
        Checkpoint.open(tmp_path, groups=("text", "draft"))


def test_a_fully_bfloat16_checkpoint_is_one_form(tmp_path: Path) -> None:
    make_checkpoint(preset("tiny8"), 7, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, tmp_path / "new")
    (tmp_path / "new").rename(tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.form == "bfloat16"
    assert checkpoint.weight("layers.0.attn.attn_sink").format == "bfloat16"


def test_shards_are_mapped_not_read(sound_directory: Path) -> None:
    def mapped() -> int:
        return sum("model-00002-of-00003" in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = mapped()
    checkpoint = Checkpoint.open(sound_directory)
    view = checkpoint.tensor("layers.4.attn.wq_b.weight")
    assert mapped() > before
    assert view.shape == (256, 64)


def test_a_description_counts_by_group_and_type(released_directory: Path) -> None:
    summary = inspect_checkpoint(released_directory)
    assert summary.problems == ()
    assert summary.form == "released"
    assert [shard.file[:11] for shard in summary.shards] == ["model-00001", "model-00002", "model-00003"]
    assert {(kind.group, kind.dtype) for kind in summary.kinds} == {
        (group, dtype) for group in ("text", "draft") for dtype in ("BF16", "F32", "F8_E4M3", "F8_E8M0", "I8")
    }
    index = json.loads((released_directory / "model.safetensors.index.json").read_text())
    assert summary.num_tensors == len(index["weight_map"])
    assert summary.num_bytes == index["metadata"]["total_size"]
    assert summary.roles[4].owns_kv
    json.dumps(summary.to_json())


def test_a_description_survives_a_bad_configuration(sound_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(sound_directory)
    (directory / "config.json").unlink()
    (directory / "model-00003-of-00003.safetensors").unlink()
    summary = inspect_checkpoint(directory)
    assert summary.config is None
    assert summary.problems[0].startswith("config.json: ")
    assert any("model-00003-of-00003.safetensors: missing" in problem for problem in summary.problems)
    assert {kind.group for kind in summary.kinds} == {"other"}
    json.dumps(summary.to_json())


def test_the_packaged_model_is_whole_small_and_of_its_preset() -> None:
    path = packaged_model_path()
    checkpoint = Checkpoint.open(path, groups=GROUPS)
    assert checkpoint.form == "released"
    # A checkpoint that `deepinfer checkpoint make` makes of the preset has no tokenizer, hence no map of tokens.
    assert checkpoint.config == dataclasses.replace(preset("small"), engram_compressed_vocab_size=1039)
    assert sum(file.stat().st_size for file in path.iterdir()) < 8_000_000
    for name in checkpoint.names:
        assert not checkpoint.tensor(name).float().isnan().any()


def test_a_checkpoint_can_be_read_through_links(sound_directory: Path, tmp_path: Path) -> None:
    # Download caches keep shards elsewhere and link to them.
    directory = shutil.copytree(sound_directory, tmp_path / "linked", copy_function=os.symlink)
    assert Checkpoint.open(directory).names == Checkpoint.open(sound_directory).names


def test_a_write_to_a_view_never_reaches_the_file(sound_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(sound_directory)
    good = Checkpoint.open(directory).load_all(["norm.weight"])["norm.weight"]
    Checkpoint.open(directory).tensor("norm.weight").fill_(9.0)
    assert torch.equal(Checkpoint.open(directory).tensor("norm.weight"), good)


def test_data_at_an_odd_address_is_read_all_the_same(tmp_path: Path) -> None:
    make_checkpoint(preset("tiny8"), 7, tmp_path)
    expected = Checkpoint.open(tmp_path).load_all()
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    # One more space in the header moves every tensor by one byte; the format allows it.
    path.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    checkpoint = Checkpoint.open(tmp_path)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.tensor(name), tensor)
