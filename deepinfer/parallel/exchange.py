"""What a change of layout moves: which slot is filled from which, and what every rank sends and receives, in order.

Legend: L layers, S slots of all ranks, M moves, R ranks. Slot s is on rank s // (S / R).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import ArgumentError
from deepinfer.parallel.placement import Layout

Value = TypeVar("Value", bound=np.generic)


class SlotMove(NamedTuple):
    """One slot to fill with what another held before the change."""

    layer: int
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One tensor of an expert, of equal size in every slot: packed weights, or their scales.

    Attributes:
        name: what it is called in the expert.
        nbytes: bytes of one slot.
    """

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class RankExchange:
    """One rank's side; whoever follows the three tuples in order meets every other rank in the same order.

    Attributes:
        copies: moves inside the rank.
        sends: moves whose source is here.
        receives: moves whose destination is here.
    """

    copies: tuple[SlotMove, ...]
    sends: tuple[SlotMove, ...]
    receives: tuple[SlotMove, ...]

    def of_layer(self, layer: int) -> RankExchange:
        """Return what concerns one layer."""
        sides = (self.copies, self.sends, self.receives)
        return RankExchange(*(tuple(move for move in side if move.layer == layer) for side in sides))


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """All moves of a change, in order of layer and destination.

    Every part of an expert moves with it. Sources are read as they were before the change: a receiver keeps what
    arrives beside the slot until all sends of the layer are done, and the maps switch in the step that follows.

    Attributes:
        ranks: ranks of the group.
        slots_per_rank: slots of one rank.
        parts: what an expert consists of.
        moves: slots to fill.
    """

    ranks: int
    slots_per_rank: int
    parts: tuple[ExpertPart, ...]
    moves: tuple[SlotMove, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one expert with all its parts."""
        return sum(part.nbytes for part in self.parts)

    @property
    def crossing(self) -> tuple[SlotMove, ...]:
        """The moves from one rank to another."""
        return tuple(move for move in self.moves if self._rank(move.source) != self._rank(move.destination))

    @property
    def nbytes(self) -> int:
        """Bytes that go from one rank to another."""
        return len(self.crossing) * self.slot_bytes

    def for_rank(self, rank: int) -> RankExchange:
        """Return what one rank does."""
        if not 0 <= rank < self.ranks:
            raise ArgumentError("exchange", [f"rank {rank}: a group of {self.ranks} has ranks 0 to {self.ranks - 1}"])
        here = [(self._rank(move.source) == rank, self._rank(move.destination) == rank) for move in self.moves]
        moves = list(zip(self.moves, here, strict=True))
        return RankExchange(
            copies=tuple(move for move, sides in moves if sides == (True, True)),
            sends=tuple(move for move, sides in moves if sides == (True, False)),
            receives=tuple(move for move, sides in moves if sides == (False, True)),
        )

    def _rank(self, slot: int) -> int:
        return slot // self.slots_per_rank


def plan_exchange(old_LS: Layout, new_LS: Layout, ranks: int, parts: tuple[ExpertPart, ...]) -> ExchangePlan:
    """Return how to get from one layout to another.

    An expert comes from the own rank where that holds it, else from the rank that sends least so far, and there from
    the lowest slot.
    """
    problems = []
    if old_LS.shape != new_LS.shape or old_LS.ndim != 2:
        problems.append(f"layouts of shapes {old_LS.shape} and {new_LS.shape}; give two of one shape [layers, slots]")
    elif ranks < 1 or old_LS.shape[1] % ranks:
        problems.append(f"{old_LS.shape[1]} slots do not spread evenly over {ranks} ranks")
    problems += [f"part {part.name!r} has {part.nbytes} bytes" for part in parts if part.nbytes < 1]
    if problems:
        raise ArgumentError("exchange", problems)
    slots_per_rank = old_LS.shape[1] // ranks
    moves = []
    sent_R = [0] * ranks
    for layer in np.flatnonzero((old_LS != new_LS).any(axis=1)).tolist():
        holders: dict[int, list[int]] = {}
        for slot, expert in enumerate(old_LS[layer].tolist()):
            holders.setdefault(expert, []).append(slot)
        for destination in np.flatnonzero(old_LS[layer] != new_LS[layer]).tolist():
            expert = int(new_LS[layer, destination])
            if expert not in holders:
                raise ArgumentError("exchange", [f"no slot of layer {layer} holds expert {expert} before the change"])
            rank = destination // slots_per_rank
            candidates = [(slot // slots_per_rank, slot) for slot in holders[expert]]
            _, _, source = min((of != rank, sent_R[of], slot) for of, slot in candidates)
            sent_R[source // slots_per_rank] += source // slots_per_rank != rank
            moves.append(SlotMove(layer, source, destination))
    return ExchangePlan(ranks, slots_per_rank, parts, tuple(moves))


def exchanged(values_LS: NDArray[Value], plan: ExchangePlan) -> NDArray[Value]:
    """Return what the slots hold after the exchange: the meaning of a plan, for one process that sees all slots."""
    after_LS = values_LS.copy()
    for move in plan.moves:
        after_LS[move.layer, move.destination] = values_LS[move.layer, move.source]
    return after_LS
