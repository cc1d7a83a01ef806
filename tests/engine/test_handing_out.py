"""Rows that the device hands out anew: each is somebody's, the newest tokens keep theirs, and nothing is read."""

from __future__ import annotations

import pytest
import torch

from deepinfer.accelerator import StepLayout
from deepinfer.engine.handing_out import hand_out, with_drafts
from deepinfer.engine.step_inputs import StepInputs

CHANCES_Rn = torch.tensor([[0.9, 0.8, 0.7], [0.6, 0.1, 0.0], [0.95, 0.2, 0.1]])


@pytest.mark.parametrize(
    ("room_R", "total", "drafts_R"),
    [
        ([3, 3, 3], 4, [3, 0, 1]),
        ([1, 3, 3], 4, [1, 1, 2]),
        ([0, 3, 0], 2, [0, 2, 0]),
        ([3, 3, 3], 9, [3, 3, 3]),
        ([3, 3, 3], 0, [0, 0, 0]),
    ],
)
def test_rows_go_to_the_best_chances_that_have_room(room_R: list[int], total: int, drafts_R: list[int]) -> None:
    assert hand_out(CHANCES_Rn, torch.tensor(room_R), total).tolist() == drafts_R


def test_rows_without_room_are_somebodys_all_the_same() -> None:
    """A step cannot have fewer rows than were planned."""
    drafts_R = hand_out(CHANCES_Rn, torch.tensor([0, 1, 0]), 5)
    assert int(drafts_R.sum()) == 5
    assert int(drafts_R[1]) >= 1


def test_nothing_is_read_on_the_host() -> None:
    """A tensor on the meta device has no values that anybody could read."""
    counts_R = hand_out(torch.zeros(4, 3, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta"), 7)
    assert with_drafts(planned([1, 3, 2, 5], device="meta"), counts_R, 3).layout.rows == 11


def planned(rows_R: list[int], device: str = "cpu") -> StepInputs:
    """A decode step as the host plans it: request r's newest token is 100 + r, its drafts are not known."""
    rows_R_ = torch.tensor(rows_R)
    starts_R1 = torch.cat([torch.zeros(1, dtype=torch.int64), rows_R_.cumsum(0)])
    request_T = torch.repeat_interleave(torch.arange(len(rows_R)), rows_R_)
    place_T = torch.arange(len(request_T)) - starts_R1[request_T]
    cached_R = 10 * torch.arange(len(rows_R))
    layout = StepLayout(
        kind="decode",
        block_size=4,
        ring=8,
        row_starts_R1=starts_R1.to(device),
        cached_R=cached_R.to(device),
        state_slots_R=torch.arange(1, len(rows_R) + 1).to(device),
        block_table_RB=torch.zeros(len(rows_R), 1, dtype=torch.int64).to(device),
        request_T=request_T.to(device),
        position_T=(cached_R[request_T] + place_T).to(device),
        window_start_R=torch.zeros_like(cached_R).to(device),
        image_T=torch.zeros(len(request_T), dtype=torch.bool).to(device),
        valid_T=torch.ones(len(request_T), dtype=torch.bool).to(device),
        max_position=60,
        max_rows=max(rows_R),
    )
    ids_T = torch.where(place_T == 0, 100 + request_T, -1).to(device)
    history_RG = torch.full((len(rows_R), 2), 7).to(device)
    return StepInputs(ids_T, history_RG, layout, (starts_R1[1:] - 1).to(device))


def test_a_step_with_its_rows_handed_out_is_the_step_that_would_have_been_planned_so() -> None:
    found = with_drafts(planned([1, 3, 2, 4]), torch.tensor([2, 0, 3, 1]), 3)
    expected = planned([3, 1, 4, 2])
    for name in ("ids_T", "history_RG", "last_row_R"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for name in StepLayout.__dataclass_fields__:
        value, wanted = getattr(found.layout, name), getattr(expected.layout, name)
        assert torch.equal(value, wanted) if isinstance(value, torch.Tensor) else value == wanted, name
