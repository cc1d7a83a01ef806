"""Rows travel to the ranks that hold their experts, and outputs travel back, slot by slot.

One layer of one step is three exchanges of the expert group, on every rank and whether or not it has rows: how many
rows go where, the rows, the outputs. A row goes once to each rank that holds an expert of it, with all of its experts
there; nothing is dropped, and nothing is padded. Outputs come back one by one and are put at their place among the
row's k experts, so that the row's own rank adds them up in the order in which one rank would.

Legend: T rows, k experts per token, D hidden size, R ranks, n rows that arrive, p outputs, b bytes of a row,
E experts, C copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.accelerator import Collectives
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.experts import Routing
from deepinfer.accelerator.upload import on_device
from deepinfer.accelerator.weights import PreparedWeight
from deepinfer.parallel.placement import PlacementShape, ReplicaMaps
from deepinfer.parallel.ranks.reports import BalanceReport
from deepinfer.parallel.replicas import choose_slots, row_keys


class SpreadExperts:
    """The experts of a model, spread over the ranks of a group.

    Attributes:
        shape: how many slots there are on how many ranks.
        maps: which slots hold which expert, the same on every rank.
    """

    def __init__(self, group: Collectives, shape: PlacementShape, device: torch.device) -> None:
        """Place the experts as they are at start-up."""
        self.shape = shape
        self._group, self._device = group, device
        self._route_by(ReplicaMaps.of(shape.start_up_layout(), shape))

    def _route_by(self, maps: ReplicaMaps) -> None:
        self.maps = maps
        self._copies_LE = on_device(maps.copies_LE, self._device)
        self._slots_LEC = on_device(maps.slots_LEC.astype(np.int64), self._device)

    def held(self, layer: int) -> tuple[int, ...]:
        """Return the experts that this rank's slots of a layer hold, in the order of the slots."""
        first = self._group.rank * self.shape.slots_per_rank
        return tuple(self.maps.layout_LS[layer, first : first + self.shape.slots_per_rank].tolist())

    def hold(self, layer: int, experts: PreparedWeight) -> None:
        """Take note of what was prepared of :meth:`held`; here nobody moves it."""

    def begin_serving(self) -> None:
        """Take note that every step from now on is one of the group's; here nothing is counted."""

    def end_step(self) -> None:
        """Take note that a step of the group has passed all layers; here nothing ever moves."""

    def report(self) -> BalanceReport | None:
        """Return what balancing has done so far; None where experts stay where they are."""
        return None

    def row_keys(self, ids_T: torch.Tensor, position_T: torch.Tensor) -> torch.Tensor:
        """Return by what the rows of a step choose among the copies of an expert."""
        return row_keys(ids_T.to(torch.int64), position_T.to(torch.int64))

    def routed(
        self,
        layer: int,
        x_TD: torch.Tensor,
        routing: Routing,
        key_T: torch.Tensor,
        experts: PreparedWeight,
        ops: Ops,
    ) -> torch.Tensor:
        """Return slot outputs [T, k, D] as ``experts.routed`` does; every rank of the group calls it together.

        Args:
            layer: the layer.
            x_TD: this rank's rows, possibly none.
            routing: their experts, numbered as the model does.
            key_T: from :meth:`row_keys`.
            experts: what was prepared of :meth:`held`.
            ops: the plan's ops.
        """
        slots_Tk = choose_slots(routing.experts_Tk, key_T, self._copies_LE[layer], self._slots_LEC[layer])
        ways = _Ways.of(slots_Tk, self._group, self.shape.slots_per_rank)
        arrived = self._dispatch(x_TD, slots_Tk, routing.weights_Tk, ways)
        outputs_nkD = ops.experts.routed(arrived.x_nD, Routing(arrived.slots_nk, arrived.weights_nk), experts)
        return self._gather(outputs_nkD, arrived.slots_nk >= 0, ways, slots_Tk.shape[1])

    def _dispatch(self, x_TD: torch.Tensor, slots_Tk: torch.Tensor, weights_Tk: torch.Tensor, ways: _Ways) -> _Arrived:
        """Send rows, with their slots and weights in the same bytes."""
        per_rank = self.shape.slots_per_rank
        to_n, row_n = ways.to_n, ways.row_n
        slots_nk = slots_Tk.index_select(0, row_n)
        local_nk = torch.where(slots_nk // per_rank == to_n[:, None], slots_nk % per_rank, -1)
        fields = (x_TD.index_select(0, row_n), local_nk, weights_Tk.index_select(0, row_n))
        packed_nb = torch.cat([_bytes_of(field) for field in fields], dim=1)
        found_nb = self._group.all_to_all(packed_nb, ways.send_counts, ways.receive_counts)
        widths = [field.shape[1] * field.element_size() for field in fields]
        pieces = torch.split(found_nb, widths, dim=1)
        x_nD, found_nk, weights_nk = (
            piece.contiguous().view(field.dtype).view(-1, field.shape[1])
            for piece, field in zip(pieces, fields, strict=True)
        )
        return _Arrived(x_nD, found_nk, weights_nk)

    def _gather(self, outputs_nkD: torch.Tensor, is_due_nk: torch.Tensor, ways: _Ways, top_k: int) -> torch.Tensor:
        """Send the outputs back that were asked for, and put what comes back at its place."""
        due_n = is_due_nk.sum(dim=1)
        back_counts = [int(part_n.sum()) for part_n in torch.split(due_n, list(ways.receive_counts))]
        found_pD = self._group.all_to_all(outputs_nkD[is_due_nk], back_counts, ways.output_counts)
        slots_TkD = outputs_nkD.new_zeros((ways.rows, top_k, outputs_nkD.shape[2]))
        slots_TkD[ways.output_row_p, ways.output_place_p] = found_pD
        return slots_TkD


@dataclass(frozen=True, slots=True)
class _Arrived:
    """Rows at the rank of their experts: activations, own slots or -1, weights."""

    x_nD: torch.Tensor
    slots_nk: torch.Tensor
    weights_nk: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Ways:
    """Where the rows of one rank go in one layer.

    Attributes:
        rows: rows of the rank.
        to_n, row_n: each journey: the rank it leads to and the row that goes, ordered by both.
        send_counts, receive_counts: journeys to and from each rank.
        output_row_p, output_place_p: the row and the place among its experts of each output that comes back, ordered
            by the rank it comes from.
        output_counts: outputs from each rank.
    """

    rows: int
    to_n: torch.Tensor
    row_n: torch.Tensor
    send_counts: Sequence[int]
    receive_counts: Sequence[int]
    output_row_p: torch.Tensor
    output_place_p: torch.Tensor
    output_counts: Sequence[int]

    @classmethod
    def of(cls, slots_Tk: torch.Tensor, group: Collectives, per_rank: int) -> _Ways:
        """Derive them, and agree on the counts with the other ranks."""
        ranks_R11 = torch.arange(group.world_size, device=slots_Tk.device)[:, None, None]
        is_there_RTk = torch.div(slots_Tk, per_rank, rounding_mode="floor") == ranks_R11
        goes_RT = is_there_RTk.any(dim=2)
        to_n, row_n = goes_RT.nonzero(as_tuple=True)
        _, output_row_p, output_place_p = is_there_RTk.nonzero(as_tuple=True)
        send_R = goes_RT.sum(dim=1)
        counts_RR = group.all_gather(send_R)
        return cls(
            rows=slots_Tk.shape[0],
            to_n=to_n,
            row_n=row_n,
            send_counts=send_R.tolist(),
            receive_counts=counts_RR[:, group.rank].tolist(),
            output_row_p=output_row_p,
            output_place_p=output_place_p,
            output_counts=is_there_RTk.sum(dim=(1, 2)).tolist(),
        )


def _bytes_of(field_nw: torch.Tensor) -> torch.Tensor:
    rows = field_nw.shape[0]
    return field_nw.contiguous().view(torch.uint8).view(rows, field_nw.shape[1] * field_nw.element_size())
