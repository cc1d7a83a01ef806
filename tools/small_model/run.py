"""What the layers of one training pass share: shapes, tables, and what owners and pickers hand on.

Legend: B sequences, T positions, H heads, W window, N entries, K selected entries, C head width, I index width.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer.model import ModelConfig
from deepinfer.model.rotary import rotary_tables

from .codecs import Codecs
from .operators import Rotation
from .parameters import Weights

HIDDEN_SCORE = -1e30
"""Score of what a row may not see: finite, so that a row that sees nothing stays a number."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a pass is run.

    Attributes:
        codecs: which served formats are simulated.
        attend_all: every visible entry is attended to, not the picks alone; the indexer then learns from all.
        explore: random visible entries attended to beside the picks.
        index_loss: also compute how far the index scores are from the attention's own masses.
        coaching: weight of the training aids (coaching.py); what they read is kept only where it is not zero.
        long_range: False runs without the compressed entries: the control.
        dense_entries: up to so many entries, picks are a mask over all entries; above they are gathered.
    """

    codecs: Codecs = field(default_factory=Codecs)
    attend_all: bool = False
    explore: int = 0
    index_loss: bool = False
    coaching: float = 0.0
    long_range: bool = True
    dense_entries: int = 320


@dataclass(frozen=True, slots=True)
class Picks:
    """What a layer's rows attend to among an owner's entries.

    Attributes:
        allowed: bool [B, T, N] over all entries, or [B, T, K] over the gathered ones.
        index_BTK: which entries were gathered; None where ``allowed`` covers all.
        gathered_BTKC: their values.
        scores: float32 index scores in the shape of ``allowed``, with a gradient; None unless they are learned.
        candidates_BTN: bool, the entries inside the published candidate blocks; None unless published.
    """

    allowed: Tensor
    index_BTK: Tensor | None
    gathered_BTKC: Tensor | None
    scores: Tensor | None
    candidates_BTN: Tensor | None


@dataclass(frozen=True, slots=True)
class Entries:
    """An owner's long-range entries [B, N, C] and index keys [B, N, I], and how many every position sees [T]."""

    value_BNC: Tensor
    key_BNI: Tensor
    visible_T: Tensor


@dataclass(frozen=True, slots=True)
class FarShare:
    """One layer's attention on long-range entries [B, T, N or K], averaged over heads, with its gradient."""

    owner: int
    picks: Picks
    share_BTK: Tensor


@dataclass
class Run:
    """One pass; T is a multiple of the window."""

    config: ModelConfig
    weights: Weights
    options: Options
    batch: int
    length: int
    plain: Rotation
    yarn: Rotation
    position_T: Tensor
    window_bias: Tensor
    generator: torch.Generator | None = None
    entries: dict[int, Entries] = field(default_factory=dict)
    picks: dict[int, Picks] = field(default_factory=dict)
    masses: dict[int, list[Tensor]] = field(default_factory=dict)
    far_shares: list[FarShare] = field(default_factory=list)
    compressed: dict[int, Tensor] = field(default_factory=dict)
    window_shares: dict[int, Tensor] = field(default_factory=dict)
    loads: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def begin(
        cls,
        config: ModelConfig,
        weights: Weights,
        options: Options,
        batch: int,
        length: int,
        generator: torch.Generator | None,
    ) -> Run:
        """Build tables and masks for sequences of one length."""
        tables = rotary_tables(config, length)
        return cls(
            config=config,
            weights=options.codecs.served(config, weights),
            options=options,
            batch=batch,
            length=length,
            plain=Rotation(tables.plain),
            yarn=Rotation(tables.yarn),
            position_T=torch.arange(length),
            window_bias=_window_bias(config, batch, length),
            generator=generator,
        )


def _window_bias(config: ModelConfig, batch: int, length: int) -> Tensor:
    """Return what is added to the scores of a block's rows over its own and the previous block's keys."""
    window, heads = config.sliding_window, config.num_attention_heads
    query = torch.arange(length).view(-1, window, 1)
    key = query[:, :1] - window + torch.arange(2 * window)
    seen = (key <= query) & (key > query - window) & (key >= 0)
    bias = torch.where(seen, 0.0, HIDDEN_SCORE).repeat_interleave(heads, 1)
    return bias.repeat(batch, 1, 1)
