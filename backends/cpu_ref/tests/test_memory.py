import math

import pytest
import torch

from deepinfer.accelerator.ops.memory import NgramHash, NgramTable
from deepinfer.errors import OpRefusedError
from deepinfer.numerics import dequantise_engram_rows, quantise_engram_table

LENGTH, HEADS = 4, 2


@pytest.fixture
def constants():
    primes = torch.tensor([[101, 103], [107, 109], [113, 127]])
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), primes.flatten().cumsum(0)[:-1]))
    multipliers = torch.tensor([76632096046245, 4839876093313, 35959672319349, 73987337458391])
    return NgramHash(multipliers, primes, offsets, pad_id=2)


def expected_rows(tokens, constants):
    """One position by the recipe of the paper's code, in Python integers; dead tokens are -1."""
    multipliers, primes = constants.multipliers_G.tolist(), constants.primes_Gh.tolist()
    offsets, rows, blocked, roll = constants.offsets_F.tolist(), [], False, 0
    for back, token in enumerate(tokens):
        blocked = blocked or token == -1
        roll ^= (constants.pad_id if blocked else token) * multipliers[back]
        if back:
            rows += [roll % primes[back - 1][head] + offsets[(back - 1) * HEADS + head] for head in range(HEADS)]
    return [-1] * len(rows) if tokens[0] == -1 else rows


def test_hash_is_its_recipe_for_every_pattern_of_dead_tokens(ops, constants):
    patterns = [[(pattern >> back) & 1 for back in range(LENGTH)] for pattern in range(2**LENGTH)]
    tokens = torch.randint(0, 99092, (len(patterns), LENGTH))
    tokens = torch.where(torch.tensor(patterns).bool(), -1, tokens)
    rows = ops()["memory"].ngram_rows(tokens, constants)
    assert rows.dtype == torch.int64
    assert rows.tolist() == [expected_rows(row, constants) for row in tokens.tolist()]


def test_the_released_first_rows_are_reproduced(ops):
    """Public fixture: ids 0, 2, 671 at the start of a text, layer 1's multipliers and first primes."""
    constants = NgramHash(
        torch.tensor([76632096046245, 4839876093313, 35959672319349, 73987337458391]),
        torch.tensor([[16000057], [16000057], [16000057]]),
        torch.zeros(3, dtype=torch.int64),
        pad_id=2,
    )
    rows = ops()["memory"].ngram_rows(torch.tensor([[0, -1, -1, -1]]), constants)
    assert int(rows[0, 0]) == 5702652


def test_no_tokens_give_no_rows(ops, constants):
    assert ops()["memory"].ngram_rows(torch.zeros(0, LENGTH, dtype=torch.int64), constants).shape == (0, 6)


def test_tokens_of_another_shape_are_refused(ops, constants):
    with pytest.raises(OpRefusedError, match=r"int64 \[T, 4\]"):
        ops()["memory"].ngram_rows(torch.zeros(2, 3, dtype=torch.int64), constants)
    with pytest.raises(OpRefusedError, match="int32"):
        ops()["memory"].ngram_rows(torch.zeros(2, LENGTH, dtype=torch.int32), constants)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("numerics", ["portable", "served"])
def test_released_rows_decode_exactly_and_missing_rows_are_zeros(ops, dtype, numerics):
    codes, scales = quantise_engram_table(torch.randn(10, 64))
    rows = torch.tensor([[3, -1], [9, 0], [-1, -1]])
    memory = ops(activation_dtype=dtype, numerics=numerics)["memory"]
    values = memory.gather_rows(NgramTable("engram", codes, scales), rows)
    exact = dequantise_engram_rows(codes, scales)
    zero = torch.zeros(64)
    expected = torch.stack([torch.cat((exact[3], zero)), torch.cat((exact[9], exact[0])), torch.cat((zero, zero))])
    assert values.dtype == dtype
    assert torch.equal(values, expected.to(dtype))


def test_float_tables_round_to_bfloat16_when_served(ops):
    table = NgramTable("engram", torch.randn(5, 8), None)
    rows = torch.tensor([[4, 1]])
    portable, served = (ops(numerics=mode)["memory"].gather_rows(table, rows) for mode in ("portable", "served"))
    assert torch.equal(portable[0], table.rows_RW[[4, 1]].flatten())
    assert torch.equal(served[0], table.rows_RW[[4, 1]].flatten().bfloat16().float())


def test_gathering_nothing_gives_the_right_shape(ops):
    table = NgramTable("engram", torch.randn(5, 8), None)
    assert ops()["memory"].gather_rows(table, torch.zeros(0, 6, dtype=torch.int64)).shape == (0, 48)


def test_row_offsets_pass_32_bits(ops):
    """A table of 400 million rows over one page of memory: only the last row differs in its values."""
    stride = 2**31
    memory = torch.empty(stride + 64, dtype=torch.uint8)
    codes, scales = quantise_engram_table(torch.randn(2, 64))
    memory[stride:] = codes[1].view(torch.uint8)
    memory[:64] = codes[0].view(torch.uint8)
    far = memory.as_strided((2, 64), (stride, 1)).view(torch.float8_e4m3fn)
    values = ops()["memory"].gather_rows(NgramTable("engram", far, scales), torch.tensor([[1], [0]]))
    assert torch.equal(values, dequantise_engram_rows(codes, scales)[[1, 0]])
    wide = codes[:1].expand(400_000_000, 64), scales[:1].expand(400_000_000, 2)
    values = ops()["memory"].gather_rows(NgramTable("engram", *wide), torch.tensor([[399_999_999]]))
    assert torch.equal(values, dequantise_engram_rows(codes, scales)[:1])


def expected_gate(x, key, value, query_weight, key_weight, eps):
    out = x.double().clone()
    for stream in range(x.shape[0]):
        a, b = x[stream].double().tolist(), key[stream].double().tolist()
        weights = (query_weight[stream].double() * key_weight[stream].double()).tolist()
        width = len(a)
        dot = sum(p * w * q for p, w, q in zip(a, weights, b, strict=True))
        dot /= math.sqrt(sum(p * p for p in a) / width + eps) * math.sqrt(sum(q * q for q in b) / width + eps)
        dot *= width**-0.5
        gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)))
        out[stream] = x[stream].double() + gate * value.double()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gate_is_its_formula(ops, dtype):
    x, key = torch.randn(3, 4, 20).to(dtype), torch.randn(3, 4, 20).to(dtype)
    value, weights = torch.randn(3, 20).to(dtype), torch.randn(2, 4, 20)
    key[1] = 0.0
    result = ops(activation_dtype=dtype)["memory"].gate(
        x, key, value, weights[0], weights[1], torch.tensor([True, True, True]), 1e-20
    )
    assert result.dtype == dtype
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float64: 1e-13}[dtype]
    for row in range(3):
        expected = expected_gate(x[row], key[row], value[row], weights[0], weights[1], 1e-20)
        torch.testing.assert_close(result[row].double(), expected, rtol=tolerance, atol=tolerance)


def test_dead_rows_keep_their_streams_bit_for_bit_whatever_the_key_holds(ops):
    x = torch.randn(3, 4, 20)
    x[1, 0, 0] = -0.0
    key, value = torch.full((3, 4, 20), math.nan), torch.full((3, 20), math.inf)
    key[0], value[0] = 1.0, 1.0
    alive = torch.tensor([True, False, False])
    result = ops()["memory"].gate(x, key, value, torch.ones(4, 20), torch.ones(4, 20), alive, 1e-20)
    assert torch.equal(result[1:].view(torch.int32), x[1:].view(torch.int32))
    assert (result[0] != x[0]).all()


def test_nan_in_a_key_reaches_its_own_row_only(ops):
    x, key, value = torch.randn(3, 4, 20), torch.randn(3, 4, 20), torch.randn(3, 20)
    key[1, 2, 5] = math.nan
    alive = torch.ones(3, dtype=torch.bool)
    result = ops()["memory"].gate(x, key, value, torch.ones(4, 20), torch.ones(4, 20), alive, 1e-20)
    assert result[1, 2].isnan().all()
    assert result[1, [0, 1, 3]].isfinite().all()
    assert result[[0, 2]].isfinite().all()


def test_gate_of_no_rows_and_of_any_strides(ops):
    memory, ones = ops()["memory"], torch.ones(4, 20)
    none = torch.zeros(0, dtype=torch.bool)
    assert memory.gate(
        torch.zeros(0, 4, 20), torch.zeros(0, 4, 20), torch.zeros(0, 20), ones, ones, none, 1.0
    ).shape == (
        0,
        4,
        20,
    )
    x, key = torch.randn(3, 1, 20).expand(3, 4, 20), torch.randn(3, 20, 4).transpose(1, 2)
    value, alive = torch.randn(3, 40)[:, ::2], torch.ones(3, dtype=torch.bool)
    dense = memory.gate(x.contiguous(), key.contiguous(), value.contiguous(), ones, ones, alive, 1e-20)
    assert torch.equal(memory.gate(x, key, value, ones, ones, alive, 1e-20), dense)
