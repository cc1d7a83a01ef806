"""Two training aids that leave nothing in the checkpoint; without them recall does not come within the time.

To recall, a value's entry must know the name before it, and the question must look for that name. Either half is
worthless without the other, so that the loss of answers alone finds neither. The *echo* asks what an owner compresses
for the tokens before each position; the *guide* asks rows that recall to attend to entries where the fact was stated.
Both fade out with progress.

Legend: B sequences, T positions, D hidden size, V vocabulary, Q questions, N entries, K selected entries.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.model import ModelConfig

from .batches import Batch
from .operators import rms
from .run import Run

PREFIX = "coach."
"""Weights of this name are trained with the model and never served."""

_BACK = (1, 2, 3)
_ECHO, _GUIDE = 0.5, 0.3
_LEAST_MASS = 1e-4


def coach_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Give the echo's projections [V, D]: one for every owner and number of tokens back."""
    generator = torch.Generator().manual_seed(seed)
    shape = (config.vocab_size, config.hidden_size)
    names = [_name(owner, back) for owner in config.kv_source_layer_ids for back in _BACK]
    return {name: torch.randn(shape, generator=generator) * 0.02 for name in names}


def coaching_loss(run: Run, batch: Batch) -> Tensor:
    """Return the weighted sum of both aids; the pass must have been run with ``coaching``."""
    return _ECHO * echo_loss(run, batch.ids_BT) + _GUIDE * guide_loss(run, batch)


def echo_loss(run: Run, ids_BT: Tensor) -> Tensor:
    """Return the cross-entropy of the tokens before each position, read from what the owners compress."""
    length = ids_BT.shape[1]
    losses: list[Tensor] = []
    for owner, x_BTD in run.compressed.items():
        normed = rms(x_BTD[:, :length], torch.ones(x_BTD.shape[-1]), run.config.rms_norm_eps)
        for back in _BACK:
            logits = normed[:, back:] @ run.weights[_name(owner, back)].T
            losses.append(F.cross_entropy(logits.flatten(0, 1), ids_BT[:, :-back].flatten()))
    return torch.stack(losses).mean()


def guide_loss(run: Run, batch: Batch) -> Tensor:
    """Return how little of the last owner's attention recalling rows give to entries that state their answer.

    It is the mean of ``-log(mass)`` over questions and over the layers that read those entries; zero without questions.
    """
    sequence_Q, place_Q = batch.recalled_BT.nonzero(as_tuple=True)
    stated_QT = _stated(batch.ids_BT, sequence_Q, place_Q)
    answerable = stated_QT.any(1)
    sequence_Q, row_Q, stated_QT = sequence_Q[answerable], place_Q[answerable] - 1, stated_QT[answerable]
    if not sequence_Q.numel():
        return torch.zeros(())
    owner = max(run.entries)
    entries = run.entries[owner].value_BNC.shape[1]
    ratio = run.length // entries
    padded = F.pad(stated_QT, (0, run.length - stated_QT.shape[1]))
    stated_QN = torch.unflatten(padded, 1, (entries, ratio)).any(2)
    losses: list[Tensor] = []
    for shared in run.far_shares:
        if shared.owner != owner:
            continue
        index_BTK = shared.picks.index_BTK
        right = stated_QN if index_BTK is None else stated_QN.gather(1, index_BTK[sequence_Q, row_Q])
        mass_Q = (shared.share_BTK[sequence_Q, row_Q] * right).sum(1)
        losses.append(-(mass_Q + _LEAST_MASS).log().mean())
    return torch.stack(losses).mean()


def _stated(ids_BT: Tensor, sequence_Q: Tensor, place_Q: Tensor) -> Tensor:
    """Say where earlier in its sequence each place's token stood behind the same two tokens: bool [Q, T]."""
    ids_QT = ids_BT[sequence_Q]
    found = torch.arange(ids_BT.shape[1]) < place_Q.unsqueeze(1)
    for back in range(3):
        wanted_Q = ids_BT[sequence_Q, place_Q - back]
        found = found & (F.pad(ids_QT, (back, 0), value=-1)[:, : ids_BT.shape[1]] == wanted_Q.unsqueeze(1))
    return found


def _name(owner: int, back: int) -> str:
    return f"{PREFIX}{owner}.{back}.weight"
