"""Two ranks over the real ProcessGroupHCCL: values, sizes compared between ranks, deaths within a deadline."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from host_cann import Emulator
from host_cann.ranks import run_ranks

Results = Sequence[Mapping[str, Any]]
FLOAT32, SUM = 4, 0


@pytest.fixture(scope="module")
def results(host_cann_machine: Emulator) -> Results:
    ran = run_ranks(Path(__file__).parent / "host_cann_rank_cases.py")
    assert [rank.returncode for rank in ran] == [0, 3], [rank.stderr[-3000:] for rank in ran]
    return [json.loads(rank.stdout.splitlines()[-1]) for rank in ran]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize(("name", "values"), [("SUM", [3, 4, 5]), ("MAX", [2, 2, 3]), ("MIN", [1, 2, 2])])
def test_all_reduce(results: Results, dtype: str, name: str, values: list[int]) -> None:
    for rank in results:
        assert rank[f"all_reduce {dtype} RedOpType.{name}"] == values


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("all_gather", [0, 0, 1, 10], [0, 0, 1, 10]),
        ("all_gather_list", [[0, 9], [1, 9]], [[0, 9], [1, 9]]),
        ("reduce_scatter", [0.0, 2.0], [4.0, 6.0]),
        ("all_to_all", [0, 10], [1, 11]),
        ("all_to_all_uneven", [0, 10, 11], [1, 2, 12]),
        ("broadcast", [1.0, 1.0], [1.0, 1.0]),
        ("reduce", [3.0, 3.0], [2.0, 2.0]),
        ("scatter", [5.0], [6.0]),
        ("point_to_point", [7.0], [7.0]),
        ("barrier", "passed", "passed"),
        ("graph", [8.0, 9.0], [8.0, 9.0]),
    ],
)
def test_collectives(results: Results, case: str, first: object, second: object) -> None:
    assert [rank[case] for rank in results] == [first, second]


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("other_count", "count 3", "count 4"),
        ("other_type", "data type 11", "data type 4"),
        ("other_operation", "operation 2", "operation 1"),
    ],
)
def test_ranks_that_disagree_are_told_of_both_sides(results: Results, case: str, first: str, second: str) -> None:
    for rank in results:
        assert "ranks disagree" in rank[case]["error"]
        assert first in rank[case]["error"]
        assert second in rank[case]["error"]


def test_counts_per_rank_must_match_what_the_other_expects(results: Results) -> None:
    errors = [rank["other_split"]["error"] for rank in results if isinstance(rank["other_split"], dict)]
    assert errors
    assert any("which expects" in error or "end past" in error for error in errors)


def test_a_rank_that_does_not_come_is_an_error_at_the_deadline(results: Results) -> None:
    late = results[0]["absent_rank"]
    assert "not all ranks came within 3.0 s" in late["error"]
    assert late["seconds"] < 30
    assert results[1]["absent_rank"] == "did not call"


def test_a_rank_that_dies_is_an_error_long_before_the_deadline(results: Results) -> None:
    lonely = results[0]["dead_rank"]
    assert "rank 1 (process" in lonely["error"]
    assert "died" in lonely["error"]
    assert lonely["seconds"] < 30
    assert "dead_rank" not in results[1]


class _RootInfo(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 4108),)


@pytest.fixture
def lonely_communicator(host_cann_machine: Emulator) -> ctypes.c_void_p:
    root, handle = _RootInfo(), ctypes.c_void_p()
    assert host_cann_machine.library.HcclGetRootInfo(ctypes.byref(root)) == 0
    assert host_cann_machine.library.HcclCommInitRootInfo(1, ctypes.byref(root), 0, ctypes.byref(handle)) == 0
    return handle


@pytest.mark.parametrize(
    ("source", "count", "reason"),
    [("device", 16, ""), ("device", 1 << 24, "end past an allocation"), ("host", 16, "is host memory")],
)
def test_every_buffer_is_checked(
    host_cann_machine: Emulator, lonely_communicator: ctypes.c_void_p, source: str, count: int, reason: str
) -> None:
    x = torch.ones(16).to("npu:0" if source == "device" else "cpu")
    call = host_cann_machine.library.HcclAllReduce
    call.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
    ]  # fmt: skip
    code = call(x.data_ptr(), x.data_ptr(), count, FLOAT32, SUM, lonely_communicator, None)
    assert bool(code) == bool(reason)
    assert reason in host_cann_machine.reason()
