"""The driver in interpreted mode: what it claims, what it says, and that its ops are the kernels."""

from __future__ import annotations

import logging

import pytest
import torch

from deepinfer.accelerator import OpOptions, Repeatability, all_op_names, make_plan, needed_op_names
from deepinfer.accelerator.interface import LinearShape
from deepinfer.errors import DeterminismError, OpRefusedError
from deepinfer_conformance import triton_cpu
from deepinfer_cpu_ref import Driver as CpuRef
from deepinfer_nvidia import Driver, assembly, interpreting

OPTIONS = [
    OpOptions(activation_dtype=dtype, numerics=numerics, kv_cache_dtype=cache)
    for dtype in (torch.float32, torch.bfloat16)
    for numerics in ("portable", "served")
    for cache in ("released", "float32")
]


@pytest.fixture
def driver(session):
    return Driver(interpreted=True, libraries=())


@pytest.mark.parametrize("options", OPTIONS, ids=lambda each: f"{each.numerics}-{each.kv_cache_dtype}")
def test_every_op_of_the_text_model_is_native_and_says_that_it_is_interpreted(driver, options):
    plan = make_plan(driver, options, reference=CpuRef())
    providers = {row.op: row.provider for row in plan.rows}
    assert {providers[op] for op in needed_op_names()} == {"interpreted triton"}
    assert plan.fallbacks == ()


def test_every_op_of_the_contract_is_served_drafts_included(driver):
    claims = driver.capabilities()
    assert set(claims.ops) == set(all_op_names())
    assert claims.declared_fallbacks == ()
    assert make_plan(driver, OpOptions(), reference=CpuRef(), features=("drafts",)).fallbacks == ()


def test_what_an_interpreter_has_not_is_not_claimed(driver):
    claims = driver.capabilities()
    assert not claims.graphs
    assert claims.collectives == ()
    assert driver.device == torch.device("cpu")
    assert not any(claim.graph_safe for claim in claims.ops.values())
    with pytest.raises(OpRefusedError, match="recorded graphs"):
        driver.new_graph()


def test_it_is_said_loudly_once(session, caplog):
    with caplog.at_level(logging.WARNING):
        driver = Driver(interpreted=True)
        driver.op_groups(OpOptions())
    (record,) = caplog.records
    assert "INTERPRETED" in record.message
    assert "DEEPINFER_NVIDIA_INTERPRET" in record.message


def test_the_environment_chooses_the_mode(monkeypatch):
    monkeypatch.setenv("DEEPINFER_NVIDIA_INTERPRET", "1")
    found = Driver.availability()
    assert found.available, found.reasons
    assert "interpreted" in found.device_name
    assert Driver().interpreted
    monkeypatch.setenv("DEEPINFER_NVIDIA_INTERPRET", "0")
    assert not Driver().interpreted


def test_the_kit_is_found_without_being_named():
    assert interpreting.triton_kit() is triton_cpu


def test_a_block_of_the_kit_that_is_open_is_used(driver, session):
    driver.op_groups(OpOptions())["norm"].rms(torch.ones(2, 64), torch.ones(64), 1e-6)
    assert [launch.kernel for launch in session.launches] == ["rms_norm_kernel"]


def test_batch_invariance_is_tried_and_higher_levels_are_refused(driver):
    shapes = [LinearShape(96, 40, torch.bfloat16), LinearShape(96, 40, torch.float32)]
    driver.set_determinism(Repeatability.BATCH_INVARIANT, shapes)
    with pytest.raises(DeterminismError, match="R3 needs an exchange"):
        driver.set_determinism(Repeatability.PLACEMENT_INVARIANT, shapes)


def test_a_product_that_depends_on_its_batch_is_found(driver, monkeypatch):
    kind = assembly.group_types()["linear"]
    dense = kind.dense
    monkeypatch.setattr(kind, "dense", lambda self, x_TK, weight: dense(self, x_TK, weight) * len(x_TK))
    with pytest.raises(DeterminismError, match=r"product 64 x 40 torch\.float32 changes its bits with"):
        driver.set_determinism(Repeatability.BATCH_INVARIANT, [LinearShape(96, 40, torch.float32)])
