"""Claims are conservative, honest chip by chip, and what nobody claims is a fallback by name."""

from __future__ import annotations

import os
import sys
import types

import pytest
import torch

from deepinfer.accelerator.capabilities import OpCapability, Repeatability
from deepinfer.accelerator.interface import LinearShape, OpOptions
from deepinfer.accelerator.ops import OP_GROUPS, all_op_names
from deepinfer.accelerator.ops.attention import AttentionOps
from deepinfer.accelerator.ops.codec import CodecOps
from deepinfer.errors import DeterminismError, DriverLoadError
from deepinfer_ascend import providers
from deepinfer_ascend.arithmetic import Arithmetic
from deepinfer_ascend.capabilities import NATIVE, claims_of
from deepinfer_ascend.determinism import missing_for, prove
from deepinfer_ascend.driver import native_groups
from deepinfer_ascend.operators import Operators
from deepinfer_ascend.soc import DEFAULT_NAMES, detect

CHIPS = [detect(name) for name in DEFAULT_NAMES]
HOST = torch.device("cpu")


@pytest.mark.parametrize("chip", CHIPS, ids=DEFAULT_NAMES)
def test_what_is_claimed_is_implemented_and_the_rest_is_named(chip):
    groups = native_groups(Arithmetic.of(OpOptions(), chip, HOST), Operators())
    implemented = {f"{name}.{op}" for name, group in groups.items() for op in type(group).implemented()}
    said = claims_of(chip)
    assert set(said.ops) == implemented == set(NATIVE)
    assert set(said.ops) | set(said.declared_fallbacks) == set(all_op_names())


@pytest.mark.parametrize("chip", CHIPS, ids=DEFAULT_NAMES)
def test_quantised_products_are_served_only_where_the_matrix_unit_takes_them(chip):
    said = claims_of(chip)
    for op in ("linear.dense", "experts.routed", "experts.local"):
        assert ("served" in said.ops[op].numerics) == chip.has_mx
        assert (op in said.declared_fallbacks) == (not chip.has_mx)
    assert said.ops["mixing.mixes"].provider == ("torch-npu" if chip.has_mx else "aten")


def test_nothing_that_adds_claims_batch_invariance():
    said = claims_of(CHIPS[0])
    invariant = {op for op, claim in said.ops.items() if claim.repeatability >= Repeatability.BATCH_INVARIANT}
    assert invariant == {
        "linear.embed", "codec.store_window", "memory.ngram_rows", "memory.gather_rows", "sampling.adjust",
        "plumbing.window_slots", "plumbing.entry_slots", "moves.copy", "moves.zero", "moves.save", "moves.restore",
    }  # fmt: skip


def test_ops_bound_together_are_native_together():
    for group in OP_GROUPS:
        for names in group.bound_together:
            identifiers = {f"{group.group}.{name}" for name in names}
            assert not identifiers & set(NATIVE) or identifiers <= set(NATIVE)


def test_every_op_that_is_not_native_has_an_order_of_providers_or_is_of_a_later_minor():
    ordered = set(providers.ORDER)
    assert not ordered & set(NATIVE)
    assert {op for op in all_op_names() if not op.startswith("drafting.")} == ordered | set(NATIVE)


def test_levels_are_refused_with_every_reason():
    claims = claims_of(CHIPS[0]).ops
    assert missing_for(Repeatability.RUN_TO_RUN, claims, {}) == []
    assert any("linear.dense" in text for text in missing_for(Repeatability.BATCH_INVARIANT, claims, {}))
    three = missing_for(Repeatability.PLACEMENT_INVARIANT, claims, {"HCCL_DETERMINISTIC": "false"})
    assert len(three) == 3
    with pytest.raises(DeterminismError, match=r"R3.*linear\.dense.*exchange of expert rows"):
        prove(Repeatability.PLACEMENT_INVARIANT, [], claims, HOST, set_level=[].append)


def test_a_level_is_set_and_then_tried(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    shapes = [LinearShape(64, 32, torch.float32)]
    copies = {"linear.embed": OpCapability(repeatability=Repeatability.BATCH_INVARIANT)}
    levels = []
    prove(Repeatability.RUN_TO_RUN, shapes, copies, HOST, set_level=levels.append)
    prove(
        Repeatability.BATCH_INVARIANT, shapes, copies, HOST, set_level=levels.append, product=lambda x, w: x[:, :1] * 2
    )
    assert levels == [1, 3]
    with pytest.raises(DeterminismError, match=r"64 x 32 torch\.float32 changes its bits with 1 rows"):
        prove(
            Repeatability.BATCH_INVARIANT,
            shapes,
            copies,
            HOST,
            set_level=levels.append,
            product=lambda x, w: x[:, :1] + x.shape[0],
        )


class Own(CodecOps):
    """One native op."""

    def store_window(self, cache, records_Tb, slot_T):
        return "own"


class Kernels(CodecOps):
    """Two ops from elsewhere, one of which is native too."""

    def store_window(self, cache, records_Tb, slot_T):
        return "kernels"

    def encode(self, x_TC, record_format):
        return "kernels"


def test_native_ops_come_first_and_kernels_complete_them():
    attention = AttentionOps()
    made = providers.merged({"codec": Own()}, {"codec": Kernels(), "attention": attention})
    assert made["codec"].store_window(None, None, None) == "own"
    assert made["codec"].encode(None, None) == "kernels"
    assert type(made["codec"]).implemented() == ("encode", "store_window")
    assert made["attention"] is attention


def test_kernels_are_taken_only_where_triton_compiles_for_npus(monkeypatch):
    module = types.ModuleType("deepinfer_triton.codec")
    module.TritonCodecOps = Kernels
    monkeypatch.setitem(sys.modules, "deepinfer_triton.codec", module)
    installed = {"deepinfer_triton", "deepinfer_triton.codec"}
    assert providers.triton_groups(lambda: False, installed.__contains__) == {}
    assert providers.triton_groups(lambda: True, lambda name: False) == {}
    found = providers.triton_groups(lambda: True, installed.__contains__)
    assert found == {"codec": Kernels}
    claims = claims_of(CHIPS[0], providers.triton_claims(found))
    assert claims.ops["codec.encode"].provider == "triton"
    assert claims.ops["codec.store_window"].provider == "torch-npu"
    assert "codec.encode" not in claims.declared_fallbacks


def test_kernels_of_a_group_with_one_that_does_not_lower_are_claimed_for_portable_numerics_alone():
    assert set(providers.NOT_LOWERED) == {"served_attention_kernel"}
    claims = providers.triton_claims({"attention": Kernels, "codec": Kernels})
    assert {name: claim.numerics for name, claim in claims.items() if name.startswith("attention.")} == {
        f"attention.{name}": frozenset({"portable"}) for name in Kernels.implemented()
    }
    assert claims["codec.encode"].numerics == frozenset({"portable", "served"})


def test_kernels_that_do_not_load_are_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepinfer_triton.codec", types.ModuleType("deepinfer_triton.codec"))
    with pytest.raises(DriverLoadError, match="TritonCodecOps"):
        providers.triton_groups(lambda: True, {"deepinfer_triton", "deepinfer_triton.codec"}.__contains__)


def test_vendor_operators_are_found_in_each_namespace_and_left_with_a_reason():
    assert providers.vendor_operators() == ()
    found = providers.vendor_operators(lambda namespace, name: (namespace, name) == ("_C_ascend", "compressor"))
    (one,) = found
    assert one.as_json()["operator"] == "_C_ascend.compressor"
    assert one.as_json()["used"] == "no"
    assert "position bias" in one.as_json()["why"]
