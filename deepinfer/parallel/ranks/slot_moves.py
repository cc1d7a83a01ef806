"""Prepared experts travel from slot to slot, over the group's own exchanges.

A part is one tensor of an expert: packed weights of one matrix, or their scales. Parts go one after the other, each in
one exchange of the group, so that no rank holds more beside its experts than what moves of one part of one layer.

Legend: n rows that are sent, b bytes of a part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer.accelerator import Collectives, ExpertSlot
from deepinfer.parallel.exchange import RankExchange, SlotMove


def form_of(slot: ExpertSlot) -> str:
    """Return what must be equal of two slots that hold each other's experts."""
    parts = [f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in slot.tensors]
    return ", ".join([slot.form, *parts])


def slot_bytes(slot: ExpertSlot) -> int:
    """Return the bytes of one expert with all its parts."""
    return sum(tensor.numel() * tensor.element_size() for tensor in slot.tensors)


def exchange_layer(
    slots: Sequence[ExpertSlot],
    exchange: RankExchange,
    group: Collectives,
    slots_per_rank: int,
    device: torch.device,
) -> None:
    """Carry out this rank's side of one layer's moves; every rank of the group calls it together.

    Args:
        slots: this rank's, all of one form, which is that of the other ranks.
        exchange: what it copies, sends and receives.
        group: the ranks that hold the layer's experts together.
        slots_per_rank: slots of each of them.
        device: where the group's exchanges take place.
    """

    def towards(move: SlotMove) -> int:
        return move.destination // slots_per_rank

    def origin(move: SlotMove) -> int:
        return move.source // slots_per_rank

    # Stable: moves between two ranks stay in the plan's order on both.
    sends = sorted(exchange.sends, key=towards)
    receives = sorted(exchange.receives, key=origin)
    send_counts = [sum(towards(move) == rank for move in sends) for rank in range(group.world_size)]
    receive_counts = [sum(origin(move) == rank for move in receives) for rank in range(group.world_size)]
    for part in range(len(slots[0].tensors)):
        held = [slot.tensors[part] for slot in slots]
        # Everything that leaves a slot is read before anything is written.
        staying = [held[move.source % slots_per_rank].clone() for move in exchange.copies]
        sent_nb = held[0].new_empty((len(sends), _nbytes(held[0])), dtype=torch.uint8, device=device)
        for row_b, move in zip(sent_nb, sends, strict=True):
            row_b.copy_(_bytes_of(held[move.source % slots_per_rank]))
        found_nb = group.all_to_all(sent_nb, send_counts, receive_counts)
        for move, tensor in zip(exchange.copies, staying, strict=True):
            held[move.destination % slots_per_rank].copy_(tensor)
        for move, row_b in zip(receives, found_nb, strict=True):
            _bytes_of(held[move.destination % slots_per_rank]).copy_(row_b)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view: ``view`` refuses what is not contiguous, where a copy would swallow what is written."""
    return tensor.view(-1).view(torch.uint8)
