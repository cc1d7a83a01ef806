"""Random streams and seeds."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from deepinfer.numerics import uniform_53
from deepinfer.sampling import DrawCase, Keying, original_stream, random_seed, sibling_seed, stream
from deepinfer.sampling.streams import streams


def test_the_original_keying_gives_the_published_stream() -> None:
    assert original_stream(16_389) == 49_167
    assert original_stream(16_390, DrawCase.ACCEPT) == 49_172


def test_the_original_keying_has_no_draft_case() -> None:
    with pytest.raises(ValueError, match="ORIGINAL_DRAFT_SEED_OFFSET"):
        original_stream(1, DrawCase.DRAFT)


def test_a_stream_is_four_times_the_index_plus_the_case() -> None:
    assert [stream(16_389, case) for case in DrawCase] == [65_556, 65_557, 65_558, 65_559]
    assert stream(0) == 0


def test_two_draws_share_a_stream_only_for_the_same_token_and_case() -> None:
    found = {stream(index, case) for index in range(1000) for case in DrawCase}
    assert len(found) == 4000


@pytest.mark.parametrize("keying", Keying)
def test_many_streams_are_the_single_ones(keying: Keying) -> None:
    one = {Keying.INDEX: stream, Keying.ORIGINAL: original_stream}[keying]
    indices = np.array([0, 1, 16_389, 2**40])
    assert streams(indices, DrawCase.ACCEPT, keying).tolist() == [one(int(i), DrawCase.ACCEPT) for i in indices]


def test_the_first_sibling_keeps_the_seed_and_the_others_have_their_own() -> None:
    seeds = [sibling_seed(1, sibling) for sibling in range(1000)]
    assert seeds[0] == 1
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_siblings_of_neighbouring_seeds_do_not_meet() -> None:
    seeds = {sibling_seed(seed, sibling) for seed in range(-50, 50) for sibling in range(50)}
    assert len(seeds) == 5000


def test_sibling_seeds_never_change() -> None:
    # Users store seeds: these values are part of the interface. SplitMix64 of state 0x9E37... is a published vector.
    assert sibling_seed(0, 1) == 0xE220A8397B1DCDAF >> 1
    assert sibling_seed(0, 2) == 0x6E789E6AA1B965F4 >> 1


def test_random_seeds_come_from_the_given_generator_and_differ() -> None:
    generator = random.Random(5)
    seeds = [random_seed(generator) for _ in range(100)]
    assert len(set(seeds)) == 100
    again = random.Random(5)
    assert [random_seed(again) for _ in range(100)] == seeds
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_draws_of_siblings_are_unrelated() -> None:
    seeds = torch.tensor([sibling_seed(7, sibling) for sibling in range(4)]).repeat_interleave(20_000)
    counters = torch.arange(20_000).repeat(4) * 4
    draws = uniform_53(seeds, counters).view(4, -1)
    correlation = torch.corrcoef(draws) - torch.eye(4)
    assert correlation.abs().max() < 0.03
