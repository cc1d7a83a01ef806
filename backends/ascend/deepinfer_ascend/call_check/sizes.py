"""The two sets of shapes of the call check: the released model's, and the small test model's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True)
class Sizes:
    """Dimensions of one model.

    Attributes:
        name: "production" or "small".
        rows: T.
        hidden: D.
        heads: H.
        head_width: C.
        rotary: rotated channels.
        lora: width of the query's latent.
        groups: groups of the output projection.
        group_out: out features of a group.
        experts: E.
        top_k: k.
        intermediate: I.
        streams: S.
        ring: window ring.
        slots: state slots.
        vocabulary: V.
    """

    name: str
    rows: int
    hidden: int
    heads: int
    head_width: int
    rotary: int
    lora: int
    groups: int
    group_out: int
    experts: int
    top_k: int
    intermediate: int
    streams: int
    ring: int
    slots: int
    vocabulary: int

    @property
    def group_in(self) -> int:
        """In features of a group of the output projection."""
        return self.heads * self.head_width // self.groups

    def with_experts(self, experts: int) -> Sizes:
        """Return the same with another number of experts."""
        return replace(self, experts=experts)


PRODUCTION: Final = Sizes(
    name="production",
    rows=24,
    hidden=5120,
    heads=64,
    head_width=512,
    rotary=64,
    lora=1280,
    groups=8,
    group_out=1024,
    experts=384,
    top_k=6,
    intermediate=2304,
    streams=4,
    ring=134,
    slots=8,
    vocabulary=129280,
)
SMALL: Final = Sizes(
    name="small",
    rows=3,
    hidden=128,
    heads=4,
    head_width=64,
    rotary=32,
    lora=64,
    groups=2,
    group_out=32,
    experts=8,
    top_k=2,
    intermediate=64,
    streams=4,
    ring=12,
    slots=3,
    vocabulary=512,
)
