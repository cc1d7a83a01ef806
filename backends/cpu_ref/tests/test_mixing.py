import math

import pytest
import torch

from deepinfer.accelerator.ops.mixing import Mix, MixWeights
from deepinfer.errors import OpRefusedError

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float64: 1e-13}
MODES = [False, True]


def weights(streams=4, width=24):
    outputs = (2 + streams) * streams
    return MixWeights(torch.randn(outputs, streams * width) * 0.1, torch.randn(outputs), torch.rand(3) + 0.5)


def expected_mix(x, mix, iterations, eps, norm_eps):
    """One row by the formula, in Python floats."""
    streams = x.shape[0]
    flat = x.double().flatten().tolist()
    scale = 1.0 / math.sqrt(sum(value * value for value in flat) / len(flat) + norm_eps)
    m = [sum(a * b for a, b in zip(flat, row.tolist(), strict=True)) * scale for row in mix.fn_MK.double()]
    base, (a, b, c) = mix.base_M.double().tolist(), mix.scale_3.double().tolist()
    pre = [1 / (1 + math.exp(-(m[i] * a + base[i]))) + eps for i in range(streams)]
    post = [2 / (1 + math.exp(-(m[streams + i] * b + base[streams + i]))) for i in range(streams)]
    start = 2 * streams
    grid = [
        [m[start + i * streams + j] * c + base[start + i * streams + j] for j in range(streams)] for i in range(streams)
    ]
    grid = [[math.exp(v) / sum(math.exp(w) for w in row) + eps for v in row] for row in grid]

    def columns(grid):
        sums = [sum(row[j] for row in grid) + eps for j in range(streams)]
        return [[row[j] / sums[j] for j in range(streams)] for row in grid]

    grid = columns(grid)
    for _ in range(iterations - 1):
        grid = [[v / (sum(row) + eps) for v in row] for row in grid]
        grid = columns(grid)
    return pre, post, grid


@pytest.mark.parametrize("invariant", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_mixes_are_their_formula(ops, dtype, iterations, invariant):
    x, mix = torch.randn(3, 4, 24).to(dtype), weights()
    got = ops(activation_dtype=dtype, batch_invariant=invariant)["mixing"].mixes(x, mix, iterations, 1e-6, 1e-20)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {got.pre_TS.dtype, got.post_TS.dtype, got.comb_TSS.dtype} == {wide}
    tolerance = 1e-12 if wide == torch.float64 else 1e-5
    for row in range(3):
        pre, post, comb = expected_mix(x[row], mix, iterations, 1e-6, 1e-20)
        for part, value in ((got.pre_TS, pre), (got.post_TS, post), (got.comb_TSS, comb)):
            expected = torch.tensor(value, dtype=torch.float64)
            torch.testing.assert_close(part[row].double(), expected, rtol=tolerance, atol=tolerance)


def test_mixing_is_doubly_stochastic_and_ends_on_columns(ops):
    comb = ops()["mixing"].mixes(torch.randn(5, 4, 24), weights(), 20, 1e-6, 1e-20).comb_TSS
    torch.testing.assert_close(comb.sum(1), torch.ones(5, 4), rtol=0, atol=3e-6)
    torch.testing.assert_close(comb.sum(2), torch.ones(5, 4), rtol=0, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_collapse_and_post_are_their_formulas(ops, dtype):
    x, y = torch.randn(3, 4, 24).to(dtype), torch.randn(3, 24).to(dtype)
    mix = Mix(torch.rand(3, 4), torch.rand(3, 4), torch.rand(3, 4, 4))
    group = ops(activation_dtype=dtype)["mixing"]
    collapsed, posted = group.collapse(x, mix.pre_TS), group.post(y, x, mix)
    assert collapsed.dtype == posted.dtype == dtype
    for row in range(3):
        expected = sum(float(mix.pre_TS[row, i]) * x[row, i].double() for i in range(4))
        torch.testing.assert_close(collapsed[row].double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        for j in range(4):
            # The FIRST index of comb is the source stream.
            expected = float(mix.post_TS[row, j]) * y[row].double()
            expected = expected + sum(float(mix.comb_TSS[row, i, j]) * x[row, i].double() for i in range(4))
            torch.testing.assert_close(posted[row, j].double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_an_identity_mix_passes_the_streams_through(ops):
    x = torch.randn(2, 4, 8)
    mix = Mix(torch.eye(4)[:2], torch.zeros(2, 4), torch.eye(4).expand(2, 4, 4))
    group = ops()["mixing"]
    assert torch.equal(group.post(torch.randn(2, 8), x, mix), x)
    assert torch.equal(group.collapse(x, mix.pre_TS), torch.stack((x[0, 0], x[1, 1])))


@pytest.mark.parametrize("invariant", MODES)
def test_no_rows_give_no_rows(ops, invariant):
    group = ops(batch_invariant=invariant)["mixing"]
    mix = group.mixes(torch.zeros(0, 4, 24), weights(), 20, 1e-6, 1e-20)
    assert mix.comb_TSS.shape == (0, 4, 4)
    assert group.collapse(torch.zeros(0, 4, 24), mix.pre_TS).shape == (0, 24)
    assert group.post(torch.zeros(0, 24), torch.zeros(0, 4, 24), mix).shape == (0, 4, 24)


@pytest.mark.parametrize("invariant", MODES)
def test_nan_stays_in_its_row_and_zero_streams_are_finite(ops, invariant):
    x = torch.randn(3, 4, 24)
    x[0], x[1, 2, 3] = 0.0, math.nan
    mix = ops(batch_invariant=invariant)["mixing"].mixes(x, weights(), 20, 1e-6, 1e-20)
    assert mix.comb_TSS[1].isnan().all()
    assert mix.comb_TSS[[0, 2]].isfinite().all()


def test_streams_of_any_strides_mix_the_same(ops):
    group, mix = ops()["mixing"], weights()
    x = torch.randn(3, 24, 8)[:, :, ::2].transpose(1, 2)
    strided, dense = (group.mixes(view, mix, 20, 1e-6, 1e-20) for view in (x, x.contiguous()))
    torch.testing.assert_close(strided.comb_TSS, dense.comb_TSS)
    broadcast = torch.randn(3, 1, 24).expand(3, 4, 24)
    assert torch.equal(group.collapse(broadcast, dense.pre_TS), group.collapse(broadcast.contiguous(), dense.pre_TS))
    assert torch.equal(group.post(x[:, 0], x, dense), group.post(x[:, 0].contiguous(), x.contiguous(), dense))


def test_weights_of_another_width_are_refused(ops):
    with pytest.raises(OpRefusedError, match=r"\(24, 96\)"):
        ops()["mixing"].mixes(torch.zeros(1, 4, 24), weights(width=23), 20, 1e-6, 1e-20)
    with pytest.raises(OpRefusedError, match="0 iterations"):
        ops()["mixing"].mixes(torch.zeros(1, 4, 24), weights(), 0, 1e-6, 1e-20)
