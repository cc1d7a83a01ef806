"""The hot served kernels reach the matrix units that they are written for, without spilling on SM100."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deepinfer_conformance.triton_cpu import KernelLimits, check_kernels, compile_kernels, compile_request
from deepinfer_triton.product_sizes import expert_configurations, linear_configurations
from deepinfer_triton.sizes import RELEASED
from deepinfer_triton.tile_product import CODES, FEW_ROWS

INSTRUCTIONS = {100: "UTCQMMA", 90: "HGMMA"}
"""Block-scaled tcgen05, and wgmma on values that were widened to bfloat16."""


@pytest.mark.parametrize("arch", INSTRUCTIONS)
def test_served_decode_kernels_use_the_matrix_unit(arch: int) -> None:
    listed = [*expert_configurations(RELEASED), *linear_configurations(RELEASED)]
    hot = {
        (each.name, each.constants["K"], each.constants.get("ROUTED")): each
        for each in listed
        if each.constants.get("PRODUCT") == CODES and each.constants["ROWS"] == FEW_ROWS
    }
    requests = [
        compile_request(
            each.kernel,
            each.signature,
            each.constants,
            arch=arch,
            num_warps=each.num_warps,
            num_stages=each.num_stages,
            aligned=each.aligned,
            label=f"sm{arch} {each.name} {each.label}",
        )
        for key, each in hot.items()
        if key in (("gate_up_kernel", 5120, True), ("down_kernel", 2304, True), ("dense_kernel", 4096, None))
    ]
    assert len(requests) == 3
    folder = os.environ.get("TRITON_CACHE_DIR")
    results = compile_kernels(requests, cache=Path(folder) / "deepinfer_triton" if folder else None)
    check_kernels(results, KernelLimits(expected=(INSTRUCTIONS[arch],), forbidden=("HMMA",)))
