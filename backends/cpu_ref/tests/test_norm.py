import math

import pytest
import torch

from deepinfer.accelerator.ops.norm import RotaryTable
from deepinfer.errors import OpRefusedError

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float64: 1e-13}


def table(positions=40, pairs=4):
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * 10.0 ** -torch.arange(pairs, dtype=torch.float64)
    return RotaryTable(angles.cos().float(), angles.sin().float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 7), (1, 20480), (3, 4, 100), (0, 8), (2, 0, 8)])
def test_rms_is_its_formula(ops, dtype, shape):
    x, weight = torch.randn(shape).to(dtype), torch.rand(shape[-1]) + 0.5
    result = ops(activation_dtype=dtype)["norm"].rms(x, weight, 1e-20)
    assert result.dtype == dtype
    assert result.shape == x.shape
    flat, out = x.double().reshape(-1, shape[-1]), result.double().reshape(-1, shape[-1])
    for row, got in zip(flat, out, strict=True):
        scale = 1.0 / math.sqrt(float(sum(value * value for value in row.tolist())) / shape[-1] + 1e-20)
        torch.testing.assert_close(got, weight.double() * row * scale, rtol=TOLERANCE[dtype], atol=1e-30)


def test_rms_of_a_zero_row_is_exactly_zero_and_nan_stays_in_its_row(ops):
    x = torch.randn(3, 64)
    x[0] = 0.0
    x[1, 5] = math.nan
    result = ops()["norm"].rms(x, torch.ones(64), 1e-20)
    assert torch.equal(result[0], torch.zeros(64))
    assert result[1].isnan().all()
    assert result[2].isfinite().all()


def test_rms_of_bfloat16_rounds_once(ops):
    x = torch.randn(50, 33).bfloat16()
    weight = torch.rand(33) + 0.5
    exact = ops()["norm"].rms(x.float(), weight, 1e-6)
    assert torch.equal(ops()["norm"].rms(x, weight, 1e-6), exact.bfloat16())


@pytest.mark.parametrize("view", ["transposed", "sliced", "broadcast"])
def test_rms_reads_any_strides(ops, view):
    x = {
        "transposed": torch.randn(16, 6).t(),
        "sliced": torch.randn(6, 40)[:, 3:35:2],
        "broadcast": torch.randn(1, 16).expand(6, 16),
    }[view]
    norm = ops()["norm"]
    assert torch.equal(norm.rms(x, torch.ones(16), 1e-6), norm.rms(x.contiguous(), torch.ones(16), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(6, 12), (6, 3, 12), (6, 8), (0, 12), (0, 3, 12)])
def test_rotary_turns_adjacent_pairs_of_the_last_channels(ops, dtype, inverse, shape):
    x, rotation = torch.randn(shape).to(dtype), table()
    position = torch.tensor([0, 1, 39, 7, 7, 20])[: shape[0]]
    result = ops(activation_dtype=dtype)["norm"].rotary(x, rotation, position, inverse=inverse)
    assert result.dtype == dtype
    assert torch.equal(result[..., :-8], x[..., :-8])
    expected = x.double().clone()
    for row, place in enumerate(position.tolist()):
        for pair in range(4):
            even, odd = shape[-1] - 8 + 2 * pair, shape[-1] - 7 + 2 * pair
            cos, sin = float(rotation.cos_PR[place, pair]), float(rotation.sin_PR[place, pair])
            sin = -sin if inverse else sin
            e, o = x[row, ..., even].double(), x[row, ..., odd].double()
            expected[row, ..., even], expected[row, ..., odd] = e * cos - o * sin, o * cos + e * sin
    torch.testing.assert_close(result.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_rotary_leaves_its_input_alone_and_inverse_undoes_it(ops):
    x, position = torch.randn(5, 2, 16), torch.arange(5)
    before = x.clone()
    norm = ops()["norm"]
    turned = norm.rotary(x, table(), position)
    assert torch.equal(x, before)
    torch.testing.assert_close(norm.rotary(turned, table(), position, inverse=True), x, rtol=0, atol=2e-6)


def test_rotary_reads_any_strides(ops):
    x = torch.randn(2, 5, 32)[:, :, ::2].transpose(0, 1)
    norm, position = ops()["norm"], torch.arange(5)
    assert torch.equal(norm.rotary(x, table(), position), norm.rotary(x.contiguous(), table(), position))


def test_what_cannot_be_normed_or_turned_is_refused(ops):
    norm = ops()["norm"]
    with pytest.raises(OpRefusedError, match="int64"):
        norm.rms(torch.ones(2, 4, dtype=torch.int64), torch.ones(4), 1e-6)
    with pytest.raises(OpRefusedError, match="last dimension must be 5"):
        norm.rms(torch.ones(2, 4), torch.ones(5), 1e-6)
    with pytest.raises(OpRefusedError, match="at least 8"):
        norm.rotary(torch.ones(2, 6), table(), torch.zeros(2, dtype=torch.int64))
