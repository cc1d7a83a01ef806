"""Step plumbing: addresses derived from positions and block tables, on the device.

Legend: T rows.
"""

from __future__ import annotations

import torch

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.ops.base import OpGroup, not_implemented, op


class PlumbingOps(OpGroup):
    """Integer arithmetic in 64 bits; exact."""

    group = "plumbing"

    @op
    def window_slots(self, step: StepLayout) -> torch.Tensor:
        """Return int64 [T]: ``z * ring + p % ring``; -1 for invalid rows and for rows that the chunk itself overwrites.

        Only the last ``ring`` rows of a request's chunk are stored.
        """
        not_implemented(self, "window_slots")

    @op
    def entry_slots(self, step: StepLayout, ratio: int) -> torch.Tensor:
        """Return int64 [T]: flat slot of the entry that the row completes, -1 if it completes none or is invalid.

        Row p completes entry ``e = p // ratio`` when ``(p + 1) % ratio == 0``; with ``n = block_size // ratio``
        entries per block its slot is ``table[e // n] * n + e % n``.
        """
        not_implemented(self, "entry_slots")
