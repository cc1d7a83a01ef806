"""Rotary tables: the one form of the formula, in float32, on the host."""

from dataclasses import replace

import pytest
import torch

from deepinfer.errors import ArgumentError
from deepinfer.model.presets import preset
from deepinfer.model.rotary import plain_frequencies, rotary_tables, yarn_frequencies


@pytest.mark.parametrize("name", ["v41-flash", "tiny8", "tiny6-wide", "mini276"])
def test_plain_frequencies_have_the_bits_of_the_float32_formula(name: str) -> None:
    config = preset(name)
    width = config.qk_rope_head_dim
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    assert torch.equal(plain_frequencies(config), 1.0 / (config.rope_theta**exponents))


def test_released_yarn_keeps_pairs_to_15_and_divides_pairs_from_25_by_16() -> None:
    config = preset("v41-flash")
    exponents = torch.arange(0, 64, 2, dtype=torch.float32) / 64
    unscaled = 1.0 / (config.compress_rope_theta**exponents)
    frequencies = yarn_frequencies(config)
    assert torch.equal(frequencies[:16], unscaled[:16])
    assert torch.equal(frequencies[25:], unscaled[25:] / 16)
    ramp = frequencies[16:25] / unscaled[16:25]
    expected = torch.tensor([1 - step / 10 * (1 - 1 / 16) for step in range(1, 10)])
    torch.testing.assert_close(ramp, expected, rtol=1e-6, atol=0)


def test_yarn_ramp_survives_bounds_on_one_pair() -> None:
    config = preset("tiny8")
    # A context of two tokens puts both bounds on or below pair 0.
    scaling = replace(config.rope_scaling, original_max_position_embeddings=2)
    changed = replace(config, rope_scaling=scaling)
    assert torch.isfinite(yarn_frequencies(changed)).all()


def test_tables_are_cosine_and_sine_of_the_float32_angle() -> None:
    config = preset("tiny8")
    tables = rotary_tables(config, 300)
    for table, frequencies in ((tables.plain, plain_frequencies(config)), (tables.yarn, yarn_frequencies(config))):
        angles = torch.arange(300, dtype=torch.float32)[:, None] * frequencies
        assert table.cos_PR.dtype == torch.float32
        assert table.cos_PR.shape == (300, config.qk_rope_head_dim // 2)
        assert table.rotary_width == config.qk_rope_head_dim
        torch.testing.assert_close(table.cos_PR.double(), angles.double().cos(), rtol=0, atol=7e-8)
        torch.testing.assert_close(table.sin_PR.double(), angles.double().sin(), rtol=0, atol=7e-8)


def test_a_table_does_not_depend_on_its_length() -> None:
    config = preset("tiny8")
    short, long = rotary_tables(config, 7), rotary_tables(config, 100)
    assert torch.equal(short.yarn.cos_PR, long.yarn.cos_PR[:7])
    assert torch.equal(short.plain.sin_PR, long.plain.sin_PR[:7])


def test_each_kind_of_layer_has_its_table() -> None:
    tables = rotary_tables(preset("tiny8"), 4)
    assert tables.of("plain") is tables.plain
    assert tables.of("yarn") is tables.yarn
    assert not torch.equal(tables.plain.cos_PR, tables.yarn.cos_PR)


@pytest.mark.parametrize("positions", [0, -1, 2**24 + 1])
def test_an_impossible_number_of_positions_is_refused(positions: int) -> None:
    with pytest.raises(ArgumentError, match="positions"):
        rotary_tables(preset("tiny8"), positions)
