"""Chips are known by the names that the runtime gives them."""

from __future__ import annotations

import pytest

from deepinfer_ascend.soc import CORES, DEFAULT_NAMES, detect, supported_families


@pytest.mark.parametrize(
    ("name", "family", "has_mx"),
    [
        ("Ascend950PR_9599", "950PR", True),
        ("Ascend950DT_9591", "950DT", True),
        ("Ascend950DT_95xx", "950DT", True),
        ("Ascend910B3", "910B", False),
        ("Ascend910_9392", "910_93", False),
    ],
)
def test_family_and_matrix_unit_follow_from_the_name(name, family, has_mx):
    chip = detect(name)
    assert chip is not None
    assert (chip.name, chip.family, chip.has_mx) == (name, family, has_mx)
    assert chip.has_hyper_connections == has_mx


@pytest.mark.parametrize("name", ["", "Ascend310P3", "Ascend910A", "NVIDIA H200"])
def test_other_names_are_no_chip_of_this_driver(name):
    assert detect(name) is None


def test_a_950_has_the_memories_that_kernels_are_written_for():
    chip = detect("Ascend950PR_9599")
    assert chip is not None
    # The compiler's own limit is 2,031,616 bits of unified buffer.
    assert chip.unified_buffer_bytes * 8 == 2_031_616
    assert (chip.l1_bytes, chip.block_align_bytes) == (512 * 1024, 32)
    assert chip.vector_cores == 2 * chip.cube_cores == 72


def test_every_family_has_a_default_name_and_known_cores_are_one_to_two():
    assert [detect(name).family for name in DEFAULT_NAMES] == list(supported_families())
    assert all(vector == 2 * cube for cube, vector in CORES.values())
