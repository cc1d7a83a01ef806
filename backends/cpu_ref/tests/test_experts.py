import math

import pytest
import torch

from deepinfer.accelerator.ops.experts import RouterWeights, Routing
from deepinfer.accelerator.weights import PreparedWeight, StoredExpert, StoredWeight
from deepinfer.errors import OpRefusedError
from deepinfer.numerics import dequantise_mxfp4_weight, fake_quant_fp8, quantise_mxfp4_weight

HIDDEN, INNER, LIMIT = 32, 64, 1.5
MODES = [False, True]


def stored(fmt, rows, columns):
    weight = torch.randn(rows, columns) * columns**-0.5 * 2
    if fmt == "float32":
        return StoredWeight("w", fmt, weight, None, rows, columns), weight.double()
    codes, scale = quantise_mxfp4_weight(weight)
    return StoredWeight("w", fmt, codes, scale, rows, columns), dequantise_mxfp4_weight(codes, scale).double()


def make_experts(count, fmt="mxfp4"):
    """Stored experts and their exact (w1, w2, w3)."""
    made = []
    for _ in range(count):
        (w1, e1), (w2, e2), (w3, e3) = (
            stored(fmt, INNER, HIDDEN),
            stored(fmt, HIDDEN, INNER),
            stored(fmt, INNER, HIDDEN),
        )
        made.append((StoredExpert(w1, w2, w3), (e1, e2, e3)))
    return [pair[0] for pair in made], [pair[1] for pair in made]


def bf16(x):
    return x.float().bfloat16().double()


def expected(x, exact, weight, *, served):
    """One expert on one row, float64 between the named roundings."""
    w1, w2, w3 = exact
    x = fake_quant_fp8(x[None])[0].double() if served else x.double()
    gate, up = w1 @ x, w3 @ x
    if served:
        gate, up = bf16(gate), bf16(up)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    pairs = zip(gate.tolist(), up.tolist(), strict=True)
    hidden = torch.tensor([g / (1 + math.exp(-g)) * u for g, u in pairs], dtype=torch.float64)
    if served:
        return bf16(w2 @ fake_quant_fp8((hidden * weight).float()[None])[0].double())
    return (w2 @ hidden) * weight


def route(ops, x, gate, bias=None, image_bias=None, image=None, valid=None, top_k=2, scale=1.5, **options):
    experts = gate.shape[0]
    rows = x.shape[0]
    router = RouterWeights(
        gate,
        torch.zeros(experts) if bias is None else bias,
        torch.zeros(experts) if image_bias is None else image_bias,
    )
    return ops(**options)["experts"].route(
        x,
        router,
        torch.zeros(rows, dtype=torch.bool) if image is None else image,
        torch.ones(rows, dtype=torch.bool) if valid is None else valid,
        top_k,
        scale,
    )


@pytest.mark.parametrize("invariant", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_routing_is_its_formula(ops, dtype, top_k, invariant):
    x, gate, bias, image_bias = torch.randn(9, HIDDEN).to(dtype), torch.randn(5, HIDDEN), torch.randn(5), torch.randn(5)
    image = torch.arange(9) % 3 == 0
    options = {"activation_dtype": dtype, "batch_invariant": invariant}
    routing = route(ops, x, gate.bfloat16(), bias, image_bias, image, top_k=top_k, **options)
    assert routing.weights_Tk.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for row in range(9):
        logits = (gate.bfloat16().double() @ x[row].double()).tolist()
        scores = [math.sqrt(math.log1p(math.exp(-abs(v))) + max(v, 0.0)) for v in logits]
        biases = (image_bias if image[row] else bias).tolist()
        order = sorted(range(5), key=lambda e, s=scores, b=biases: (-(s[e] + b[e]), e))[:top_k]
        assert routing.experts_Tk[row].tolist() == order
        weights = [scores[expert] for expert in order]
        if top_k > 1:
            weights = [weight / (sum(weights) + 1e-20) for weight in weights]
        weights = torch.tensor([weight * 1.5 for weight in weights], dtype=torch.float64)
        torch.testing.assert_close(routing.weights_Tk[row].double(), weights, rtol=1e-5, atol=1e-6)


def test_tied_experts_are_taken_by_lowest_id_and_never_twice(ops):
    gate = torch.zeros(8, HIDDEN)
    routing = route(ops, torch.randn(3, HIDDEN), gate, top_k=6)
    assert routing.experts_Tk.tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    torch.testing.assert_close(routing.weights_Tk, torch.full((3, 6), 0.25))
    # A tie across the cut.
    bias = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0])
    assert route(ops, torch.zeros(1, HIDDEN), gate, bias, top_k=4).experts_Tk.tolist() == [[3, 1, 0, 2]]


def test_all_but_one_expert_at_minus_infinity_still_gives_distinct_experts(ops):
    bias = torch.full((6,), -math.inf)
    bias[4] = 0.0
    assert route(ops, torch.zeros(1, HIDDEN), torch.zeros(6, HIDDEN), bias, top_k=3).experts_Tk.tolist() == [[4, 0, 1]]


def test_scores_one_ulp_apart_are_ordered(ops):
    bias = torch.tensor([1024.0, 1024.0 + 2**-13, 1024.0 + 2**-12, 0.0, 0.0, 0.0])
    assert route(ops, torch.zeros(1, HIDDEN), torch.zeros(6, HIDDEN), bias, top_k=3).experts_Tk.tolist() == [[2, 1, 0]]


def test_a_nan_bias_ranks_below_every_number(ops):
    bias = torch.tensor([math.nan, -math.inf, 0.0, -5.0])
    assert route(ops, torch.zeros(1, HIDDEN), torch.zeros(4, HIDDEN), bias, top_k=4).experts_Tk.tolist() == [
        [2, 3, 1, 0]
    ]


def test_a_nan_row_keeps_its_nan_and_distinct_experts(ops):
    x = torch.randn(3, HIDDEN)
    x[1, 0] = math.nan
    routing = route(ops, x, torch.randn(6, HIDDEN), top_k=3)
    assert routing.experts_Tk[1].tolist() == [0, 1, 2]
    assert routing.weights_Tk[1].isnan().all()
    assert routing.weights_Tk[[0, 2]].isfinite().all()


def test_padding_rows_choose_no_expert(ops):
    x = torch.randn(4, HIDDEN)
    x[3] = math.nan
    routing = route(ops, x, torch.randn(6, HIDDEN), valid=torch.tensor([True, False, True, False]))
    assert routing.experts_Tk[[1, 3]].tolist() == [[-1, -1]] * 2
    assert torch.equal(routing.weights_Tk[[1, 3]], torch.zeros(2, 2))
    assert (routing.experts_Tk[[0, 2]] >= 0).all()


def test_more_experts_than_there_are_is_refused(ops):
    with pytest.raises(OpRefusedError, match="top_k is 7; there are 6"):
        route(ops, torch.randn(1, HIDDEN), torch.randn(6, HIDDEN), top_k=7)


@pytest.mark.parametrize("invariant", MODES)
@pytest.mark.parametrize("numerics", ["portable", "served"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_slot_outputs_are_their_formula(ops, dtype, numerics, invariant):
    group = ops(activation_dtype=dtype, numerics=numerics, batch_invariant=invariant)["experts"]
    kept, exact = make_experts(4)
    prepared = group.prepare(kept, LIMIT)
    x = torch.randn(6, HIDDEN).to(dtype) * 2
    chosen = torch.tensor([[3, 0], [0, -1], [-1, -1], [3, 1], [1, 3], [-1, 0]])
    weights = torch.rand(6, 2) * (chosen >= 0)
    slots = group.routed(x, Routing(chosen, weights), prepared)
    assert slots.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    served = numerics == "served"
    tolerance = 2e-2 if dtype == torch.bfloat16 or served else 1e-5
    for row in range(6):
        for slot in range(2):
            expert = int(chosen[row, slot])
            if expert < 0:
                assert torch.equal(slots[row, slot], torch.zeros(HIDDEN, dtype=slots.dtype))
            else:
                value = expected(x[row], exact[expert], float(weights[row, slot]), served=served)
                torch.testing.assert_close(slots[row, slot].double(), value, rtol=tolerance, atol=tolerance)


def test_served_rounds_where_it_says(ops):
    """Float64 between the named roundings agrees almost everywhere, bit for bit, with what is computed in float32."""
    group = ops(numerics="served")["experts"]
    kept, exact = make_experts(1)
    x, weights = torch.randn(40, HIDDEN) * 2, torch.rand(40, 1)
    slots = group.routed(x, Routing(torch.zeros(40, 1, dtype=torch.int64), weights), group.prepare(kept, LIMIT))
    wanted = torch.stack([expected(x[row], exact[0], float(weights[row, 0]), served=True) for row in range(40)])
    assert torch.equal(slots.bfloat16().float(), slots)
    assert (slots[:, 0].double() == wanted).double().mean() > 0.97
    portable = ops()["experts"]
    plain = portable.routed(x, Routing(torch.zeros(40, 1, dtype=torch.int64), weights), portable.prepare(kept, LIMIT))
    assert (plain[:, 0].double() == wanted).double().mean() < 0.5


@pytest.mark.parametrize("numerics", ["portable", "served"])
@pytest.mark.parametrize("invariant", MODES)
def test_shared_combine_and_local_are_one_chain(ops, numerics, invariant):
    group = ops(numerics=numerics, batch_invariant=invariant)["experts"]
    kept, _ = make_experts(3)
    one, exact = make_experts(1)
    prepared, shared = group.prepare(kept, LIMIT), group.prepare_shared(one[0], LIMIT)
    x = torch.randn(5, HIDDEN)
    routing = Routing(torch.tensor([[0, 2], [2, 1], [1, 0], [-1, -1], [0, 1]]), torch.rand(5, 2))
    slots, own = group.routed(x, routing, prepared), group.shared(x, shared)
    for row in range(5):
        value = expected(x[row], exact[0], 1.0, served=numerics == "served")
        torch.testing.assert_close(own[row].double(), value, rtol=1e-2, atol=1e-2 if numerics == "served" else 1e-5)
    combined = group.combine(own, slots)
    assert torch.equal(combined, (own + slots[:, 0]) + slots[:, 1])
    assert torch.equal(group.local(x, routing, prepared, shared), combined)


def test_combine_adds_the_shared_slot_first_then_slots_in_order(ops):
    shared, slots = torch.full((1, 1), 2.0**24), torch.tensor([[[1.0], [1.0], [2.0]]])
    assert ops()["experts"].combine(shared, slots).item() == 2.0**24 + 2.0  # 1 is lost twice in float32, 2 is not
    rounded = ops(activation_dtype=torch.bfloat16)["experts"].combine(
        torch.tensor([[1.0]]), torch.full((1, 2, 1), 2**-9)
    )
    assert rounded.dtype == torch.bfloat16
    assert rounded.item() == torch.tensor(1.0 + 2**-8).bfloat16().item()


@pytest.mark.parametrize("invariant", MODES)
def test_nan_rows_and_clamps_do_not_hide_or_spread_nan(ops, invariant):
    group = ops(batch_invariant=invariant)["experts"]
    kept, _ = make_experts(2)
    prepared, shared = group.prepare(kept, LIMIT), group.prepare_shared(kept[0], LIMIT)
    x = torch.randn(4, HIDDEN)
    x[2, 7] = math.nan
    routing = Routing(torch.tensor([[0, 1]] * 4), torch.ones(4, 2))
    slots = group.routed(x, routing, prepared)
    assert slots[2].isnan().all()
    assert slots[[0, 1, 3]].isfinite().all()
    own = group.shared(x, shared)
    assert own[2].isnan().all()
    assert own[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("invariant", MODES)
@pytest.mark.parametrize("numerics", ["portable", "served"])
def test_no_rows_and_no_choices(ops, numerics, invariant):
    group = ops(numerics=numerics, batch_invariant=invariant)["experts"]
    kept, _ = make_experts(2)
    prepared, shared = group.prepare(kept, LIMIT), group.prepare_shared(kept[0], LIMIT)
    none = Routing(torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    empty = torch.zeros(0, HIDDEN)
    assert group.routed(empty, none, prepared).shape == (0, 2, HIDDEN)
    assert group.shared(empty, shared).shape == (0, HIDDEN)
    assert group.local(empty, none, prepared, shared).shape == (0, HIDDEN)
    assert route(ops, empty, torch.randn(4, HIDDEN), numerics=numerics).experts_Tk.shape == (0, 2)
    nobody = Routing(torch.full((3, 2), -1), torch.full((3, 2), math.nan))
    assert torch.equal(group.routed(torch.full((3, HIDDEN), math.nan), nobody, prepared), torch.zeros(3, 2, HIDDEN))


def test_rows_of_any_strides_give_the_same(ops):
    group = ops()["experts"]
    kept, _ = make_experts(2)
    prepared = group.prepare(kept, LIMIT)
    x = torch.randn(HIDDEN, 5).t()
    routing = Routing(torch.tensor([[0, 1]]).expand(5, 2), torch.rand(2, 5).t())
    dense = Routing(routing.experts_Tk.contiguous(), routing.weights_Tk.contiguous())
    assert torch.equal(group.routed(x, routing, prepared), group.routed(x.contiguous(), dense, prepared))


def test_what_does_not_fit_is_refused(ops):
    group = ops()["experts"]
    kept, _ = make_experts(2)
    prepared = group.prepare(kept, LIMIT)
    routing = Routing(torch.tensor([[2]]), torch.ones(1, 1))
    with pytest.raises(OpRefusedError, match="expert 2 was chosen; the layer has 2"):
        group.routed(torch.zeros(1, HIDDEN), routing, prepared)
    with pytest.raises(OpRefusedError, match="another implementation"):
        group.shared(torch.zeros(1, HIDDEN), PreparedWeight())
    with pytest.raises(OpRefusedError, match="bfloat16"):
        group.shared(torch.zeros(1, HIDDEN).bfloat16(), prepared)
    with pytest.raises(OpRefusedError, match="no experts"):
        group.prepare([], LIMIT)
