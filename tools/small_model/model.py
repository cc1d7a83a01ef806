"""The whole text model over full sequences, batched and differentiable: what is trained, and a second witness.

It shares the configuration, the layer roles, the constants of the hash and the rotary tables with the engine, and no
arithmetic: tests hold its logits equal to the engine's.

Legend: B sequences, T positions, N rows (B times T), S streams, D hidden size, V vocabulary, A taps times D.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.model import ModelConfig, derive_roles
from deepinfer.model.engram_hash import engram_layouts

from .attention import attention
from .experts import mixture
from .long_range import index_loss
from .memory import remember, table_rows
from .mixing import collapse, mixes, write_back
from .operators import rms
from .parameters import Weights
from .run import Options, Run

Sublayer = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Passed:
    """What a pass leaves.

    Attributes:
        hidden_BTD: the collapsed streams behind the last layer, before the last norm.
        taps_BTA: what the draft stages read.
        index_loss: how far the index scores are from the attention; zero unless asked for.
        run: loads, shares and picks of the layers; its weights are those that were served.
    """

    hidden_BTD: Tensor
    taps_BTA: Tensor
    index_loss: Tensor
    run: Run


class SmallModel:
    """A configuration with its token map; weights are given to every call."""

    def __init__(self, config: ModelConfig, token_map: npt.NDArray[np.int64] | None = None) -> None:
        """Bind the configuration; ``token_map`` None means the identity."""
        self.config = config
        mapping = np.arange(config.vocab_size) if token_map is None else token_map
        self.token_map_V = torch.from_numpy(np.ascontiguousarray(mapping, dtype=np.int64))
        self.roles = derive_roles(config)
        self.layouts = engram_layouts(config)

    def forward(
        self,
        weights: Weights,
        ids_BT: Tensor,
        options: Options | None = None,
        generator: torch.Generator | None = None,
    ) -> Passed:
        """Run every layer over sequences that begin at position 0; ``generator`` draws what is explored."""
        config, options = self.config, options or Options()
        batch, length = ids_BT.shape
        padding = -length % config.sliding_window
        ids = F.pad(ids_BT, (0, padding), value=config.pad_token_id)
        run = Run.begin(config, weights, options, batch, length + padding, generator)
        streams, taps = self._layers(ids, run)
        shape = (batch, length + padding, -1)
        return Passed(
            hidden_BTD=streams.view(shape)[:, :length],
            taps_BTA=torch.cat(taps, 1).view(shape)[:, :length],
            index_loss=index_loss(run) if options.index_loss else torch.zeros(()),
            run=run,
        )

    def logits(self, run: Run, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of collapsed rows [..., D]."""
        normed = rms(hidden, run.weights["norm.weight"], self.config.rms_norm_eps)
        return normed @ run.weights["head.weight"].T

    def _layers(self, ids_BT: Tensor, run: Run) -> tuple[Tensor, list[Tensor]]:
        config, weights = self.config, run.weights
        mapped = self.token_map_V[ids_BT]
        pad_id = int(self.token_map_V[config.engram_pad_token_id])
        embedded = F.embedding(ids_BT.flatten(), weights["embed.weight"])
        streams_NSD = embedded.unsqueeze(1).expand(-1, config.hc_mult, -1).contiguous()
        pre_NS = torch.zeros(streams_NSD.shape[:2])
        pre_NS[:, 0] = 1.0
        taps: list[Tensor] = []
        for role in self.roles:
            if role.is_draft:
                break
            if role.engram_index is not None:
                rows = table_rows(mapped, self.layouts[role.engram_index], pad_id).flatten(0, 1)
                streams_NSD = remember(streams_NSD, rows, weights, f"{role.stem}.engram", config)
            if role.is_tap:
                taps.append(streams_NSD.mean(1))
            experts = partial(_experts, run=run, stem=f"{role.stem}.ffn", top_k=config.num_experts_per_tok)
            streams_NSD, pre_NS = block(
                streams_NSD, pre_NS, run, role.stem, partial(attention, run=run, role=role), experts
            )
        return collapse(streams_NSD, pre_NS), taps


def block(
    streams_NSD: Tensor, pre_NS: Tensor, run: Run, stem: str, attend: Sublayer, experts: Sublayer
) -> tuple[Tensor, Tensor]:
    """Run one layer: each sublayer reads the streams with the weights of the sublayer before it."""
    for half, sublayer in (("attn", attend), ("ffn", experts)):
        mix = mixes(streams_NSD, run.weights, f"{stem}.hc_{half}", run.config)
        x_ND = rms(collapse(streams_NSD, pre_NS), run.weights[f"{stem}.{half}_norm.weight"], run.config.rms_norm_eps)
        streams_NSD, pre_NS = write_back(sublayer(x_ND), streams_NSD, mix), mix.pre_NS
    return streams_NSD, pre_NS


def _experts(x_ND: Tensor, *, run: Run, stem: str, top_k: int) -> Tensor:
    output_ND, run.loads[stem] = mixture(x_ND, run.weights, stem, run.config, top_k)
    return output_ND
