"""One step of learning: the model on the world, then the draft stages on the frozen model.

Legend: B sequences, T positions, n drafts a round, R rounds, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .batches import Batch
from .coaching import coaching_loss
from .codecs import Codecs
from .draft import Rounds, draft
from .experts import balance
from .model import SmallModel
from .parameters import is_matrix
from .run import Options
from .team import Team

_CLIP = 1.0
_WEIGHT_DECAY = 0.05
_BETAS = (0.9, 0.98)
_FIXED = ("gate.bias", "gate.bias_vl")
_ROUNDS = 192


@dataclass(frozen=True, slots=True)
class Losses:
    """What a step measured: the weighted loss, the loss of answers alone, and a side loss (index, or confidence)."""

    total: float
    answers: float
    side: float


def trainable(weights: dict[str, Tensor], *, drafts: bool) -> dict[str, Tensor]:
    """Give the weights that a phase trains; router biases are moved by their load alone."""
    return {
        name: weight
        for name, weight in weights.items()
        if name.startswith("mtp.") == drafts and not name.endswith(_FIXED)
    }


def make_optimiser(weights: dict[str, Tensor], *, drafts: bool) -> torch.optim.AdamW:
    """Make the optimiser of a phase and let its weights have gradients."""
    chosen = trainable(weights, drafts=drafts)
    for name, weight in weights.items():
        weight.requires_grad_(name in chosen)
    groups = [
        {"params": [w for n, w in chosen.items() if is_matrix(n, w)], "weight_decay": _WEIGHT_DECAY},
        {"params": [w for n, w in chosen.items() if not is_matrix(n, w)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=_BETAS, fused=True)


def learn(
    model: SmallModel,
    weights: dict[str, Tensor],
    optimiser: torch.optim.Optimizer,
    batch: Batch,
    options: Options,
    rate: float,
    balance_rate: float,
    generator: torch.Generator,
    team: Team,
) -> Losses:
    """Take one step on the world's sequences."""
    passed = model.forward(weights, batch.ids_BT, options, generator)
    weight_BT = batch.weight_BT[:, 1:]
    counted = weight_BT > 0
    logits = model.logits(passed.run, passed.hidden_BTD[:, :-1][counted])
    each = F.cross_entropy(logits, batch.ids_BT[:, 1:][counted], reduction="none")
    share = weight_BT[counted]
    loss = (each * share).sum() / share.sum()
    aids = options.coaching * coaching_loss(passed.run, batch) if options.coaching else torch.zeros(())
    _step(optimiser, loss + passed.index_loss + aids, rate, team)
    _balance(weights, passed.run.loads, balance_rate, team)
    answers = each.detach()[share >= 1.0]
    return Losses(loss.item(), answers.mean().item() if answers.numel() else loss.item(), passed.index_loss.item())


def learn_drafts(
    model: SmallModel,
    frozen: dict[str, Tensor],
    weights: dict[str, Tensor],
    optimiser: torch.optim.Optimizer,
    batch: Batch,
    rate: float,
    balance_rate: float,
    generator: torch.Generator,
    team: Team,
) -> Losses:
    """Take one step on the draft stages: they follow the frozen model's distribution, the confidence its agreement.

    Args:
        model: the shape.
        frozen: the text model's weights as they are served.
        weights: all weights; those of the draft stages learn.
        optimiser: over the draft stages.
        batch: sequences, the drafts' true past.
        rate: learning rate.
        balance_rate: how far the routers' biases move.
        generator: draws where rounds begin.
        team: the processes that take the step together.
    """
    drafts = model.config.dspark_block_size
    with torch.no_grad():
        passed = model.forward(frozen, batch.ids_BT, Options(codecs=Codecs(records=True)))
    rounds = _draw_rounds(batch, drafts, generator)
    own = {name: weight for name, weight in weights.items() if name.startswith("mtp.")}
    passed.run.weights = {**frozen, **Codecs(weights=True).served(model.config, own)}
    passed.run.loads.clear()
    drafted = draft(model, passed.run, passed.taps_BTA, batch.ids_BT, rounds, drafts)

    place_Rn = rounds.verified_R.unsqueeze(1) + 1 + torch.arange(drafts)
    with torch.no_grad():
        target = model.logits(passed.run, passed.hidden_BTD[rounds.sequence_R.unsqueeze(1), place_Rn])
        best_Rn = target.argmax(-1)
        true_Rn = batch.ids_BT[rounds.sequence_R.unsqueeze(1), place_Rn + 1]
        # A draft is judged only where the tokens before it are those that the model itself would have written.
        follows_Rn = F.pad((best_Rn == true_Rn).long().cumprod(1)[:, :-1], (1, 0), value=1) > 0
        agrees_Rn = drafted.logits_RnV.argmax(-1) == best_Rn
    chance = torch.log_softmax(drafted.logits_RnV, -1)
    loss = -(torch.softmax(target, -1) * chance).sum(-1)[follows_Rn].mean()
    confidence = F.binary_cross_entropy_with_logits(drafted.confidence_Rn[follows_Rn], agrees_Rn[follows_Rn].float())
    _step(optimiser, loss + confidence, rate, team)
    _balance(weights, passed.run.loads, balance_rate, team)
    return Losses(loss.item(), agrees_Rn[:, 0].float().mean().item(), confidence.item())


def _draw_rounds(batch: Batch, drafts: int, generator: torch.Generator) -> Rounds:
    """Draw places; half of the rounds begin where an answer follows."""
    batch_size, length = batch.ids_BT.shape
    last = length - drafts - 2
    flat = torch.randint(batch_size * last, (_ROUNDS,), generator=generator)
    answers = (batch.weight_BT[:, 2 : last + 2] >= 1.0).flatten().nonzero().squeeze(1)
    if answers.numel():
        half = _ROUNDS // 2
        flat[:half] = answers[torch.randint(answers.numel(), (half,), generator=generator)]
    return Rounds(flat // last, flat % last)


def _step(optimiser: torch.optim.Optimizer, loss: Tensor, rate: float, team: Team) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate
    optimiser.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    # The training aids' own weights have no gradient once those have faded out, on every process alike.
    learning = [weight for group in optimiser.param_groups for weight in group["params"] if weight.grad is not None]
    team.average([weight.grad for weight in learning])
    torch.nn.utils.clip_grad_norm_(learning, _CLIP)
    optimiser.step()


def _balance(weights: dict[str, Tensor], loads: dict[str, Tensor], rate: float, team: Team) -> None:
    counts = {stem: counts_E.float() for stem, counts_E in loads.items()}
    team.average(list(counts.values()))
    for stem, counts_E in counts.items():
        balance(weights[f"{stem}.gate.bias"], counts_E, rate)
