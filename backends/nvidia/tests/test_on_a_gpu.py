"""First things to try on a GPU: ``pytest -m gpu``. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from deepinfer.accelerator import OpOptions, Repeatability
from deepinfer.accelerator.interface import LinearShape
from deepinfer_nvidia import Driver

pytestmark = pytest.mark.gpu


@pytest.fixture
def driver():
    found = Driver.availability()
    assert found.available, found.reasons
    return Driver(interpreted=False, libraries=())


def test_the_device_says_who_it_is(driver):
    memory = driver.memory()
    assert driver.chip.family in ("SM100", "SM90")
    assert 0 < memory.free_bytes <= memory.total_bytes


def test_a_kernel_gives_what_torch_gives(driver):
    x = torch.randn(5, 5120, device=driver.device)
    found = driver.op_groups(OpOptions())["norm"].rms(x, torch.ones(5120, device=driver.device), 1e-6)
    torch.testing.assert_close(found, torch.nn.functional.rms_norm(x, (5120,), eps=1e-6), rtol=1e-5, atol=1e-5)


def test_a_recorded_kernel_reads_new_values_at_the_same_address(driver):
    norm = driver.op_groups(OpOptions())["norm"]
    x, weight = torch.ones(3, 64, device=driver.device), torch.ones(64, device=driver.device)
    norm.rms(x, weight, 1e-6)
    graph = driver.new_graph()
    graph.capture_begin()
    out = norm.rms(x, weight, 1e-6)
    graph.capture_end()
    x.copy_(torch.arange(192, device=driver.device).view(3, 64))
    graph.replay()
    driver.synchronize()
    torch.testing.assert_close(out, norm.rms(x, weight, 1e-6), rtol=0, atol=0)


def test_products_do_not_depend_on_their_batch(driver):
    shapes = [LinearShape(5120, 512, torch.bfloat16), LinearShape(1280, 32768, torch.bfloat16)]
    driver.set_determinism(Repeatability.BATCH_INVARIANT, shapes)
