"""Loading: every parameter finds its place, in the precision that the contract names."""

import threading
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.linear import LinearOps
from deepinfer.accelerator.plan import make_plan
from deepinfer.accelerator.weights import PreparedWeight, StoredWeight
from deepinfer.errors import ArgumentError, InvariantError
from deepinfer.model import ModelConfig
from deepinfer.model.checkpoint import Checkpoint, Progress, make_checkpoint
from deepinfer.model.inventory import parameters
from deepinfer.model.rotary import rotary_tables
from deepinfer.model.transformer import Transformer
from deepinfer.model.weights import load_model
from deepinfer.numerics import dequantise_engram_rows, dequantise_fp8_weight, dequantise_mxfp4_weight
from deepinfer_cpu_ref import Driver

CPU = torch.device("cpu")
BenchMaker = Callable[..., Any]


@pytest.fixture(scope="module")
def ops() -> Ops:
    return make_plan(Driver(), OpOptions()).ops


class WatchedLinear(LinearOps):
    """Passes preparation on and keeps the precision that each weight was asked for in."""

    def __init__(self, watched: LinearOps, broken: str = "") -> None:
        self.watched = watched
        self.broken = broken
        self.precisions: dict[str, str] = {}

    def prepare(self, stored: StoredWeight, precision: Any = "activation") -> PreparedWeight:
        if stored.name == self.broken:
            raise MemoryError(stored.name)
        self.precisions[stored.name] = precision
        return self.watched.prepare(stored, precision)

    def prepare_grouped(self, stored: StoredWeight, groups: int) -> PreparedWeight:
        return self.watched.prepare_grouped(stored, groups)


def test_progress_grows_in_the_callers_thread_and_ends_complete(
    golden_directory: Path, tiny8: ModelConfig, ops: Ops
) -> None:
    seen: list[Progress] = []
    callers: set[int] = set()

    def watch(progress: Progress) -> None:
        seen.append(progress)
        callers.add(threading.get_ident())

    load_model(tiny8, Checkpoint.open(golden_directory), ops, CPU, progress=watch, threads=2)
    assert callers == {threading.get_ident()}
    assert [p.done_bytes for p in seen] == sorted(p.done_bytes for p in seen)
    assert [p.done_tensors for p in seen] == sorted(p.done_tensors for p in seen)
    assert seen[-1].done_tensors == seen[-1].total_tensors == len(parameters(tiny8, ("text",)))
    assert seen[-1].done_bytes == seen[-1].total_bytes > 0


def test_a_parameter_without_a_place_in_the_model_is_an_error(
    golden_directory: Path, tiny8: ModelConfig, ops: Ops
) -> None:
    checkpoint = Checkpoint.open(golden_directory, groups=("text", "draft"))
    with pytest.raises(InvariantError, match=r"mtp\.0"):
        load_model(tiny8, checkpoint, ops, CPU)


def test_a_failing_part_ends_the_loading(golden_directory: Path, tiny8: ModelConfig, ops: Ops) -> None:
    broken = replace(ops, linear=WatchedLinear(ops.linear, broken="layers.3.attn.wq_b.weight"))
    with pytest.raises(MemoryError, match=r"layers\.3"):
        load_model(tiny8, Checkpoint.open(golden_directory), broken, CPU)


def test_only_promoted_products_are_prepared_in_float32(golden_directory: Path, tiny8: ModelConfig, ops: Ops) -> None:
    linear = WatchedLinear(ops.linear)
    load_model(tiny8, Checkpoint.open(golden_directory), replace(ops, linear=linear), CPU)
    promoted = {name for name, precision in linear.precisions.items() if precision == "float32"}
    pooled = {f"layers.2.attn.compressor.{name}.weight" for name in ("wkv", "wgate")}
    assert promoted == {"head.weight"} | pooled
    assert linear.precisions["layers.4.attn.compressor.wkv.weight"] == "activation"


def tensors_of(value: object, path: str = "") -> dict[str, Tensor]:
    """Every tensor of a tree of dataclasses, by its path."""
    if isinstance(value, Tensor):
        return {path: value}
    found: dict[str, Tensor] = {}
    if isinstance(value, tuple):
        for place, item in enumerate(value):
            found |= tensors_of(item, f"{path}.{place}")
    elif is_dataclass(value) and not isinstance(value, PreparedWeight):
        for member in fields(value):
            found |= tensors_of(getattr(value, member.name), f"{path}.{member.name}")
    return found


def test_norms_mixes_sinks_and_biases_are_float32_whatever_is_stored(
    ops: Ops, tiny8: ModelConfig, tmp_path: Path
) -> None:
    directory = make_checkpoint(tiny8, 3, tmp_path / "bfloat16", "bfloat16")
    weights = load_model(tiny8, Checkpoint.open(directory), ops, CPU)
    kept_as_stored = ("embed_VD", "gate_ED", "rows_RW")
    for path, tensor in tensors_of(weights).items():
        if path.endswith(kept_as_stored):
            assert tensor.dtype == torch.bfloat16, path
        elif tensor.is_floating_point():
            assert tensor.dtype == torch.float32, path
    assert len(tensors_of(weights)) > 100


@pytest.mark.parametrize("length", [511, 513])
def test_a_token_map_of_the_wrong_length_is_refused(
    golden_directory: Path, tiny8: ModelConfig, ops: Ops, length: int
) -> None:
    with pytest.raises(ArgumentError, match=rf"\[{length}\]"):
        load_model(tiny8, Checkpoint.open(golden_directory), ops, CPU, token_map=np.zeros(length, dtype=np.int64))


def test_the_pad_id_of_the_hash_is_mapped(golden_directory: Path, tiny8: ModelConfig, ops: Ops) -> None:
    mapping = np.arange(512, dtype=np.int64)[::-1].copy()
    weights = load_model(tiny8, Checkpoint.open(golden_directory), ops, CPU, token_map=mapping)
    assert [layer.engram.hash.pad_id for layer in weights.layers if layer.engram is not None] == [509, 509]
    assert weights.token_map_V.tolist() == mapping.tolist()


def test_a_released_checkpoint_computes_what_its_dequantised_weights_compute(
    bench_of: BenchMaker, tiny8: ModelConfig, tmp_path: Path
) -> None:
    released = make_checkpoint(tiny8, 11, tmp_path / "released", "released")
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text((released / "config.json").read_text())
    save_file(dequantised(Checkpoint.open(released)), plain / "model.safetensors")

    options = OpOptions(kv_cache_dtype="float32", batch_invariant=True)
    bench = bench_of(options=options)
    logits = []
    for directory in (released, plain):
        made = make_plan(Driver(), options).ops
        weights = load_model(tiny8, Checkpoint.open(directory), made, CPU)
        bench.model = Transformer(tiny8, weights, made, rotary_tables(tiny8, 64))
        request = bench.admit(list(range(3, 43)))
        logits.append(bench.prefill(request, [17, 23]))
        bench.release(request)
    assert torch.equal(logits[0], logits[1])


def dequantised(checkpoint: Checkpoint) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for parameter in checkpoint.parameters:
        stored = checkpoint.weight(parameter.name.removesuffix(".weight"))
        if stored.scale is None:
            found[parameter.name] = stored.weight.to(torch.float32).clone()
        elif stored.format == "fp8_block32":
            found[parameter.name] = dequantise_fp8_weight(stored.weight, stored.scale)
        elif stored.format == "mxfp4":
            found[parameter.name] = dequantise_mxfp4_weight(stored.weight, stored.scale)
        else:
            found[parameter.name] = dequantise_engram_rows(stored.weight, stored.scale)
    return found
