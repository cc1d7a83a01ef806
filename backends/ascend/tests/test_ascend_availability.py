"""Each missing layer of the stack is a reason with a remedy, and all of them come at once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from deepinfer.errors import DriverUnavailableError
from deepinfer_ascend.availability import LIBRARIES, survey


@dataclass(frozen=True)
class Machine:
    """A machine that answers as it is told; everything is there unless said otherwise."""

    npu: str | None = "2.13.0"
    torch: str = "2.13.0+cpu"
    cuda: bool = False
    libraries: tuple[str, ...] = LIBRARIES
    driver: bool = True
    nodes: int = 1
    name: str = "Ascend950PR_9599"
    fault: str = ""

    def torch_npu_version(self):
        return self.npu

    def torch_version(self):
        return self.torch

    def torch_has_cuda(self):
        return self.cuda

    def can_load(self, library):
        return library in self.libraries

    def has_driver(self):
        return self.driver

    def device_nodes(self):
        return self.nodes

    def soc_name(self):
        if self.fault:
            raise DriverUnavailableError(self.fault)
        return self.name

    def cann_version(self):
        return "9.1.0"


def test_a_complete_machine_is_available_and_says_what_it_stands_on():
    found = survey(Machine())
    assert found.available
    assert found.device_name == "Ascend950PR_9599"
    for fact in ("torch 2.13.0", "torch-npu 2.13.0", "CANN 9.1.0", "HCCL_DETERMINISTIC=", "TASK_QUEUE_ENABLE="):
        assert fact in found.runtime


@pytest.mark.parametrize(
    ("machine", "problem", "remedy"),
    [
        (Machine(npu=None), "torch-npu is not installed", "pip install"),
        (Machine(npu="2.12.0"), "torch-npu 2.12.0 does not fit torch 2.13.0", "torch-npu==2.13"),
        (Machine(cuda=True), "built for CUDA", "CPU build"),
        (Machine(libraries=LIBRARIES[1:]), "libascendcl.so", "set_env.sh"),
        (Machine(name="", driver=False), "/dev/davinci_manager does not exist", "HDK driver"),
        (Machine(name="", nodes=0), "no NPU is attached", "npu-smi"),
        (Machine(name=""), "the runtime shows no NPU", "ASCEND_RT_VISIBLE_DEVICES"),
        (Machine(name="Ascend310P3"), "'Ascend310P3', which this driver does not know", "950PR"),
        (Machine(fault="it is broken"), "it is broken", "repair CANN"),
    ],
)
def test_each_missing_layer_is_a_reason_with_a_remedy(machine, problem, remedy):
    found = survey(machine)
    assert not found.available
    (reason,) = found.reasons
    assert problem in reason.problem
    assert remedy in reason.remedy


def test_all_reasons_come_at_once():
    bare = Machine(npu=None, cuda=True, libraries=(), driver=False, nodes=0, fault="must not be asked")
    problems = [reason.problem for reason in survey(bare).reasons]
    assert len(problems) == 5
    assert all(reason.remedy for reason in survey(bare).reasons)
    assert all(library in problems[2] for library in LIBRARIES)
    assert not any("must not be asked" in problem for problem in problems)
