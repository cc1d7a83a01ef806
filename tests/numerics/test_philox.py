"""Philox4x32-10 against its published vectors and a reading in Python integers."""

from __future__ import annotations

import pytest
import torch

from deepinfer.errors import ArgumentError
from deepinfer.numerics import philox4x32_10, uniform_53
from deepinfer.numerics.philox import _rounds_by_torch

ONES = 0xFFFFFFFF


def philox_in_integers(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    key_0, key_1 = key
    for _ in range(10):
        product_0, product_1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = (
            (product_1 >> 32) ^ counter[1] ^ key_0,
            product_1 % 2**32,
            (product_0 >> 32) ^ counter[3] ^ key_1,
            product_0 % 2**32,
        )
        key_0, key_1 = (key_0 + 0x9E3779B9) % 2**32, (key_1 + 0xBB67AE85) % 2**32
    return counter


def uniform_in_integers(seed: int, stream: int) -> float:
    seed, stream = seed % 2**64, stream % 2**64
    words = philox_in_integers((seed % 2**32, seed >> 32), (stream % 2**32, stream >> 32, 0, 0))
    return ((words[0] | words[1] << 32) >> 11) / 2**53


@pytest.mark.parametrize(
    ("key", "counter", "output"),
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES), (ONES, ONES, ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_published_known_answers(key: tuple[int, ...], counter: tuple[int, ...], output: tuple[int, ...]) -> None:
    assert tuple(philox4x32_10(torch.tensor(key), torch.tensor(counter)).tolist()) == output


def test_batches_equal_the_integer_reading_in_every_row() -> None:
    generator = torch.Generator().manual_seed(9)
    keys = torch.randint(0, 2**32, (50, 2), generator=generator)
    counters = torch.randint(0, 2**32, (50, 4), generator=generator)
    expected = [
        list(philox_in_integers(tuple(k), tuple(c))) for k, c in zip(keys.tolist(), counters.tolist(), strict=True)
    ]
    assert philox4x32_10(keys, counters).tolist() == expected


def test_words_count_modulo_two_to_the_32() -> None:
    wrapped = philox4x32_10(torch.tensor([-1, 2**32 + 5]), torch.tensor([-1, -(2**63), 2**32, 7]))
    assert tuple(wrapped.tolist()) == philox_in_integers((ONES, 5), (ONES, 0, 0, 7))


def test_leading_dimensions_broadcast() -> None:
    keys = torch.tensor([[1, 2], [3, 4]])
    counters = torch.tensor([5, 6, 7, 8])
    assert philox4x32_10(keys, counters).tolist() == [
        list(philox_in_integers((1, 2), (5, 6, 7, 8))),
        list(philox_in_integers((3, 4), (5, 6, 7, 8))),
    ]
    assert philox4x32_10(keys[:, None], counters.expand(3, 4)).shape == (2, 3, 4)
    assert uniform_53(torch.tensor([1, 2]).unsqueeze(-1), torch.arange(3)).shape == (2, 3)
    assert uniform_53(torch.tensor(1), torch.arange(3)).tolist() == [uniform_in_integers(1, s) for s in range(3)]
    assert uniform_53(torch.arange(3), torch.tensor(1)).tolist() == [uniform_in_integers(s, 1) for s in range(3)]


def test_uniform_takes_the_top_53_bits_of_the_first_two_words() -> None:
    result = uniform_53(torch.tensor([0]), torch.tensor([0]))
    assert result.dtype == torch.float64
    assert result.tolist() == [(0xE169C58D6627E8D5 >> 11) / 2**53]


def test_seeds_and_streams_count_modulo_two_to_the_64() -> None:
    edges = [0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), -5, 3 * 10**15]
    seeds = [seed for seed in edges for _ in edges]
    streams = edges * len(edges)
    expected = [uniform_in_integers(seed, stream) for seed, stream in zip(seeds, streams, strict=True)]
    assert uniform_53(torch.tensor(seeds), torch.tensor(streams)).tolist() == expected
    assert len(set(expected)) == len(expected)


def test_draws_do_not_depend_on_their_row_or_their_strides() -> None:
    seeds, streams = torch.arange(20), torch.arange(20) * 7
    draws = uniform_53(seeds, streams)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(10))
    assert torch.equal(uniform_53(seeds[order], streams[order]), draws[order])
    assert torch.equal(uniform_53(seeds[::3], streams[::3]), draws[::3])
    assert uniform_53(seeds[:0], streams[:0]).shape == (0,)


def test_draws_are_spread_over_the_unit_interval() -> None:
    draws = uniform_53(torch.full((20000,), 1234), torch.arange(20000))
    assert bool(((draws >= 0) & (draws < 1)).all())
    counts = torch.histc(draws, bins=20, min=0, max=1)
    # 1000 expected per bin with a deviation of 31; the draws are fixed, so this cannot flicker.
    assert bool(((counts - 1000).abs() < 150).all())


def test_the_inputs_are_left_alone() -> None:
    key, counter = torch.tensor([1, 2]), torch.tensor([3, 4, 5, 6])
    philox4x32_10(key, counter)
    assert (key.tolist(), counter.tolist()) == ([1, 2], [3, 4, 5, 6])


def test_all_wrong_arguments_are_named_at_once() -> None:
    with pytest.raises(ArgumentError, match=r"(?s)key is torch\.int32 \(2,\).*counter is torch\.int64 \(3,\)"):
        philox4x32_10(torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ArgumentError, match=r"(?s)seeds are torch\.float32.*streams are torch\.int32"):
        uniform_53(torch.zeros(2), torch.zeros(2, dtype=torch.int32))


def test_the_words_of_a_device_are_those_of_the_host() -> None:
    generator = torch.Generator().manual_seed(11)
    keys = torch.randint(-(2**63), 2**63 - 1, (5, 1, 2), generator=generator)
    counters = torch.randint(-(2**63), 2**63 - 1, (7, 4), generator=generator)
    assert torch.equal(_rounds_by_torch(keys, counters), philox4x32_10(keys, counters))
