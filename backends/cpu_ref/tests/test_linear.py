import math

import pytest
import torch

from deepinfer.accelerator.weights import PreparedWeight, StoredWeight
from deepinfer.errors import OpRefusedError
from deepinfer.numerics import (
    dequantise_fp8_weight,
    dequantise_mxfp4_weight,
    fake_quant_fp8,
    quantise_fp8_weight,
    quantise_mxfp4_weight,
)

FORMATS = ["float32", "bfloat16", "fp8_block32", "mxfp4"]
MODES = [False, True]


def stored(fmt, rows=24, columns=64):
    """A stored weight and its exact values in float64."""
    weight = torch.randn(rows, columns)
    if fmt in ("float32", "bfloat16"):
        kept = weight.to(getattr(torch, fmt))
        return StoredWeight("w", fmt, kept, None, rows, columns), kept.double()
    quantise, decode = {
        "fp8_block32": (quantise_fp8_weight, dequantise_fp8_weight),
        "mxfp4": (quantise_mxfp4_weight, dequantise_mxfp4_weight),
    }[fmt]
    codes, scale = quantise(weight)
    return StoredWeight("w", fmt, codes, scale, rows, columns), decode(codes, scale).double()


@pytest.mark.parametrize("invariant", MODES)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dense_is_the_product_with_the_exact_weight(ops, fmt, dtype, invariant):
    weight, exact = stored(fmt)
    linear = ops(activation_dtype=dtype, batch_invariant=invariant)["linear"]
    x = torch.randn(9, 64).to(dtype)
    result = linear.dense(x, linear.prepare(weight))
    assert result.dtype == dtype
    assert result.is_contiguous()
    expected = x.double() @ exact.t()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_float32_weight_is_not_rounded_for_bfloat16_activations(ops):
    weight, exact = stored("float32")
    linear = ops(activation_dtype=torch.bfloat16)["linear"]
    x = torch.randn(5, 64).bfloat16()
    result = linear.dense(x, linear.prepare(weight))
    assert torch.equal(result, (x.float() @ exact.float().t()).bfloat16())


@pytest.mark.parametrize("invariant", MODES)
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_float32_precision_promotes_and_never_quantises(ops, dtype, wide, invariant):
    weight, exact = stored("fp8_block32")
    options = {"activation_dtype": dtype, "numerics": "served", "batch_invariant": invariant}
    linear = ops(**options)["linear"]
    prepared = linear.prepare(weight, "float32")
    x = torch.randn(5, 64).to(dtype)
    result = linear.dense(x, prepared)
    assert result.dtype == wide
    torch.testing.assert_close(result.double(), x.double() @ exact.t(), rtol=1e-5, atol=1e-5)
    assert torch.equal(linear.dense(x.to(wide), prepared), result)


@pytest.mark.parametrize("fmt", FORMATS)
def test_served_quantises_the_input_of_quantised_weights_only(ops, fmt):
    weight, exact = stored(fmt)
    linear = ops(numerics="served")["linear"]
    x = torch.randn(6, 64)
    seen = fake_quant_fp8(x) if fmt in ("fp8_block32", "mxfp4") else x
    result = linear.dense(x, linear.prepare(weight)).double()
    torch.testing.assert_close(result, seen.double() @ exact.t(), rtol=1e-5, atol=1e-5)


def test_served_quantises_a_ragged_last_group_on_its_own(ops):
    weight, exact = stored("fp8_block32", rows=5, columns=40)
    linear = ops(numerics="served")["linear"]
    x = torch.randn(3, 40)
    x[:, 32:] *= 1000
    seen = torch.cat((fake_quant_fp8(x[:, :32]), fake_quant_fp8(x[:, 32:], group=8)), dim=1)
    result = linear.dense(x, linear.prepare(weight)).double()
    torch.testing.assert_close(result, seen.double() @ exact.t(), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("invariant", MODES)
@pytest.mark.parametrize("numerics", ["portable", "served"])
def test_grouped_is_one_product_per_group(ops, numerics, invariant):
    weight, exact = stored("fp8_block32", rows=3 * 32, columns=64)
    linear = ops(numerics=numerics, batch_invariant=invariant)["linear"]
    x = torch.randn(3, 7, 64).transpose(0, 1)
    result = linear.grouped(x, linear.prepare_grouped(weight, 3))
    assert result.shape == (7, 3, 32)
    seen = fake_quant_fp8(x) if numerics == "served" else x
    for group in range(3):
        expected = seen[:, group].double() @ exact[group * 32 : (group + 1) * 32].t()
        torch.testing.assert_close(result[:, group].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("invariant", MODES)
@pytest.mark.parametrize("numerics", ["portable", "served"])
def test_no_rows_give_no_rows(ops, numerics, invariant):
    linear = ops(numerics=numerics, batch_invariant=invariant)["linear"]
    weight, _ = stored("fp8_block32")
    assert linear.dense(torch.randn(0, 64), linear.prepare(weight)).shape == (0, 24)
    assert linear.grouped(torch.randn(0, 2, 64), linear.prepare_grouped(weight, 2)).shape == (0, 2, 12)
    assert linear.embed(torch.zeros(0, dtype=torch.int64), torch.randn(5, 8)).shape == (0, 8)


@pytest.mark.parametrize("invariant", MODES)
def test_nan_and_infinity_stay_in_their_row(ops, invariant):
    linear = ops(batch_invariant=invariant, numerics="served")["linear"]
    weight, _ = stored("fp8_block32")
    x = torch.randn(4, 64)
    clean = linear.dense(x, linear.prepare(weight))
    x[1, 3], x[3, 60] = math.nan, math.inf
    result = linear.dense(x, linear.prepare(weight))
    assert result[1].isnan().all()
    assert not result[3].isfinite().any()
    torch.testing.assert_close(result[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("invariant", MODES)
@pytest.mark.parametrize("view", ["transposed", "sliced", "broadcast", "offset"])
def test_dense_reads_any_strides(ops, view, invariant):
    x = {
        "transposed": torch.randn(64, 8).t(),
        "sliced": torch.randn(8, 200)[:, 5:133:2],
        "broadcast": torch.randn(1, 64).expand(8, 64),
        "offset": torch.randn(8 * 64 + 1)[1:].view(8, 64),
    }[view]
    linear = ops(batch_invariant=invariant)["linear"]
    prepared = linear.prepare(stored("float32")[0])
    torch.testing.assert_close(linear.dense(x, prepared), linear.dense(x.contiguous(), prepared), rtol=1e-6, atol=1e-6)


def test_embedding_rows_are_copied_in_the_activation_dtype(ops):
    table = torch.randn(10, 6).bfloat16()
    rows = ops()["linear"].embed(torch.tensor([3, 0, 9, 3]), table)
    assert rows.dtype == torch.float32
    assert torch.equal(rows, table[[3, 0, 9, 3]].float())


def test_prepared_bytes_are_counted(ops):
    weight, _ = stored("fp8_block32")
    assert ops()["linear"].prepare(weight).nbytes == 24 * 64 * 4
    assert ops(activation_dtype=torch.bfloat16)["linear"].prepare(weight).nbytes == 24 * 64 * 2


def test_what_is_not_a_weight_is_refused_by_name(ops):
    linear = ops()["linear"]
    weight, _ = stored("fp8_block32")
    lost = StoredWeight("layers.0.attn.wq_a.weight", "fp8_block32", weight.weight, None, 24, 64)
    wrong = StoredWeight("layers.0.attn.wq_a.weight", "fp8_block32", weight.weight, weight.scale[:, :1], 24, 64)
    liar = StoredWeight("layers.0.attn.wq_a.weight", "fp8_block32", weight.weight, weight.scale, 25, 64)
    table = StoredWeight("layers.1.engram.embed.weight", "engram_fp8", weight.weight, weight.scale, 24, 64)
    for broken in (lost, wrong, liar):
        with pytest.raises(OpRefusedError, match=r"layers\.0\.attn\.wq_a\.weight"):
            linear.prepare(broken)
    with pytest.raises(OpRefusedError, match="Engram"):
        linear.prepare(table)
    with pytest.raises(OpRefusedError, match="5 equal groups"):
        linear.prepare_grouped(weight, 5)


def test_inputs_that_do_not_fit_are_refused(ops):
    linear = ops()["linear"]
    prepared = linear.prepare(stored("float32")[0])
    with pytest.raises(OpRefusedError, match="last dimension must be 64"):
        linear.dense(torch.randn(2, 63), prepared)
    with pytest.raises(OpRefusedError, match="float16"):
        linear.dense(torch.randn(2, 64).half(), prepared)
    with pytest.raises(OpRefusedError, match="float64"):
        linear.dense(torch.randn(2, 64).double(), prepared)
    with pytest.raises(OpRefusedError, match="another implementation"):
        linear.dense(torch.randn(2, 64), PreparedWeight())
    with pytest.raises(OpRefusedError, match=r"\[T, 2, 64\]"):
        linear.grouped(torch.randn(2, 3, 64), linear.prepare_grouped(stored("float32")[0], 2))
