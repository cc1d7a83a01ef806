"""Where experts live: physical slots, the start-up layout, and the maps that the router's answers go through.

Legend: L layers, E experts, R ranks, S slots of all ranks, K slots of one rank, C copies. Slot s is on rank s // K.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import ArgumentError

Layout = NDArray[np.int32]
"""int32 [L, S]: the expert that each slot of each layer holds."""

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class PlacementShape:
    """How many slots there are, and on how many ranks.

    Attributes:
        layers: layers that have routed experts.
        experts: logical experts of a layer.
        ranks: ranks of the expert-parallel group.
        redundant: slots asked for beyond one per expert; rounded up so that every rank has equally many slots.
    """

    layers: int
    experts: int
    ranks: int
    redundant: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that are none, all at once."""
        least = {"layers": 1, "experts": 1, "ranks": 1, "redundant": 0}
        problems = [
            f"{name} must be at least {bound}, got {getattr(self, name)}"
            for name, bound in least.items()
            if getattr(self, name) < bound
        ]
        if problems:
            raise ArgumentError("expert placement", problems)

    @property
    def slots(self) -> int:
        """Slots of all ranks: experts and redundant ones, rounded up to a multiple of the ranks."""
        return self.ranks * self.slots_per_rank

    @property
    def slots_per_rank(self) -> int:
        """Slots of one rank."""
        return -(-(self.experts + self.redundant) // self.ranks)

    def start_up_layout(self) -> Layout:
        """Return the layout before any load is known: all experts, then copies of experts 0, 1, 2, ... in turn."""
        one_layer_S = (np.arange(self.slots) % self.experts).astype(np.int32)
        return np.tile(one_layer_S, (self.layers, 1))

    def check(self, layout_LS: Layout) -> None:
        """Raise ArgumentError, naming everything that is wrong, unless ``layout_LS`` is a layout of this shape."""
        problems = []
        if layout_LS.dtype != np.int32:
            problems.append(f"dtype is {layout_LS.dtype}; give int32")
        if layout_LS.shape != (self.layers, self.slots):
            problems.append(f"shape is {layout_LS.shape}; {self.layers} layers x {self.slots} slots are wanted")
        if problems:
            raise ArgumentError("layout", problems)
        for layer, slots in enumerate(layout_LS.tolist()):
            unknown = sorted({expert for expert in slots if not 0 <= expert < self.experts})
            missing = sorted(set(range(self.experts)) - set(slots))
            if unknown:
                problems.append(f"layer {layer} holds unknown experts {unknown}; they count 0 to {self.experts - 1}")
            if missing:
                problems.append(f"layer {layer} has no slot for experts {missing}; each needs one at least")
        if problems:
            raise ArgumentError("layout", problems)


def copies_of(layout_LS: Layout, experts: int) -> NDArray[np.int64]:
    """Return how many slots hold each expert, [L, E]."""
    layers = layout_LS.shape[0]
    keys = layout_LS.astype(np.int64) + experts * np.arange(layers)[:, None]
    return np.bincount(keys.ravel(), minlength=layers * experts).reshape(layers, experts)


@dataclass(frozen=True)
class ReplicaMaps:
    """Logical to physical and back, for one layout; every rank holds the same.

    Attributes:
        layout_LS: the expert of each slot.
        copies_LE: slots of each expert, 1 at least.
        slots_LEC: these slots, ascending; NO_SLOT after the last.
    """

    layout_LS: Layout
    copies_LE: NDArray[np.int64]
    slots_LEC: NDArray[np.int32]

    @classmethod
    def of(cls, layout_LS: Layout, shape: PlacementShape) -> ReplicaMaps:
        """Return the maps of a layout; raises ArgumentError if it is none of ``shape``."""
        shape.check(layout_LS)
        copies_LE = copies_of(layout_LS, shape.experts)
        most = int(copies_LE.max())
        slots_LEC = np.full((shape.layers, shape.experts, most), NO_SLOT, dtype=np.int32)
        order_LS = np.argsort(layout_LS, axis=1, kind="stable")
        experts_LS = np.take_along_axis(layout_LS, order_LS, axis=1)
        first_LE = np.cumsum(copies_LE, axis=1) - copies_LE
        copy_LS = np.arange(shape.slots) - np.take_along_axis(first_LE, experts_LS.astype(np.int64), axis=1)
        layer_LS = np.broadcast_to(np.arange(shape.layers)[:, None], order_LS.shape)
        slots_LEC[layer_LS, experts_LS, copy_LS] = order_LS
        return cls(layout_LS, copies_LE, slots_LEC)

    @cached_property
    def most_copies(self) -> int:
        """Copies of the expert that has the most."""
        return int(self.slots_LEC.shape[2])
