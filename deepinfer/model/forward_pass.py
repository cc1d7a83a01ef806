"""What the layers of one forward pass share: ops, tables, caches, addresses, and the picks that layers hand on.

Legend: T rows, K selected entries, B candidate blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import EntryCache, IndexCache, PendingCache, WindowCache
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.norm import RotaryTable
from deepinfer.accelerator.ops.selection import Selection
from deepinfer.model.config import ModelConfig
from deepinfer.model.context import ContextShare
from deepinfer.model.roles import LayerRole
from deepinfer.model.rotary import RotaryTables


class LayerCaches(Protocol):
    """The typed cache views of every layer; the engine's pools have this shape."""

    def window(self, layer: int) -> WindowCache:
        """Return the window ring of a layer."""

    def entries(self, owner: int) -> EntryCache:
        """Return the main records of an owner layer."""

    def index_keys(self, owner: int) -> IndexCache:
        """Return the index keys of an owner layer."""

    def pending(self, owner: int) -> PendingCache:
        """Return the pending rows of an owner layer with a ratio above one."""


@dataclass(frozen=True, slots=True)
class EntryPlaces:
    """Where the rows of a step put their long-range entries, for one ratio.

    Attributes:
        slot_T: flat entry slot of the entry that the row completes, -1 if it completes none.
        position_T: position of the first token of the entry's group: the one by which the entry is rotated.
    """

    slot_T: Tensor
    position_T: Tensor


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One pass over one step. Only ``picks`` changes while the layers run.

    Attributes:
        config: the model.
        ops: the plan's ops.
        rotary: both rotary tables.
        step: the ragged layout.
        caches: views of every layer.
        window_slot_T: flat window slot of each row, -1 where the row is not kept.
        entry_places: addresses per compress ratio.
        picks: what the indexer layers have published so far, by layer.
        stored_owner: the owner layer whose entries of this step were stored ahead of its attention, or None.
        row_key_T: by what rows choose among the copies of an expert; None where all experts are here.
        shared: the whole step and this rank's share of it, where other ranks compute some of its rows; else None.
    """

    config: ModelConfig
    ops: Ops
    rotary: RotaryTables
    step: StepLayout
    caches: LayerCaches
    window_slot_T: Tensor
    entry_places: dict[int, EntryPlaces]
    picks: dict[int, Selection] = field(default_factory=dict)
    stored_owner: int | None = None
    row_key_T: Tensor | None = None
    shared: SharedPass | None = None

    @classmethod
    def begin(
        cls,
        config: ModelConfig,
        ops: Ops,
        rotary: RotaryTables,
        step: StepLayout,
        caches: LayerCaches,
        row_key_T: Tensor | None = None,
    ) -> ForwardPass:
        """Derive the addresses that all layers share, once a step."""
        ratios = sorted({ratio for ratio in config.compress_ratios if ratio})
        places = {
            ratio: EntryPlaces(ops.plumbing.entry_slots(step, ratio), step.position_T // ratio * ratio)
            for ratio in ratios
        }
        slots_T = ops.plumbing.window_slots(step)
        return cls(config, ops, rotary, step, caches, slots_T, places, row_key_T=row_key_T)

    def shared_out(self, whole: StepLayout, share: ContextShare) -> ForwardPass:
        """Return this pass over a rank's share of a step as one whose caches are to hold the whole step."""
        everything = ForwardPass.begin(self.config, self.ops, self.rotary, whole, self.caches)
        return replace(self, shared=SharedPass(share, everything))

    def table(self, role: LayerRole) -> RotaryTable:
        """Return the rotary table of a layer."""
        return self.rotary.of(role.rope)

    def rms(self, x_TD: Tensor, weight_D: Tensor) -> Tensor:
        """Normalise with the model's own epsilon."""
        return self.ops.norm.rms(x_TD, weight_D, self.config.rms_norm_eps)


@dataclass(frozen=True, slots=True)
class SharedPass:
    """Where the rows of a pass belong.

    Attributes:
        share: this rank's rows, and the way to the others'.
        whole: a pass over all rows of the step; it stores, and runs no layer.
    """

    share: ContextShare
    whole: ForwardPass
