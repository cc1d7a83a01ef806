import math
from collections.abc import Callable

import pytest
import torch

from deepinfer_cpu_ref.invariant import (
    ascending,
    best,
    mean_square,
    order_keys,
    pad_width,
    padded_product,
    row_sum,
    sigmoid,
    silu,
    softplus,
)

FUNCTIONS: list[Callable[[torch.Tensor], torch.Tensor]] = [sigmoid, silu, softplus]


@pytest.mark.parametrize(
    ("function", "formula"),
    [
        (sigmoid, lambda v: 1 / (1 + math.exp(-v))),
        (silu, lambda v: v / (1 + math.exp(-v))),
        (softplus, lambda v: math.log1p(math.exp(-abs(v))) + max(v, 0.0)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions_are_their_formulas(function, formula, dtype):
    x = torch.cat((torch.linspace(-80, 80, 321), torch.tensor([0.0, 1e-30, -1e-30]))).to(dtype)
    expected = torch.tensor([formula(value) for value in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(
        function(x).double(), expected, rtol=1e-6 if dtype == torch.float32 else 1e-13, atol=1e-37
    )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_have_ends_and_keep_nan(function):
    x = torch.tensor([-1e30, 1e30, math.nan])
    low, high, nan = function(x).tolist()
    assert low == 0.0
    assert high == {"sigmoid": 1.0, "silu": x[1].item(), "softplus": x[1].item()}[function.__name__]
    assert math.isnan(nan)


@pytest.mark.parametrize("function", [*FUNCTIONS, torch.rsqrt, torch.sqrt])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_place_of_a_value_in_memory_does_not_matter(function, dtype):
    x = torch.rand(515, dtype=dtype) * 8 + 0.01
    if function in FUNCTIONS:
        x = x - 4.0
    expected = function(x)
    for length in (*range(1, 68), 511, 513, 514):
        assert torch.equal(function(x[:length].clone()), expected[:length])
        assert torch.equal(function(x[-length:].clone()), expected[-length:])


@pytest.mark.parametrize("width", [1, 3, 4, 127, 512, 16_384, 16_385, 20_480, 70_000])
def test_sums_do_not_depend_on_rows_threads_or_strides(threads, width):
    x = torch.randn(7, width)
    with threads(1):
        expected, squares = row_sum(x), mean_square(x)
    torch.testing.assert_close(expected.double(), x.double().sum(-1, keepdim=True), rtol=1e-5, atol=1e-3)
    for count in (1, 2):
        with threads(count):
            for row in range(7):
                assert torch.equal(row_sum(x[row : row + 1].clone()), expected[row : row + 1])
            assert torch.equal(row_sum(x.t().contiguous().t()), expected)
            assert torch.equal(mean_square(x[2:5].clone()), squares[2:5])


def test_padded_products_have_the_shape_that_was_asked_for():
    weight = torch.randn(5, 12)
    for rows in (0, 1, 8, 9):
        x = torch.randn(rows, 12)
        result = padded_product(x, pad_width(weight), 5)
        assert result.shape == (rows, 5)
        torch.testing.assert_close(result, x @ weight.t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keys_are_ordered_as_scores_are(dtype):
    smallest = torch.finfo(dtype).tiny / 4
    values = [math.nan, -math.inf, -3.0, -1.0, -smallest, 0.0, smallest, 1.0, 1.0 + 1e-3, 3.0, math.inf]
    keys = order_keys(torch.tensor(values, dtype=dtype)).tolist()
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)
    zeros = order_keys(torch.tensor([0.0, -0.0], dtype=dtype)).tolist()
    assert zeros[0] == zeros[1]
    negative_nan = order_keys(torch.tensor([-math.nan, math.nan], dtype=dtype)).tolist()
    assert negative_nan[0] == negative_nan[1] == keys[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_best_orders_by_score_then_place_and_leaves_out_what_does_not_compete(dtype):
    scores = torch.tensor([[1.0, 3.0, 3.0, math.nan, -0.0, 0.0, 3.0]], dtype=dtype)
    competes = torch.tensor([[True, True, False, True, True, True, True]])
    assert best(order_keys(scores, competes), 6).tolist() == [[1, 6, 0, 4, 5, 3]]
    assert best(order_keys(scores, competes), 9).tolist() == [[1, 6, 0, 4, 5, 3, -1, -1, -1]]
    assert best(order_keys(scores, competes), 2).tolist() == [[1, 6]]
    assert best(order_keys(scores, competes), 0).shape == (1, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_long_flat_row_gives_ascending_places(dtype):
    assert best(order_keys(torch.zeros(3, 2000, dtype=dtype)), 512).tolist() == [list(range(512))] * 3


def test_places_ascend_and_the_missing_ones_come_last():
    assert ascending(torch.tensor([[5, -1, 2, 9], [-1, -1, -1, 0]])).tolist() == [[2, 5, 9, -1], [0, -1, -1, -1]]
    assert ascending(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0)
