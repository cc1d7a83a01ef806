"""Wrong types of the public calls are named, all of them, and nothing odd is read as something else."""

from __future__ import annotations

import pytest

from deepinfer import LLM
from deepinfer.engine.admission import read_mask


def test_wrong_types_of_model_and_accelerator_are_named_together() -> None:
    with pytest.raises(TypeError, match=r"model is of type int.*accelerator is of type float"):
        LLM(model=5, accelerator=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("mask", [5, "ab", b"ab", [True, "x"], [2, 0], [None]])
def test_what_is_no_mask_is_refused(mask: object) -> None:
    with pytest.raises(TypeError, match="image_mask"):
        read_mask(mask)


def test_a_mask_may_be_written_in_zeros_and_ones() -> None:
    assert read_mask([1, 0, True]) == (True, False, True)
