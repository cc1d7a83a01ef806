"""Projections agree with the reference in every stored format, on the matrix unit and without one."""

from __future__ import annotations

import pytest
import torch

from deepinfer.accelerator.weights import StoredWeight
from deepinfer.errors import OpRefusedError
from deepinfer.numerics import quantise_fp8_weight, quantise_mxfp4_weight

ULP = 2.0**-7
"""One unit in the last place of bfloat16, relative."""


def stored(draws, rows, columns, stored_format):
    values_NK = torch.randn(rows, columns, generator=draws)
    if stored_format == "fp8_block32":
        weight, scale = quantise_fp8_weight(values_NK)
    elif stored_format == "mxfp4":
        weight, scale = quantise_mxfp4_weight(values_NK)
    else:
        weight, scale = values_NK.to(getattr(torch, stored_format)), None
    return StoredWeight("w", stored_format, weight, scale, rows, columns)


@pytest.mark.parametrize("stored_format", ["fp8_block32", "mxfp4", "bfloat16", "float32"])
@pytest.mark.parametrize(("rows", "columns"), [(40, 64), (64, 96), (72, 128)])
@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dense_agrees_with_the_reference(pair, draws, stored_format, rows, columns, served, dtype):
    ours, reference = pair(dtype, served=served)
    weight = stored(draws, rows, columns, stored_format)
    x_TK = torch.randn(5, columns, generator=draws).to(dtype)
    found = ours["linear"].dense(x_TK, ours["linear"].prepare(weight))
    wanted = reference["linear"].dense(x_TK, reference["linear"].prepare(weight))
    tolerance = ULP if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_fp8_weights_of_ragged_blocks_keep_their_values(pair, draws):
    ours, reference = pair()
    weight = stored(draws, 33, 80, "fp8_block32")
    x_TK = torch.randn(4, 80, generator=draws).to(torch.bfloat16)
    found = ours["linear"].dense(x_TK, ours["linear"].prepare(weight))
    wanted = reference["linear"].dense(x_TK, reference["linear"].prepare(weight))
    torch.testing.assert_close(found, wanted, rtol=ULP, atol=ULP)


@pytest.mark.parametrize("served", [True, False])
def test_grouped_agrees_with_the_reference(pair, draws, served):
    ours, reference = pair(served=served)
    weight = stored(draws, 3 * 32, 128, "fp8_block32")
    x_TGK = torch.randn(6, 3, 128, generator=draws).to(torch.bfloat16)
    found = ours["linear"].grouped(x_TGK, ours["linear"].prepare_grouped(weight, 3))
    wanted = reference["linear"].grouped(x_TGK, reference["linear"].prepare_grouped(weight, 3))
    torch.testing.assert_close(found, wanted, rtol=ULP, atol=ULP)


def test_exact_products_are_float32_and_never_quantised(pair, draws):
    ours, reference = pair()
    weight = stored(draws, 16, 64, "bfloat16")
    x_TK = torch.randn(3, 64, generator=draws).to(torch.bfloat16)
    found = ours["linear"].dense(x_TK, ours["linear"].prepare(weight, "float32"))
    wanted = reference["linear"].dense(x_TK, reference["linear"].prepare(weight, "float32"))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("served", [True, False])
def test_no_rows_give_no_rows(pair, draws, served):
    ours, _ = pair(served=served)
    prepared = ours["linear"].prepare(stored(draws, 32, 64, "fp8_block32"))
    assert ours["linear"].dense(torch.zeros(0, 64, dtype=torch.bfloat16), prepared).shape == (0, 32)


def test_a_chip_without_mx_keeps_exact_values_of_quantised_weights(pair, draws):
    ours, reference = pair(served=False, soc="Ascend910B3")
    weight = stored(draws, 32, 64, "mxfp4")
    x_TK = torch.randn(3, 64, generator=draws).to(torch.bfloat16)
    found = ours["linear"].dense(x_TK, ours["linear"].prepare(weight))
    wanted = reference["linear"].dense(x_TK, reference["linear"].prepare(weight))
    torch.testing.assert_close(found, wanted, rtol=ULP, atol=ULP)


def test_rows_of_another_width_are_refused(pair, draws):
    ours, _ = pair()
    prepared = ours["linear"].prepare(stored(draws, 32, 64, "fp8_block32"))
    with pytest.raises(OpRefusedError, match="last dimension must be 64"):
        ours["linear"].dense(torch.zeros(2, 32, dtype=torch.bfloat16), prepared)


def test_weights_of_another_implementation_are_refused(pair, draws):
    ours, reference = pair()
    theirs = reference["linear"].prepare(stored(draws, 32, 64, "fp8_block32"))
    with pytest.raises(OpRefusedError, match="another implementation prepared"):
        ours["linear"].dense(torch.zeros(2, 64, dtype=torch.bfloat16), theirs)
