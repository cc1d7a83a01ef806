"""Each missing layer of the stack is a reason with a remedy, and all of them come at once."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from deepinfer_nvidia import interpreting, optional
from deepinfer_nvidia.architecture import SM90, SM100, by_name, detect
from deepinfer_nvidia.availability import survey, survey_interpreted


@dataclass(frozen=True)
class Machine:
    """A machine that answers as it is told; everything is there unless said otherwise."""

    triton: str | None = "3.8.0"
    cuda: str | None = "13.0"
    driver: bool = True
    devices: int = 1
    name: str = "NVIDIA B200"
    level: tuple[int, int] = (10, 0)

    def triton_version(self):
        return self.triton

    def torch_version(self):
        return "2.13.0"

    def cuda_version(self):
        return self.cuda

    def has_driver(self):
        return self.driver

    def device_count(self):
        return self.devices

    def device_name(self):
        return self.name

    def capability(self):
        return self.level


@pytest.mark.parametrize("series", ["3.6.0", "3.7.1", "3.8.0", "3.9.0"])
def test_a_complete_machine_is_available_and_says_what_it_stands_on(series):
    found = survey(Machine(triton=series))
    assert found.available
    assert found.device_name == "NVIDIA B200 (SM100)"
    assert found.runtime.startswith(f"torch 2.13.0, CUDA 13.0, triton {series}")


@pytest.mark.parametrize(
    ("machine", "problem", "remedy"),
    [
        (Machine(triton=None), "triton is not installed", "deepinfer-multibackend[nvidia]"),
        (Machine(triton="3.5.1"), "triton 3.5.1 is no release", "3.6 to 3.9"),
        (Machine(triton="3.10.0"), "triton 3.10.0 is no release", "3.6 to 3.9"),
        (Machine(cuda=None), "built without CUDA", "CUDA build of torch"),
        (Machine(driver=False), "libcuda.so.1", "--gpus all"),
        (Machine(devices=0), "no CUDA device is visible", "nvidia-smi"),
        (Machine(level=(8, 0), name="A100"), "'A100' has compute capability 8.0, which is older", "Hopper"),
        (Machine(level=(12, 0), name="RTX"), "12.0, which is of a generation without kernels", "Hopper"),
    ],
)
def test_each_missing_layer_is_a_reason_with_a_remedy(machine, problem, remedy):
    found = survey(machine)
    assert not found.available
    (reason,) = found.reasons
    assert problem in reason.problem
    assert remedy in reason.remedy


def test_all_reasons_come_at_once():
    reasons = survey(Machine(triton=None, cuda=None, driver=False, devices=0)).reasons
    assert len(reasons) == 3
    assert all(reason.remedy for reason in reasons)


def test_generations_follow_from_the_compute_capability():
    assert detect((9, 0)) is SM90
    assert detect((10, 0)) is detect((10, 3)) is SM100
    assert detect((8, 9)) is detect((12, 0)) is None
    assert [by_name(name) for name in ("sm_100a", "sm_90a", "sm_80")] == [SM100, SM90, None]
    assert SM100.tensor_memory_columns == 512
    assert not SM90.has_block_scaled


def test_interpreted_mode_needs_no_device_but_a_kit(monkeypatch):
    bare = Machine(cuda=None, driver=False, devices=0)
    monkeypatch.setattr(interpreting, "entry_points", lambda group: ())
    (reason,) = survey_interpreted(bare).reasons
    assert "one Triton kit" in reason.problem
    assert "unset DEEPINFER_NVIDIA_INTERPRET" in reason.remedy
    (reason,) = survey_interpreted(Machine(triton=None)).reasons
    assert "triton is not installed" in reason.problem


def test_libraries_that_were_named_and_cannot_serve_are_reasons():
    def there(module):
        return module != "deep_gemm"

    found = optional.problems(("flash_mla", "deep_gemm", "deep_ep", "flash_mlb"), SM90, there)
    texts = [reason.problem for reason in found]
    assert ["need SM100" in texts[0], "not installed" in texts[1]] == [True, True]
    assert "serves no op" in texts[2]
    assert "no library of this driver" in texts[3]
    assert optional.problems(("flash_mla",), SM100, there) == ()


def test_asked_for_it_refuses_in_one_message_without_a_gpu():
    code = (
        "from deepinfer.accelerator.selection import select\n"
        "from deepinfer.settings import Settings\n"
        "select(None, Settings.from_environment())"
    )
    environ = {**os.environ, "DEEPINFER_ACCELERATOR": "nvidia", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "DriverUnavailableError: accelerator 'nvidia' was asked for" in done.stderr
    assert "To do:" in done.stderr


def test_importing_it_imports_no_triton_and_starts_no_cuda():
    code = "import sys, torch, deepinfer_nvidia; print('triton' in sys.modules, torch.cuda.is_initialized())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "False"], done.stderr
