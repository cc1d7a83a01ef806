import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from deepinfer.accelerator.capabilities import Repeatability
from deepinfer.accelerator.interface import INTERFACE_VERSION, LinearShape, OpOptions
from deepinfer.accelerator.ops import OP_GROUPS, all_op_names
from deepinfer.errors import DeterminismError, OpRefusedError
from deepinfer_cpu_ref import Driver
from deepinfer_cpu_ref.determinism import prove
from deepinfer_cpu_ref.driver import NOT_RECORDED
from deepinfer_cpu_ref.host_memory import host_memory

SHAPES = [
    LinearShape(64, 24, torch.float32),
    LinearShape(64, 24, torch.float32),
    LinearShape(96, 130, torch.bfloat16),
]


def test_every_op_of_the_contract_is_claimed_and_implemented():
    driver = Driver()
    claims, groups = driver.capabilities(), driver.op_groups(OpOptions())
    assert tuple(claims.ops) == all_op_names()
    assert tuple(groups) == tuple(group.group for group in OP_GROUPS)
    for group in groups.values():
        assert group.implemented() == group.op_names()


def test_claims_are_the_same_value_each_time_and_modest_where_nothing_stands_behind():
    claims = Driver().capabilities()
    assert claims == Driver().capabilities()
    assert claims.graphs
    assert claims.collectives == ("gloo",)
    assert {op for op, claim in claims.ops.items() if not claim.graph_safe} == NOT_RECORDED
    assert {claim.repeatability for claim in claims.ops.values()} == {Repeatability.BATCH_INVARIANT}


def test_the_driver_is_available_everywhere_and_speaks_this_contract():
    assert Driver.availability().available
    assert Driver.name == "cpu_ref"
    assert Driver.interface_version == INTERFACE_VERSION
    assert Driver().device == torch.device("cpu")
    assert Driver().allocate((2, 3), torch.uint8).shape == (2, 3)


def test_importing_the_package_loads_neither_torch_nor_the_driver():
    code = (
        "import sys, deepinfer_cpu_ref as package\n"
        "assert 'torch' not in sys.modules and 'deepinfer_cpu_ref.driver' not in sys.modules\n"
        "assert not hasattr(package, 'Unknown')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(filter(None, sys.path))})


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64])
def test_an_activation_dtype_that_is_not_computed_is_refused(dtype):
    with pytest.raises(OpRefusedError, match="has no activation dtype"):
        Driver().op_groups(OpOptions(activation_dtype=dtype))


@pytest.mark.parametrize("level", [Repeatability.NONE, Repeatability.RUN_TO_RUN, Repeatability.BATCH_INVARIANT])
def test_levels_up_to_batch_invariance_are_proved_and_leave_the_thread_count_alone(level):
    before = torch.get_num_threads()
    Driver().set_determinism(level, SHAPES)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("level", [Repeatability.PLACEMENT_INVARIANT, Repeatability.SPECULATION_INVARIANT])
def test_higher_levels_are_refused(level):
    with pytest.raises(DeterminismError, match=f"asked for R{int(level)}"):
        Driver().set_determinism(level, SHAPES)


def test_a_product_that_depends_on_the_batch_is_found_and_named(threads):
    def drifting(x_TK, weight_NK, out_features):
        return F.linear(x_TK, weight_NK)[:, :out_features] + (x_TK.shape[0] == 7) * 1e-7

    with threads(1), pytest.raises(DeterminismError, match=r"product 64 x 24 torch.float32: 7 rows with 1 threads"):
        prove(Repeatability.BATCH_INVARIANT, SHAPES[:1], drifting)


def test_a_product_that_depends_on_threads_is_found_and_the_thread_count_restored(threads):
    def drifting(x_TK, weight_NK, out_features):
        return F.linear(x_TK, weight_NK)[:, :out_features] + (torch.get_num_threads() == 2) * 1e-7

    with threads(2):
        with pytest.raises(DeterminismError, match="33 rows with 2 threads"):
            prove(Repeatability.BATCH_INVARIANT, SHAPES[:1], drifting)
        assert torch.get_num_threads() == 2


def test_memory_is_that_of_the_machine():
    memory = Driver().memory()
    assert 0 < memory.free_bytes <= memory.total_bytes


def test_memory_is_bounded_by_the_control_group(tmp_path):
    proc, group = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    group.mkdir()
    (proc / "meminfo").write_text("MemTotal:  1000 kB\nMemFree:  1 kB\nMemAvailable:  600 kB\nHugePages_Total: 0\n")
    assert host_memory(proc, group).total_bytes == 1000 * 1024
    assert host_memory(proc, group).free_bytes == 600 * 1024
    (group / "memory.max").write_text("max\n")
    assert host_memory(proc, group).total_bytes == 1000 * 1024
    (group / "memory.max").write_text("512000\n")
    (group / "memory.current").write_text("500000\n")
    assert host_memory(proc, group).total_bytes == 512_000
    assert host_memory(proc, group).free_bytes == 12_000
    (group / "memory.current").write_text("600000\n")
    assert host_memory(proc, group).free_bytes == 0


def test_version_one_control_groups_are_read_too(tmp_path):
    proc, group = tmp_path / "proc", tmp_path / "cgroup" / "memory"
    proc.mkdir()
    group.mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 600 kB\n")
    (group / "memory.limit_in_bytes").write_text("512000")
    (group / "memory.usage_in_bytes").write_text("12000")
    assert host_memory(proc, group.parent).free_bytes == 500_000


def test_without_a_process_file_system_the_machine_is_asked(tmp_path):
    assert host_memory(tmp_path, tmp_path).total_bytes > 0
