"""Released widths with few rows, tiles of many rows, and pieces of K, against the readable reference.

Legend: T rows, K in features, N out features, E experts, D hidden size, I intermediate size, B rows, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from deepinfer.accelerator import OpOptions, StoredExpert, StoredWeight
from deepinfer.accelerator.ops.experts import Routing
from deepinfer.accelerator.ops.sampling import SamplingRows
from deepinfer.numerics import quantise_fp8_weight, quantise_mxfp4_weight
from deepinfer_cpu_ref import Driver as CpuRef
from deepinfer_triton.expert_tiles import expert_tiles, most_tiles
from deepinfer_triton.feed_forward import TritonExpertOps
from deepinfer_triton.linear import TritonLinearOps
from deepinfer_triton.sampling import TritonSamplingOps

if TYPE_CHECKING:
    from deepinfer_conformance.triton_cpu import Session

SERVED = OpOptions(activation_dtype=torch.bfloat16, numerics="served")
INVARIANT = OpOptions(activation_dtype=torch.bfloat16, numerics="served", batch_invariant=True)
VOCABULARY = 129_280


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fp8(name: str, out_features: int, in_features: int, seed: int = 1) -> StoredWeight:
    weight, scale = quantise_fp8_weight(normal(out_features, in_features, seed=seed) * in_features**-0.5)
    return StoredWeight(name, "fp8_block32", weight, scale, out_features, in_features)


def mxfp4(name: str, out_features: int, in_features: int, seed: int) -> StoredWeight:
    weight, scale = quantise_mxfp4_weight(normal(out_features, in_features, seed=seed) * in_features**-0.5)
    return StoredWeight(name, "mxfp4", weight, scale, out_features, in_features)


def expert(number: int, hidden: int, intermediate: int) -> StoredExpert:
    seeds = range(3 * number, 3 * number + 3)
    sizes = ((intermediate, hidden), (hidden, intermediate), (intermediate, hidden))
    return StoredExpert(*(mxfp4(f"e{number}", *size, seed) for size, seed in zip(sizes, seeds, strict=True)))


def test_hidden_5120_in_pieces_of_k_stays_within_one_step_of_bfloat16(session: Session) -> None:
    x_TK = normal(3, 5120).to(torch.bfloat16)
    stored = fp8("wq_a", 256, 5120)
    own, reference = TritonLinearOps(SERVED), CpuRef(readable=True).op_groups(SERVED)["linear"]
    got = own.dense(x_TK, own.prepare(stored)).to(torch.float32)
    wanted = reference.dense(x_TK, reference.prepare(stored)).to(torch.float32)  # type: ignore[attr-defined]
    assert any(launch.kernel == "piece_sum_kernel" for launch in session.launches)
    torch.testing.assert_close(got, wanted, rtol=2.0**-7, atol=1e-5)


@pytest.mark.parametrize("options", [SERVED, INVARIANT], ids=["many rows a tile", "invariant"])
def test_tiles_of_64_rows_are_taken_unless_bits_must_not_depend_on_the_batch(
    options: OpOptions, session: Session
) -> None:
    x_TK = normal(40, 64).to(torch.bfloat16)
    stored = fp8("w", 96, 64)
    own, reference = TritonLinearOps(options), CpuRef(readable=True).op_groups(SERVED)["linear"]
    got = own.dense(x_TK, own.prepare(stored))
    wanted = reference.dense(x_TK, reference.prepare(stored))  # type: ignore[attr-defined]
    torch.testing.assert_close(got.to(torch.float32), wanted.to(torch.float32), rtol=2.0**-7, atol=1e-5)
    constants = [{each.name: each.value for each in launch.constexprs} for launch in session.launches]
    assert {each["ROWS"] for each in constants if "PRODUCT" in each} == {16 if options.batch_invariant else 64}


def test_experts_with_many_rows_each_agree(session: Session) -> None:
    hidden, intermediate, rows = 64, 96, 40
    stored = [expert(number, hidden, intermediate) for number in range(2)]
    experts_Tk = torch.tensor([[0, 1], [1, 0], [0, -1], [-1, -1]]).repeat(rows // 4, 1)
    routing = Routing(experts_Tk, torch.where(experts_Tk < 0, 0.0, 0.5))
    x_TD = normal(rows, hidden).to(torch.bfloat16)
    own, reference = TritonExpertOps(SERVED), CpuRef(readable=True).op_groups(SERVED)["experts"]
    got = own.routed(x_TD, routing, own.prepare(stored, 10.0))
    wanted = reference.routed(x_TD, routing, reference.prepare(stored, 10.0))  # type: ignore[attr-defined]
    assert bool((got[experts_Tk < 0] == 0).all())
    # A hidden value near a tie may take the other e4m3 neighbour.
    torch.testing.assert_close(got, wanted, rtol=2.0**-6, atol=0.02)
    constants = [{each.name: each.value for each in launch.constexprs} for launch in session.launches]
    assert {each["ROWS"] for each in constants if "PRODUCT" in each} == {64}


@pytest.mark.parametrize("tile_rows", [16, 64])
def test_tiles_hold_every_routed_slot_once_and_never_two_experts(tile_rows: int, session: Session) -> None:
    experts = 5
    experts_Tk = torch.randint(-1, experts, (90, 3), generator=torch.Generator().manual_seed(0))
    experts_Tk[experts_Tk == 3] = 1  # one without slots
    tiles = expert_tiles(experts_Tk, experts, tile_rows)
    flat, seen = experts_Tk.flatten(), []
    for owner, first, last in zip(tiles.expert_i.tolist(), tiles.first_i.tolist(), tiles.last_i.tolist(), strict=True):
        if owner < 0:
            continue
        slots = tiles.order_n[first : min(first + tile_rows, last)]
        assert bool((flat[slots.long()] == owner).all())
        seen += slots.tolist()
    assert sorted(seen) == (flat >= 0).nonzero().flatten().tolist()


def test_no_routing_needs_more_tiles_than_a_launch_has() -> None:
    assert most_tiles(6, 384, 16) == 6
    assert most_tiles(96, 2, 16) == 8
    worst = sum(-(-count // 16) for count in (17, 17, 1, 33))
    assert worst <= most_tiles(17 + 17 + 1 + 33, 4, 16)


def released_rows(count: int) -> SamplingRows:
    kinds = torch.arange(count) % 4
    return SamplingRows(
        temperature_B=torch.tensor([0.8, 1.0, 1.3, 0.0], dtype=torch.float64)[kinds],
        top_k_B=torch.tensor([0, 4096, 0, 50])[kinds],
        top_p_B=torch.tensor([1.0, 1.0, 1.0, 0.5], dtype=torch.float64)[kinds],
        min_weight_B=torch.tensor([0, 0, 2**20, 0])[kinds],
        seeds_B=torch.arange(count) * 977 - 3,
        streams_B=torch.arange(count) * 4 + 1,
        forced_ids_B=torch.full((count,), -1),
    )


def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """The last bit of ``exp`` may move a weight by one unit in about one of a million."""
    difference = (got - wanted).abs()
    assert int(difference.max()) <= 1
    assert int((difference > 0).sum()) <= 4


def test_weights_over_the_whole_vocabulary_follow_the_definition(session: Session) -> None:
    logits_BV = normal(3, VOCABULARY) * 3
    logits_BV[0, 77], logits_BV[0, 129_000] = logits_BV[0].max(), logits_BV[0].max()
    rows = released_rows(3)
    own, reference = TritonSamplingOps(SERVED), CpuRef(readable=True).op_groups(SERVED)["sampling"]
    got, wanted = own.weigh(logits_BV, rows), reference.weigh(logits_BV, rows)  # type: ignore[attr-defined]
    near(got.weights_BV, wanted.weights_BV)
    assert torch.equal(got.status_B, wanted.status_B)
    assert torch.equal(got.sums_B, got.weights_BV.sum(-1))
    uniforms_B = own.uniforms(rows.seeds_B, rows.streams_B)
    assert torch.equal(own.draw(wanted, uniforms_B), reference.draw(wanted, uniforms_B))  # type: ignore[attr-defined]


def test_ties_over_several_chunks_are_cut_by_id(session: Session) -> None:
    """Seven values over 9,000 tokens: every cut lies within a tie, in some chunk."""
    logits_BV = (torch.arange(9000) * 7919 % 7).to(torch.float32).repeat(4, 1)
    rows = released_rows(4)
    rows.top_k_B[:3] = torch.tensor([1300, 1, 8999])
    rows.top_p_B[:3] = torch.tensor([0.37, 0.5, 1.0], dtype=torch.float64)
    own, reference = TritonSamplingOps(SERVED), CpuRef(readable=True).op_groups(SERVED)["sampling"]
    got, wanted = own.weigh(logits_BV, rows), reference.weigh(logits_BV, rows)  # type: ignore[attr-defined]
    assert torch.equal(got.weights_BV, wanted.weights_BV)


def test_best_tokens_of_the_whole_vocabulary_come_in_order(session: Session) -> None:
    logits_TV = normal(2, VOCABULARY, seed=5)
    logits_TV[0, 5000:5003] = 9.0
    tokens_T = torch.tensor([5001, -1])
    own, reference = TritonSamplingOps(SERVED), CpuRef(readable=True).op_groups(SERVED)["sampling"]
    got = own.raw_log_probabilities(logits_TV, tokens_T, 5)
    wanted = reference.raw_log_probabilities(logits_TV, tokens_T, 5)  # type: ignore[attr-defined]
    assert got.top_ids_BN[0, :3].tolist() == [5000, 5001, 5002]
    assert torch.equal(got.top_ids_BN, wanted.top_ids_BN)
    torch.testing.assert_close(got.top_values_BN, wanted.top_values_BN, rtol=2e-7, atol=1e-6)
    torch.testing.assert_close(got.chosen_B, wanted.chosen_B, rtol=2e-7, atol=1e-6)
