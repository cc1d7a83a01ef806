"""Damaged checkpoints: each kind of damage is refused before anything is served, naming file and tensor."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer.errors import CheckpointError, ConfigurationError
from deepinfer.model.checkpoint import Checkpoint, inspect_checkpoint

Copy = Callable[[Path], Path]
FIRST, SECOND, THIRD = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
INDEX = "model.safetensors.index.json"
NORM = "layers.0.attn_norm.weight"  # in the first shard


def replace_bytes(path: Path, data: bytes) -> None:
    path.unlink()  # the fixture's file is linked here
    path.write_bytes(data)


def replace_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    path.unlink()
    save_file(tensors, path)


def removing(name: str) -> Callable[[dict[str, Any]], None]:
    def remove(mapping: dict[str, Any]) -> None:
        del mapping[name]

    return remove


def change_json(path: Path, change: Callable[[dict[str, dict[str, object]]], None]) -> None:
    decoded = json.loads(path.read_text())
    change(decoded)
    path.unlink()
    path.write_text(json.dumps(decoded))


def change_header(path: Path, change: Callable[[dict[str, dict[str, object]]], None]) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    replace_bytes(path, struct.pack("<Q", len(text)) + text + data[8 + length :])


def refusal(directory: Path) -> str:
    """The error of opening, after checking that the description tells the same problems."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    assert inspect_checkpoint(directory).problems == caught.value.problems
    return str(caught.value)


def test_a_shard_that_lost_its_last_byte(sound_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(sound_directory)
    replace_bytes(directory / SECOND, (directory / SECOND).read_bytes()[:-1])
    text = refusal(directory)
    last = max(
        (entry["data_offsets"][1], name)
        for name, entry in json.loads(header_text(sound_directory / SECOND)).items()
        if name != "__metadata__"
    )[1]
    assert f"{SECOND}: {last}: its data end" in text
    assert "1 problem\n" in text


def header_text(path: Path) -> bytes:
    data = path.read_bytes()
    return data[8 : 8 + struct.unpack("<Q", data[:8])[0]]


def test_a_shard_cut_inside_its_header(sound_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(sound_directory)
    replace_bytes(directory / SECOND, (directory / SECOND).read_bytes()[:100])
    assert f"{SECOND}: announces a header of" in refusal(directory)


@pytest.mark.parametrize("data", [b"", b"\x00" * 7])
def test_an_empty_or_tiny_shard(sound_directory: Path, copy_of: Copy, data: bytes) -> None:
    directory = copy_of(sound_directory)
    replace_bytes(directory / SECOND, data)
    assert f"{SECOND}: {len(data)} bytes long" in refusal(directory)


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff\xfe", b'{"a": 5}', b'{"a": {"dtype": "F32", "shape": [-1]}}'])
def test_a_header_that_is_no_header(sound_directory: Path, copy_of: Copy, text: bytes) -> None:
    directory = copy_of(sound_directory)
    replace_bytes(directory / SECOND, struct.pack("<Q", len(text)) + text)
    assert f"{SECOND}: " in refusal(directory)


def test_bytes_after_the_last_tensor(sound_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(sound_directory)
    replace_bytes(directory / THIRD, (directory / THIRD).read_bytes() + b"x")
    assert "1 bytes after" in refusal(directory)


def test_a_missing_shard(sound_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(sound_directory)
    (directory / SECOND).unlink()
    text = refusal(directory)
    assert f"{SECOND}: missing; the index places" in text
    assert "1 problem\n" in text


def test_a_deleted_index(sound_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(sound_directory)
    (directory / INDEX).unlink()
    assert f"3 safetensors files ({FIRST}, {SECOND}, {THIRD}) and no {INDEX}" in refusal(directory)


def test_a_lone_shard_of_a_sharded_checkpoint(sound_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(sound_directory)
    for name in (INDEX, SECOND, THIRD):
        (directory / name).unlink()
    text = refusal(directory)
    assert "layers.3.attn_norm.weight: missing" in text
    assert "more missing tensors" in text


def test_no_weights_at_all(sound_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(sound_directory)
    for name in (INDEX, FIRST, SECOND, THIRD):
        (directory / name).unlink()
    assert "no safetensors file" in refusal(directory)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_an_unusable_index(sound_directory: Path, copy_of: Copy, text: str) -> None:
    directory = copy_of(sound_directory)
    replace_bytes(directory / INDEX, text.encode())
    assert f"{INDEX}: " in refusal(directory)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "config.json"])
def test_an_index_that_points_outside(sound_directory: Path, copy_of: Copy, file: str) -> None:
    directory = copy_of(sound_directory)
    change_json(directory / INDEX, lambda index: index["weight_map"].update({NORM: file}))
    assert f"{INDEX}: {NORM}: {file!r} is not the name of a safetensors file beside the index" in refusal(directory)


def test_an_index_that_lists_what_the_shard_lacks(sound_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(sound_directory)
    change_json(directory / INDEX, lambda index: index["weight_map"].update({NORM: THIRD}))
    text = refusal(directory)
    assert f"{THIRD}: {NORM}: listed by the index and absent from the file; {FIRST} holds one" in text


def test_a_tensor_that_the_index_leaves_out(sound_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(sound_directory)
    change_json(directory / INDEX, lambda index: removing(NORM)(index["weight_map"]))
    text = refusal(directory)
    assert f"{FIRST}: {NORM}: in the file and not listed by the index" in text
    assert f"{NORM}: missing" in text


def test_a_stale_copy_in_another_shard_loses_whatever_the_file_order(sound_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(sound_directory)
    good = Checkpoint.open(sound_directory).tensor(NORM).clone()
    replace_tensors(directory / THIRD, lambda tensors: tensors.update({NORM: good + 1}))
    replace_tensors(directory / FIRST, lambda tensors: tensors.update({"head.weight": tensors["head.weight"]}))
    checkpoint = Checkpoint.open(directory)
    assert torch.equal(checkpoint.tensor(NORM), good)
    assert f"{THIRD}: {NORM}: unused second copy; the index takes it from {FIRST}" in checkpoint.notices


def test_a_file_that_the_index_does_not_mention_is_left_alone_and_named(sound_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(sound_directory)
    good = Checkpoint.open(sound_directory).tensor(NORM).clone()
    save_file({NORM: good + 1}, directory / "aaa.safetensors")
    checkpoint = Checkpoint.open(directory)
    assert torch.equal(checkpoint.tensor(NORM), good)
    assert any("aaa.safetensors: not mentioned" in line and NORM in line for line in checkpoint.notices)


def test_a_missing_tensor(sound_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(sound_directory)
    replace_tensors(directory / FIRST, removing(NORM))
    change_json(directory / INDEX, lambda index: removing(NORM)(index["weight_map"]))
    assert f"{NORM}: missing; F32 [128] is needed" in refusal(directory)


def test_an_unknown_tensor(sound_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(sound_directory)
    extra = "layers.0.attn.wq_c.weight"
    replace_tensors(directory / FIRST, lambda tensors: tensors.update({extra: torch.zeros(2)}))
    change_json(directory / INDEX, lambda index: index["weight_map"].update({extra: FIRST}))
    assert f"{FIRST}: {extra}: unknown" in refusal(directory)


def test_a_tensor_of_another_shape(sound_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(sound_directory)
    replace_tensors(directory / FIRST, lambda tensors: tensors.update({NORM: torch.zeros(127)}))
    assert f"{FIRST}: {NORM}: shape [127], the configuration needs [128]" in refusal(directory)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32])
def test_a_tensor_of_another_type(sound_directory: Path, copy_of: Copy, dtype: torch.dtype) -> None:
    directory = copy_of(sound_directory)
    replace_tensors(directory / FIRST, lambda tensors: tensors.update({NORM: tensors[NORM].to(dtype)}))
    text = refusal(directory)
    assert f"{FIRST}: {NORM}: type " in text
    assert "float32 form needs F32" in text


def test_a_released_weight_without_its_scale(released_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(released_directory)
    scale = "layers.0.attn.wq_a.scale"
    file = json.loads((directory / INDEX).read_text())["weight_map"][scale]
    replace_tensors(directory / file, removing(scale))
    change_json(directory / INDEX, lambda index: removing(scale)(index["weight_map"]))
    assert f"{scale}: missing; F8_E8M0 [2, 4] is needed" in refusal(directory)


def test_a_part_of_an_unused_group(sound_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(sound_directory)
    name = "mtp.0.main_norm.weight"
    replace_tensors(directory / THIRD, removing(name))
    change_json(directory / INDEX, lambda index: removing(name)(index["weight_map"]))
    assert f"{name}: missing" in refusal(directory)


def test_overlapping_tensors(sound_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(sound_directory)
    other = "layers.0.ffn_norm.weight"

    def overlap(header: dict[str, dict[str, object]]) -> None:
        header[NORM]["data_offsets"] = header[other]["data_offsets"]

    change_header(directory / FIRST, overlap)
    text = refusal(directory)
    assert "its data overlap those of" in text
    assert "belong to no tensor" in text


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"dtype": "Q4"}, "dtype 'Q4' is not a safetensors type"),
        ({"shape": [129]}, "F32 [129] needs 516 bytes, data_offsets give 512"),
        ({"data_offsets": [5]}, "lacks a usable dtype, shape or data_offsets"),
        ({"data_offsets": [512, 0]}, "lacks a usable dtype, shape or data_offsets"),
    ],
)
def test_a_header_entry_that_contradicts_itself(
    sound_directory: Path, copy_of: Copy, change: dict[str, object], expected: str
) -> None:
    directory = copy_of(sound_directory)
    change_header(directory / FIRST, lambda header: header[NORM].update(change))
    assert f"{FIRST}: {NORM}: " in refusal(directory)
    assert expected in refusal(directory)


def test_a_name_that_stands_twice_in_a_header(sound_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(sound_directory)
    data = (directory / FIRST).read_bytes()
    text = header_text(directory / FIRST).rstrip()
    entry = json.dumps({NORM: json.loads(text)[NORM]}).encode()[1:-1]
    doubled = b"{" + entry + b"," + text[1:]
    replace_bytes(
        directory / FIRST, struct.pack("<Q", len(doubled)) + doubled + data[8 + struct.unpack("<Q", data[:8])[0] :]
    )
    assert f"{FIRST}: {NORM}: twice in the header" in refusal(directory)


def test_all_damage_is_told_at_once(sound_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(sound_directory)
    (directory / THIRD).unlink()
    replace_bytes(directory / SECOND, (directory / SECOND).read_bytes()[:-1])
    replace_tensors(directory / FIRST, lambda tensors: tensors.update({NORM: torch.zeros(127)}))
    text = refusal(directory)
    for part in (f"{THIRD}: missing", f"{SECOND}: ", f"{FIRST}: {NORM}: shape"):
        assert part in text


def test_many_problems_of_a_kind_stay_readable(sound_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(sound_directory)
    change_json(directory / "config.json", lambda config: config["text_config"].update({"hidden_size": 256}))
    text = refusal(directory)
    assert "more wrong tensors" in text
    assert len(text.splitlines()) < 120


def test_two_layers_swapped_in_the_configuration(sound_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(sound_directory)
    # A valid configuration, but layer 2's compressor would have to be layer 3's.
    swapped = {"kv_source_layer_ids": [3, 4], "index_source_layer_ids": [3, 4, 6]}
    ratios = {"compress_ratios": [0, 0, 0, 2, 1, 1, 1, 1, 0, 0]}
    change_json(directory / "config.json", lambda config: config["text_config"].update({**swapped, **ratios}))
    text = refusal(directory)
    assert "layers.3.attn.compressor.wkv.weight: missing" in text
    assert "layers.2.attn.compressor.wkv.weight: unknown" in text


def test_a_ratio_list_shorter_than_the_layers(sound_directory: Path, copy_of: Copy) -> None:
    directory = copy_of(sound_directory)
    change_json(directory / "config.json", lambda config: config["text_config"].update({"compress_ratios": [0, 0]}))
    with pytest.raises(ConfigurationError, match="compress_ratios: 2 entries"):
        Checkpoint.open(directory)


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    assert "is not a directory" in refusal(tmp_path / "absent")
