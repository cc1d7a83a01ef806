"""Experts agree with the reference: choice, slots, padding rows, fused and in parts."""

from __future__ import annotations

import pytest
import torch

from deepinfer.accelerator.ops.experts import RouterWeights, Routing
from deepinfer.accelerator.weights import StoredExpert, StoredWeight
from deepinfer.errors import OpRefusedError
from deepinfer.numerics import quantise_fp8_weight, quantise_mxfp4_weight

HIDDEN, INTERMEDIATE, EXPERTS, LIMIT = 128, 64, 8, 1.0
ULP = 2.0**-7


def stored(draws, rows, columns, stored_format):
    values_NK = torch.randn(rows, columns, generator=draws) * columns**-0.5
    if stored_format == "bfloat16":
        return StoredWeight("e", "bfloat16", values_NK.to(torch.bfloat16), None, rows, columns)
    quantise = quantise_mxfp4_weight if stored_format == "mxfp4" else quantise_fp8_weight
    weight, scale = quantise(values_NK)
    return StoredWeight("e", stored_format, weight, scale, rows, columns)


def expert(draws, stored_format):
    return StoredExpert(
        w1=stored(draws, INTERMEDIATE, HIDDEN, stored_format),
        w2=stored(draws, HIDDEN, INTERMEDIATE, stored_format),
        w3=stored(draws, INTERMEDIATE, HIDDEN, stored_format),
    )


def routing(draws, rows, top_k):
    experts_Tk = torch.stack([torch.randperm(EXPERTS, generator=draws)[:top_k] for _ in range(rows)])
    weights_Tk = torch.rand(rows, top_k, generator=draws)
    if rows > 2:
        experts_Tk[1], weights_Tk[1] = -1, 0.0
        experts_Tk[2, 0], weights_Tk[2, 0] = -1, 0.0
    return Routing(experts_Tk, weights_Tk)


@pytest.mark.parametrize("stored_format", ["mxfp4", "fp8_block32", "bfloat16"])
@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_routed_and_local_agree_with_the_reference(pair, draws, stored_format, served, rows):
    ours, reference = pair(served=served)
    experts = [expert(draws, stored_format) for _ in range(EXPERTS)]
    shared = expert(draws, "fp8_block32")
    x_TD = torch.randn(rows, HIDDEN, generator=draws).to(torch.bfloat16)
    chosen = routing(draws, rows, 3) if rows else Routing(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3))
    found, wanted = [], []
    for groups, results in ((ours["experts"], found), (reference["experts"], wanted)):
        prepared, prepared_shared = groups.prepare(experts, LIMIT), groups.prepare_shared(shared, LIMIT)
        results += [
            groups.routed(x_TD, chosen, prepared),
            groups.shared(x_TD, prepared_shared),
            groups.local(x_TD, chosen, prepared, prepared_shared),
        ]
    for name, mine, theirs in zip(("routed", "shared", "local"), found, wanted, strict=True):
        assert mine.dtype == theirs.dtype, name
        torch.testing.assert_close(mine, theirs, rtol=2 * ULP, atol=2 * ULP)
    if rows > 2:
        assert not found[0][1].any()
        assert not found[0][2, 0].any()


def test_slots_keep_their_places_whatever_the_order_of_experts(pair, draws):
    ours, _ = pair(served=False)
    prepared = ours["experts"].prepare([expert(draws, "bfloat16") for _ in range(EXPERTS)], LIMIT)
    x_TD = torch.randn(2, HIDDEN, generator=draws).to(torch.bfloat16)
    forward = Routing(torch.tensor([[1, 5], [6, 0]]), torch.tensor([[0.25, 0.5], [1.0, 2.0]]))
    backward = Routing(forward.experts_Tk.flip(1), forward.weights_Tk.flip(1))
    found, turned = ours["experts"].routed(x_TD, forward, prepared), ours["experts"].routed(x_TD, backward, prepared)
    torch.testing.assert_close(found, turned.flip(1), rtol=0, atol=0)


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("served", [True, False])
def test_route_agrees_with_the_reference(pair, draws, top_k, served):
    ours, reference = pair(served=served)
    router = RouterWeights(
        torch.randn(EXPERTS, HIDDEN, generator=draws).to(torch.bfloat16),
        torch.randn(EXPERTS, generator=draws),
        torch.randn(EXPERTS, generator=draws),
    )
    x_TD = torch.randn(9, HIDDEN, generator=draws).to(torch.bfloat16)
    image_T, valid_T = torch.arange(9) % 3 == 0, torch.arange(9) != 4
    found = ours["experts"].route(x_TD, router, image_T, valid_T, top_k, 1.5)
    wanted = reference["experts"].route(x_TD, router, image_T, valid_T, top_k, 1.5)
    assert torch.equal(found.experts_Tk, wanted.experts_Tk)
    assert found.experts_Tk.dtype == torch.int64
    torch.testing.assert_close(found.weights_Tk, wanted.weights_Tk)


def test_ties_go_to_the_lower_expert_in_portable_numerics(pair):
    ours, _ = pair(served=False)
    router = RouterWeights(torch.zeros(EXPERTS, HIDDEN), torch.zeros(EXPERTS), torch.zeros(EXPERTS))
    flags = torch.tensor([False]), torch.tensor([True])
    found = ours["experts"].route(torch.zeros(1, HIDDEN, dtype=torch.bfloat16), router, *flags, 3, 1.0)
    assert found.experts_Tk.tolist() == [[0, 1, 2]]


def test_a_layer_of_two_quantised_formats_is_refused(pair, draws):
    ours, _ = pair()
    with pytest.raises(OpRefusedError, match="fp8_block32, mxfp4"):
        ours["experts"].prepare([expert(draws, "mxfp4"), expert(draws, "fp8_block32")], LIMIT)


@pytest.mark.parametrize("stored_format", ["mxfp4", "fp8_block32", "bfloat16"])
@pytest.mark.parametrize("served", [True, False])
def test_an_expert_that_moved_is_the_expert_that_was_prepared_there(pair, draws, stored_format, served):
    ours, _ = pair(served=served)
    experts = [expert(draws, stored_format) for _ in range(EXPERTS)]
    x_TD, chosen = torch.randn(7, HIDDEN, generator=draws).to(torch.bfloat16), routing(draws, 7, 3)
    here, wanted = ours["experts"].prepare(experts, LIMIT), ours["experts"].prepare(experts[::-1], LIMIT)
    slots = here.expert_slots()
    kept = [[tensor.clone() for tensor in slot.tensors] for slot in slots]
    for slot, parts in zip(slots, reversed(kept), strict=True):
        for tensor, part in zip(slot.tensors, parts, strict=True):
            tensor.view(-1).view(torch.uint8).copy_(part.view(-1).view(torch.uint8))
    found = ours["experts"].routed(x_TD, chosen, here)
    torch.testing.assert_close(found, ours["experts"].routed(x_TD, chosen, wanted), rtol=0, atol=0)
    assert len({slot.form for slot in slots}) == 1
    here.is_private = True  # as in the NZ format, whose bytes are nobody's but CANN's
    with pytest.raises(OpRefusedError, match="no experts that can be moved"):
        here.expert_slots()


def test_combine_adds_shared_first_and_then_slots_in_order(pair):
    ours, reference = pair(torch.float32, served=False)
    shared_TD = torch.tensor([[1.0]])
    slots_TkD = torch.tensor([[[2.0**24], [-(2.0**24)], [3.0]]])
    found = ours["experts"].combine(shared_TD, slots_TkD)
    assert torch.equal(found, reference["experts"].combine(shared_TD, slots_TkD))
    assert found.item() == 3.0
