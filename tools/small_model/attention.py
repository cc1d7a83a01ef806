"""Attention over window blocks and long-range entries in one softmax, batched and differentiable.

Legend: B sequences, T positions, D hidden size, L query rank, H heads, C head width, W window, b window blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.model.roles import LayerRole

from .long_range import make_entries, pick_entries
from .operators import Rotation, rms
from .run import HIDDEN_SCORE, FarShare, Picks, Run


def attention(x_ND: Tensor, run: Run, role: LayerRole) -> Tensor:
    """Return the sublayer's output [N, D] of all positions."""
    config, weights = run.config, run.weights
    stem, heads, width = f"{role.stem}.attn", config.num_attention_heads, config.head_dim
    rotation = run.yarn if role.rope == "yarn" else run.plain
    x_BTD = x_ND.view(run.batch, run.length, -1)
    qr_BTL = rms(x_BTD @ weights[f"{stem}.wq_a.weight"].T, weights[f"{stem}.q_norm.weight"], config.rms_norm_eps)
    query_BTHC = torch.unflatten(qr_BTL @ weights[f"{stem}.wq_b.weight"].T, -1, (heads, width))
    query_BTHC = rotation(query_BTHC, run.position_T)
    key_BTC = rms(x_BTD @ weights[f"{stem}.wkv.weight"].T, weights[f"{stem}.kv_norm.weight"], config.rms_norm_eps)
    key_BTC = run.options.codecs.window(rotation(key_BTC, run.position_T))

    if role.owns_kv and run.options.long_range:
        run.entries[role.layer] = make_entries(x_BTD, run, role)
    if role.has_indexer and run.options.long_range:
        run.picks[role.layer] = pick_entries(x_BTD, qr_BTL, run, role)

    block_keys = _with_previous(key_BTC, config.sliding_window)
    query_blocks = query_BTHC.reshape(block_keys.shape[0], -1, width)
    scores = torch.baddbmm(run.window_bias, query_blocks, block_keys.transpose(1, 2), alpha=width**-0.5)
    parts = [scores.view(run.batch, run.length, heads, -1)]
    sink = weights[f"{stem}.attn_sink"].view(1, 1, -1, 1).expand(run.batch, run.length, -1, 1)
    picks = None if role.topk_owner is None else run.picks.get(role.topk_owner)
    if picks is not None and role.kv_owner is not None:
        far = _far_scores(query_BTHC, picks, run.entries[role.kv_owner].value_BNC)
        parts.append(far.masked_fill_(~picks.allowed.unsqueeze(2), HIDDEN_SCORE))
    share = torch.softmax(torch.cat((*parts, sink), -1), -1)

    near_width = parts[0].shape[-1]
    near = share[..., :near_width].reshape(block_keys.shape[0], -1, near_width)
    output_BTHC = torch.bmm(near, block_keys).view_as(query_BTHC)
    run.window_shares[role.layer] = near.detach().sum(-1).mean()
    if picks is not None and role.kv_owner is not None and role.topk_owner is not None:
        far_share = share[..., near_width:-1]
        output_BTHC = output_BTHC + _far_output(far_share, picks, run.entries[role.kv_owner].value_BNC)
        if run.options.coaching:
            run.far_shares.append(FarShare(role.kv_owner, picks, far_share.mean(2)))
        run.masses.setdefault(role.topk_owner, []).append(far_share.detach().mean(2))
    return project(output_BTHC, run, stem, rotation, run.position_T)


def project(output_BTHC: Tensor, run: Run, stem: str, rotation: Rotation, position: Tensor) -> Tensor:
    """Rotate back and return the output projection [N, D]."""
    config, weights = run.config, run.weights
    grouped = rotation(output_BTHC, position, inverse=True).reshape(-1, config.o_groups, _group_width(run))
    wo_a = weights[f"{stem}.wo_a.weight"].view(config.o_groups, config.o_lora_rank, -1)
    middle = torch.cat([grouped[:, group] @ wo_a[group].T for group in range(config.o_groups)], 1)
    return middle @ weights[f"{stem}.wo_b.weight"].T


def _group_width(run: Run) -> int:
    return run.config.num_attention_heads // run.config.o_groups * run.config.head_dim


def _with_previous(key_BTC: Tensor, window: int) -> Tensor:
    """Return each block's keys behind the previous block's [B * b, 2 W, C]."""
    blocks = torch.unflatten(key_BTC, 1, (-1, window))
    previous = F.pad(blocks, (0, 0, 0, 0, 1, 0))[:, :-1]
    return torch.cat((previous, blocks), 2).flatten(0, 1)


def _far_scores(query_BTHC: Tensor, picks: Picks, value_BNC: Tensor) -> Tensor:
    batch, length, heads, width = query_BTHC.shape
    query = query_BTHC * width**-0.5
    if picks.gathered_BTKC is None:
        return torch.bmm(query.flatten(1, 2), value_BNC.transpose(1, 2)).view(batch, length, heads, -1)
    keys = picks.gathered_BTKC.flatten(0, 1).transpose(1, 2)
    return torch.bmm(query.flatten(0, 1), keys).view(batch, length, heads, -1)


def _far_output(share: Tensor, picks: Picks, value_BNC: Tensor) -> Tensor:
    batch, length, heads, _ = share.shape
    if picks.gathered_BTKC is None:
        return torch.bmm(share.flatten(1, 2), value_BNC).view(batch, length, heads, -1)
    return torch.bmm(share.flatten(0, 1), picks.gathered_BTKC.flatten(0, 1)).view(batch, length, heads, -1)
