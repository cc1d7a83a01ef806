"""Attention and selection at released widths, and selection where many keys are equal.

Legend: T rows, H heads, C head width, K selected entries, J index heads, I index width, n competitors.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import pytest
import torch

from deepinfer.accelerator import EntryCache, IndexCache, OpOptions, StepLayout, WindowCache
from deepinfer.accelerator.ops.attention import LongRange
from deepinfer.accelerator.ops.selection import SelectionRule
from deepinfer.numerics import IndexRecord, LongRangeRecord, WindowRecord
from deepinfer_conformance import triton_cpu
from deepinfer_cpu_ref import Driver as CpuRef
from deepinfer_cpu_ref.invariant import EXCLUDED_INT32, ascending, best, order_keys
from deepinfer_triton.attention import TritonAttentionOps
from deepinfer_triton.configuration import launch
from deepinfer_triton.radix_selection import selection_configuration
from deepinfer_triton.registry import configurations
from deepinfer_triton.selection import TritonSelectionOps
from deepinfer_triton.sizes import RELEASED, TINY

if TYPE_CHECKING:
    from deepinfer_conformance.triton_cpu import Session

SERVED = OpOptions(activation_dtype=torch.bfloat16, numerics="served")
BLOCK, RING = 16, 134


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def one_request(position: int, rows: int = 1) -> StepLayout:
    """Return a decode step of the last rows of one request, in blocks that do not lie in order."""
    blocks = -(-(position + 1) // BLOCK)
    positions = torch.arange(position + 1 - rows, position + 1)
    return StepLayout(
        kind="decode",
        block_size=BLOCK,
        ring=RING,
        row_starts_R1=torch.tensor([0, rows]),
        cached_R=torch.tensor([position + 1 - rows]),
        state_slots_R=torch.tensor([1]),
        block_table_RB=(torch.arange(blocks) * 7 % blocks).view(1, -1)
        if blocks % 7
        else torch.arange(blocks).view(1, -1),
        request_T=torch.zeros(rows, dtype=torch.int64),
        position_T=positions,
        window_start_R=torch.tensor([0]),
        image_T=torch.zeros(rows, dtype=torch.bool),
        valid_T=torch.ones(rows, dtype=torch.bool),
        max_position=position + 1,
        max_rows=rows,
    )


def attention_call(
    heads: int, width: int, window_size: int, top_k: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, WindowCache, LongRange, torch.Tensor, int, StepLayout]:
    """Return the arguments of one row of decode; its own record lies in the ring as well."""
    step = one_request(2 * top_k + 37)
    window_format, entry_format = WindowRecord(width), LongRangeRecord(width)
    ring_ZRb = window_format.encode(normal(2 * RING, width, seed=1)).view(2, RING, -1)
    blocks, per_block = step.block_table_RB.shape[1], BLOCK // 2
    pool_NEb = entry_format.encode(normal(blocks * per_block, width, seed=2)).view(blocks, per_block, -1)
    entries_TK = torch.randperm(top_k, generator=torch.Generator().manual_seed(3)).view(1, -1)
    return (
        normal(1, heads, width, seed=4).to(dtype),
        ring_ZRb[1, step.position_T % RING],
        WindowCache(ring_ZRb, window_format),
        LongRange(EntryCache(pool_NEb, entry_format, 2), entries_TK),
        normal(heads, seed=5),
        window_size,
        step,
    )


def error_of_attention(options: OpOptions, *sizes: int) -> float:
    """Return the largest distance from float64 of unrounded weights, in units of the largest output."""
    arguments = attention_call(*sizes, options.activation_dtype)
    got = TritonAttentionOps(options).sparse(*arguments)
    exact = CpuRef(readable=True).op_groups(OpOptions(activation_dtype=torch.float64))["attention"]
    wanted = exact.sparse(arguments[0].to(torch.float64), *arguments[1:])  # type: ignore[attr-defined]
    return float((got.to(torch.float64) - wanted).abs().max() / wanted.abs().max())


def test_64_heads_over_640_keys_round_as_served_numerics_do(session: Session) -> None:
    error = error_of_attention(SERVED, RELEASED.heads, RELEASED.head_width, 128, 512)
    assert 0 < error < 2.0**-8
    (launched,) = session.launches
    assert launched.kernel == "served_attention_kernel"


def test_heads_of_512_channels_are_exact_to_float32(session: Session) -> None:
    assert error_of_attention(OpOptions(), 2, RELEASED.head_width, 12, 10) < 3e-6
    (launched,) = session.launches
    assert launched.kernel == "exact_attention_kernel"


@pytest.mark.parametrize("alignment", [1, 16])
def test_where_a_pool_lies_changes_no_bit(alignment: int, session: Session) -> None:
    arguments = list(attention_call(16, 64, 20, 20, torch.bfloat16))
    whole = TritonAttentionOps(SERVED).sparse(*arguments)  # type: ignore[arg-type]
    window = arguments[2]
    assert isinstance(window, WindowCache)
    padded = torch.full((2, RING, window.format.nbytes + 64), 0xFF, dtype=torch.uint8)
    moved = padded[..., alignment : alignment + window.format.nbytes]
    moved.copy_(window.bytes_ZRb)
    arguments[2] = dataclasses.replace(window, bytes_ZRb=moved)
    assert torch.equal(TritonAttentionOps(SERVED).sparse(*arguments), whole)  # type: ignore[arg-type]


def selection_call(position: int, heads: int, width: int) -> tuple[torch.Tensor, torch.Tensor, IndexCache, StepLayout]:
    """Return small integers, so that scores are exact and many are equal."""
    step = one_request(position, rows=2)
    blocks, record = step.block_table_RB.shape[1], IndexRecord(width)
    generator = torch.Generator().manual_seed(6)
    keys = torch.randint(-1, 2, (blocks, BLOCK, width), generator=generator).to(torch.float32)
    parts = record.encode_parts(keys)
    pool_Nb = torch.cat([parts.data.flatten(1), parts.scales.flatten(1)], 1)
    query_TJI = torch.randint(-1, 3, (2, heads, width), generator=generator).to(torch.float32)
    weight_TJ = torch.randint(0, 3, (2, heads), generator=generator).to(torch.float32)
    return query_TJI, weight_TJ, IndexCache(pool_Nb, record, BLOCK, 1), step


@pytest.mark.parametrize("publish", [False, True])
def test_512_of_700_entries_are_those_of_the_total_order(publish: bool, session: Session) -> None:  # noqa: FBT001
    call = selection_call(700, RELEASED.index_heads, RELEASED.index_width)
    rule = SelectionRule(512, 40, 8, publish)
    got = TritonSelectionOps(OpOptions()).top_entries(*call, rule)
    wanted = CpuRef(readable=True).op_groups(OpOptions())["selection"].top_entries(*call, rule)  # type: ignore[attr-defined]
    assert torch.equal(got.entries_TK, wanted.entries_TK)
    if publish:
        assert torch.equal(got.candidates_TB, wanted.candidates_TB)


@pytest.mark.parametrize("top_k", [1, 700])
def test_radix_selection_is_a_stable_sort_whatever_the_scores_are(top_k: int, session: Session) -> None:
    scores = normal(3, 5000)
    scores[0, ::3] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan]).repeat(334)[:1667]
    scores[1] = scores[1].round()
    scores[2] = -1e-40
    keys = order_keys(scores)
    keys[:, 4000:4500] = EXCLUDED_INT32
    keys[2, 300:] = EXCLUDED_INT32
    out = torch.empty((3, top_k), dtype=torch.int64)
    position_T, valid_T = torch.full((3,), 4999), torch.ones(3, dtype=torch.uint8)
    chosen = selection_configuration(restricted=False)
    launch(chosen, (3,), keys, position_T, valid_T, position_T, out, 5000, 0, 1, 1, 0, top_k)
    assert torch.equal(out, ascending(best(keys, top_k)))


def test_programs_may_run_in_any_order() -> None:
    call = selection_call(90, 4, 64)
    rule, arguments = SelectionRule(20, 5, 8, publish=True), attention_call(17, 64, 20, 20, torch.bfloat16)
    found = []
    for order in ("forward", "reverse"):
        with triton_cpu.interpreted(program_order=order):  # type: ignore[arg-type]
            selection = TritonSelectionOps(OpOptions()).top_entries(*call, rule)
            found.append((selection.entries_TK, selection.candidates_TB, TritonAttentionOps(SERVED).sparse(*arguments)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))  # type: ignore[arg-type]


def test_every_launch_of_the_small_model_is_listed(session: Session) -> None:
    for options in (OpOptions(), SERVED):
        TritonAttentionOps(options).sparse(*attention_call(TINY.heads, TINY.head_width, 8, 8, options.activation_dtype))
    query_TJI, weight_TJ, keys, step = selection_call(60, TINY.index_heads, TINY.index_width)
    ops = TritonSelectionOps(OpOptions())
    published = ops.top_entries(query_TJI, weight_TJ, keys, step, SelectionRule(6, 4, 8, publish=True))
    ops.top_entries(query_TJI, weight_TJ, keys, step, SelectionRule(6, 4, 8), published.candidates_TB)
    ops.top_entries(query_TJI, weight_TJ, keys, step, SelectionRule(80, 4, 8))
    known = {
        (
            each.name,
            tuple(sorted(each.constants.items())),
            tuple(kind for kind in each.signature.values() if "*" in kind),
        )
        for each in configurations((TINY,))
    }
    names = {"torch.float32": "*fp32", "torch.bfloat16": "*bf16", "torch.uint8": "*u8", "torch.int32": "*i32",
             "torch.int64": "*i64"}  # fmt: skip
    for launched in session.launches:
        constants = tuple(sorted((each.name, each.value) for each in launched.constexprs))
        key = (launched.kernel, constants, tuple(names[each.dtype] for each in launched.tensors))
        assert key in known, key
    assert len({launched.kernel for launched in session.launches}) == 7
