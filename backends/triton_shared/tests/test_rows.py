"""Rows that a kernel would read in another way are copied first; all others are passed as they are."""

from __future__ import annotations

import pytest
import torch

from deepinfer_triton.rows import aligned, alignment_of, as_words, consecutive


def test_aligned_rows_are_not_copied() -> None:
    pool = torch.zeros(6, 128)
    for view in (pool, pool[2:], pool[:, 64:], pool[::2], pool[:, :64]):
        assert aligned(view).data_ptr() == view.data_ptr()


@pytest.mark.parametrize(
    "view",
    [
        torch.zeros(4, 70)[:, 3:67],
        torch.zeros(4, 65)[:, :64],
        torch.zeros(64, 4).T,
        torch.zeros(4, 2, 65)[..., :64],
    ],
    ids=["offset", "pitch", "column-major", "inner pitch"],
)
def test_rows_from_other_addresses_are_copied(view: torch.Tensor) -> None:
    copy = aligned(view)
    assert copy.is_contiguous()
    assert copy.data_ptr() != view.data_ptr()
    assert torch.equal(copy, view)


def test_one_row_may_have_any_pitch() -> None:
    row = torch.zeros(4, 65)[:1, :64]
    assert aligned(row).data_ptr() == row.data_ptr()


def test_alignment_depends_on_width_and_dtype_alone() -> None:
    assert [alignment_of(width, torch.float32) for width in (7, 6, 12, 64)] == [1, 2, 4, 4]
    assert alignment_of(5120, torch.bfloat16) == 8


@pytest.mark.parametrize(("width", "offset", "size"), [(528, 0, 4), (66, 0, 2), (67, 0, 1), (64, 2, 2), (64, 1, 1)])
def test_bytes_become_the_largest_words_that_fit_every_place(width: int, offset: int, size: int) -> None:
    pool = torch.arange(3 * 1024, dtype=torch.int64).to(torch.uint8).view(3, 1024)[:, offset : offset + width]
    words = as_words(pool, torch.zeros(2, width, dtype=torch.uint8))
    assert words.width * size == width
    assert all(view.dtype.itemsize == size for view in words.views)
    assert torch.equal(words.views[0].contiguous().view(torch.uint8), pool)


def test_flags_are_passed_as_bytes() -> None:
    assert consecutive(torch.tensor([True, False])).tolist() == [1, 0]
