"""The draft stages: many rounds at once, on the taps of a frozen model.

Legend: B sequences, T positions, R rounds, n drafts a round, t = R * n rows, W window, D hidden size, A taps times D,
H heads, C head width, V vocabulary, M Markov rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.model.roles import LayerRole

from .attention import project
from .experts import mixture
from .mixing import collapse
from .model import SmallModel, block
from .operators import rms
from .run import HIDDEN_SCORE, Run


@dataclass(frozen=True, slots=True)
class Rounds:
    """Where rounds begin: sequence and last verified position of each, [R]; the anchor is the next token."""

    sequence_R: Tensor
    verified_R: Tensor


@dataclass(frozen=True, slots=True)
class Drafted:
    """Logits [R, n, V] of the drafts and confidence logits [R, n], each behind the given earlier tokens."""

    logits_RnV: Tensor
    confidence_Rn: Tensor


def draft(model: SmallModel, run: Run, taps_BTA: Tensor, ids_BT: Tensor, rounds: Rounds, drafts: int) -> Drafted:
    """Draft ``drafts`` tokens behind each round's anchor; the token before each draft is the sequence's own."""
    config, weights = model.config, run.weights
    stages = [role for role in model.roles if role.is_draft]
    last = stages[-1].stem
    main_BTD = rms(
        taps_BTA @ weights["mtp.0.main_proj.weight"].T, weights["mtp.0.main_norm.weight"], config.rms_norm_eps
    )
    position_Rn = rounds.verified_R.unsqueeze(1) + 1 + torch.arange(drafts)
    ids_Rn = torch.full(position_Rn.shape, config.dspark_noise_token_id)
    ids_Rn[:, 0] = ids_BT[rounds.sequence_R, rounds.verified_R + 1]

    streams = F.embedding(ids_Rn.flatten(), weights["embed.weight"]).unsqueeze(1).repeat(1, config.hc_mult, 1)
    pre = torch.zeros(streams.shape[:2])
    pre[:, 0] = 1.0
    for role in stages:
        attend = partial(_attention, run=run, role=role, main_BTD=main_BTD, rounds=rounds, position_Rn=position_Rn)
        experts = partial(_experts, run=run, stem=f"{role.stem}.ffn", top_k=config.dspark_num_experts_per_tok)
        streams, pre = block(streams, pre, run, role.stem, attend, experts)
    hidden_RnD = collapse(streams, pre).view(*position_Rn.shape, -1)

    base = rms(hidden_RnD, weights[f"{last}.norm.weight"], config.rms_norm_eps) @ weights["head.weight"].T
    before_Rn = ids_BT[rounds.sequence_R.unsqueeze(1), position_Rn]
    markov_RnM = F.embedding(before_Rn, weights[f"{last}.markov_head.embed.weight"])
    logits = base + markov_RnM @ weights[f"{last}.markov_head.head.weight"].T
    seen = torch.cat((hidden_RnD, markov_RnM), -1).detach()
    return Drafted(logits, (seen @ weights[f"{last}.confidence_head.proj.weight"].T).squeeze(-1))


def _attention(
    x_tD: Tensor, *, run: Run, role: LayerRole, main_BTD: Tensor, rounds: Rounds, position_Rn: Tensor
) -> Tensor:
    """Every row of a round sees the window before the anchor and all rows of the round."""
    config, weights, stem = run.config, run.weights, f"{role.stem}.attn"
    heads, width, window = config.num_attention_heads, config.head_dim, config.sliding_window
    x_RnD = x_tD.view(*position_Rn.shape, -1)
    qr = rms(x_RnD @ weights[f"{stem}.wq_a.weight"].T, weights[f"{stem}.q_norm.weight"], config.rms_norm_eps)
    query = torch.unflatten(qr @ weights[f"{stem}.wq_b.weight"].T, -1, (heads, width))
    query = run.plain(query, position_Rn)

    def keys(rows: Tensor, position: Tensor) -> Tensor:
        normed = rms(rows @ weights[f"{stem}.wkv.weight"].T, weights[f"{stem}.kv_norm.weight"], config.rms_norm_eps)
        return run.options.codecs.window(run.plain(normed, position))

    context_RW = rounds.verified_R.unsqueeze(1) - torch.arange(window - 1, -1, -1)
    context_BTC = keys(main_BTD, torch.arange(main_BTD.shape[1]))
    context = context_BTC[rounds.sequence_R.unsqueeze(1), context_RW.clamp(min=0)]
    all_keys = torch.cat((context, keys(x_RnD, position_Rn)), 1)
    scores = torch.einsum("rnhc,rkc->rnhk", query, all_keys) * width**-0.5
    absent = F.pad(context_RW < 0, (0, position_Rn.shape[1])).view(-1, 1, 1, all_keys.shape[1])
    sink = weights[f"{stem}.attn_sink"].view(1, 1, -1, 1).expand(*scores.shape[:3], 1)
    share = torch.softmax(torch.cat((scores.masked_fill(absent, HIDDEN_SCORE), sink), -1), -1)[..., :-1]
    output = torch.einsum("rnhk,rkc->rnhc", share, all_keys)
    return project(output, run, stem, run.plain, position_Rn)


def _experts(x_tD: Tensor, *, run: Run, stem: str, top_k: int) -> Tensor:
    output, run.loads[stem] = mixture(x_tD, run.weights, stem, run.config, top_k)
    return output
