"""The inventory: the released checkpoint, name by name and byte by byte."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from deepinfer.model.inventory import TensorEntry, inventory, parameters
from deepinfer.model.presets import preset

FLASH = preset("v41-flash")
TORCH_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
}


@pytest.fixture(scope="module")
def released() -> dict[str, TensorEntry]:
    return {entry.name: entry for entry in inventory(FLASH)}


def test_the_released_inventory_has_the_published_size_on_meta_tensors(released: dict[str, TensorEntry]) -> None:
    assert len(inventory(FLASH)) == len(released) == 96_085
    num_bytes = 0
    for entry in released.values():
        tensor = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device="meta")
        assert tensor.numel() * tensor.element_size() == entry.num_bytes
        num_bytes += entry.num_bytes
    assert num_bytes == 510_286_023_000


def test_the_released_parts_have_the_published_counts(released: dict[str, TensorEntry]) -> None:
    assert Counter(entry.group for entry in released.values()) == {
        "text": 3 + 40 * 2334 + 11 + 32 + 12,
        "draft": 3 * 798 + 7,
        "vision": 259 + 7,
    }
    assert sum(entry.num_bytes for entry in released.values() if entry.group == "vision") == 970_536_960
    expert = [entry.num_bytes for name, entry in released.items() if name.startswith("layers.7.ffn.experts.99.")]
    assert sum(expert) == 18_800_640


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("embed.weight", "BF16", (129280, 5120)),
        ("layers.0.attn.wq_a.weight", "F8_E4M3", (1280, 5120)),
        ("layers.0.attn.wq_a.scale", "F8_E8M0", (40, 160)),
        ("layers.39.attn.wq_b.scale", "F8_E8M0", (1024, 40)),
        ("layers.3.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.3.attn.wo_a.scale", "F8_E8M0", (256, 128)),
        ("layers.3.attn.attn_sink", "F32", (64,)),
        ("layers.3.hc_ffn_fn", "F32", (24, 20480)),
        ("layers.3.ffn.gate.bias_vl", "F32", (384,)),
        ("layers.3.ffn.experts.383.w1.weight", "I8", (2304, 2560)),
        ("layers.3.ffn.experts.383.w2.weight", "I8", (5120, 1152)),
        ("layers.3.ffn.experts.383.w2.scale", "F8_E8M0", (5120, 72)),
        ("layers.3.ffn.shared_experts.w2.scale", "F8_E8M0", (160, 72)),
        ("layers.14.attn.compressor.wgate.weight", "BF16", (512, 5120)),
        ("layers.20.attn.indexer.wk.weight", "BF16", (128, 512)),
        ("layers.24.attn.indexer.weights_proj.weight", "BF16", (32, 5120)),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384016682, 8)),
        ("layers.1.engram.wkv.weight", "F8_E4M3", (25600, 6144)),
        ("layers.1.engram.q_weight", "BF16", (4, 5120)),
        ("mtp.1.ffn.gate.weight", "BF16", (128, 5120)),
        ("mtp.0.main_proj.scale", "F8_E8M0", (160, 480)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
        ("vision.blocks.31.mlp.w1.weight", "BF16", (5632, 1024)),
        ("aligner.w1.weight", "BF16", (5120, 9216)),
        ("image_newline", "BF16", (5120,)),
    ],
)
def test_released_samples(released: dict[str, TensorEntry], name: str, dtype: str, shape: tuple[int, ...]) -> None:
    assert (released[name].dtype, released[name].shape) == (dtype, shape)


@pytest.mark.parametrize(
    "name",
    [
        "layers.20.attn.compressor.wgate.weight",  # ratio 1 weighs nothing
        "layers.24.attn.indexer.wk.weight",  # reads layer 20's index keys
        "layers.3.attn.indexer.wq_b.weight",
        "mtp.0.norm.weight",  # the last stage has it
        "embed.scale",
    ],
)
def test_names_that_the_released_checkpoint_lacks(released: dict[str, TensorEntry], name: str) -> None:
    assert name not in released


def test_unquantised_forms_have_logical_shapes_and_no_scales() -> None:
    config = preset("tiny8")
    logical = {parameter.name: parameter.shape for parameter in parameters(config)}
    for form, dtypes in (("float32", {"F32"}), ("bfloat16", {"F32", "BF16"})):
        entries = inventory(config, form)  # type: ignore[arg-type]
        assert {entry.name: entry.shape for entry in entries} == logical
        assert {entry.dtype for entry in entries} == dtypes


def test_groups_can_be_asked_for_one_by_one() -> None:
    config = preset("tiny8")
    text = inventory(config, groups=("text",))
    draft = inventory(config, groups=("draft",))
    assert set(text) | set(draft) == set(inventory(config))
    assert not any(entry.name.startswith("mtp.") for entry in text)
    assert all(entry.name.startswith("mtp.") for entry in draft)
