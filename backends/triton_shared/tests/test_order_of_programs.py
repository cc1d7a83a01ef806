"""Programs of a launch may run in any order: ops that write in place give the same bits both ways.

Legend: T rows, Z state slots, P pending positions, W = 2C.
"""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from deepinfer.accelerator import OpOptions, PendingCache, StepLayout
from deepinfer_conformance import triton_cpu
from deepinfer_cpu_ref import Driver as CpuRef
from deepinfer_triton.compression import TritonCompressionOps
from deepinfer_triton.plumbing import TritonPlumbingOps


def long_chunk(rows: int = 17) -> StepLayout:
    """Return one request from position 3 on, longer than its rings, and a padding row."""
    count = rows + 1
    return StepLayout(
        kind="prefill",
        block_size=8,
        ring=6,
        row_starts_R1=torch.tensor([0, count]),
        cached_R=torch.tensor([3]),
        state_slots_R=torch.tensor([1]),
        block_table_RB=torch.tensor([[4, 2, 5]]),
        request_T=torch.zeros(count, dtype=torch.int64),
        position_T=torch.cat([torch.arange(3, 3 + rows), torch.zeros(1, dtype=torch.int64)]),
        window_start_R=torch.tensor([0]),
        image_T=torch.zeros(count, dtype=torch.bool),
        valid_T=torch.tensor([True] * rows + [False]),
        max_position=3 + rows,
        max_rows=rows,
    )


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_a_chunk_longer_than_the_pending_ring_pools_with_what_waited_before_it(
    order: Literal["forward", "reverse"],
) -> None:
    step, generator = long_chunk(), torch.Generator().manual_seed(0)
    gate_TC, latent_TC = torch.randn(18, 32, generator=generator), torch.randn(18, 32, generator=generator)
    state_ZPW = torch.randn(2, 5, 64, generator=generator)
    reference_ZPW = state_ZPW.clone()
    wanted = (
        CpuRef(readable=True)
        .op_groups(OpOptions())["compression"]
        .pool_pairs(  # type: ignore[attr-defined]
            gate_TC, latent_TC, PendingCache(reference_ZPW), step
        )
    )
    with triton_cpu.interpreted(program_order=order):
        got = TritonCompressionOps(OpOptions()).pool_pairs(gate_TC, latent_TC, PendingCache(state_ZPW), step)
    torch.testing.assert_close(got, wanted, rtol=2e-6, atol=1e-7)
    assert torch.equal(state_ZPW, reference_ZPW)


def test_slots_of_a_long_chunk_are_those_of_the_reference() -> None:
    step = long_chunk()
    reference = CpuRef().op_groups(OpOptions())["plumbing"]
    with triton_cpu.interpreted():
        own = TritonPlumbingOps(OpOptions())
        assert torch.equal(own.window_slots(step), reference.window_slots(step))  # type: ignore[attr-defined]
        for ratio in (1, 2):
            assert torch.equal(own.entry_slots(step, ratio), reference.entry_slots(step, ratio))  # type: ignore[attr-defined]
