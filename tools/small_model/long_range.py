"""Long-range entries and the indexer, batched and differentiable.

The choice of entries is hard and has no gradient. The indexer reads detached inputs and learns from one loss alone:
its scores, as a distribution over the entries, follow the share of attention that the entries received.

Legend: B sequences, T positions, N entries, K selected entries, J index heads, I index width, C head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.model.roles import LayerRole

from .operators import rms
from .run import HIDDEN_SCORE, Entries, Picks, Run


def make_entries(x_BTD: Tensor, run: Run, role: LayerRole) -> Entries:
    """Compress all positions into an owner's entries and index keys."""
    config, weights = run.config, run.weights
    stem = f"{role.stem}.attn"
    if run.options.coaching:
        run.compressed[role.layer] = x_BTD
    latent = x_BTD @ weights[f"{stem}.compressor.wkv.weight"].T
    if role.ratio > 1:
        gate = x_BTD @ weights[f"{stem}.compressor.wgate.weight"].T
        share = torch.softmax(torch.unflatten(gate, 1, (-1, role.ratio)), 2)
        latent = (share * torch.unflatten(latent, 1, (-1, role.ratio))).sum(2)
    latent_BNC = rms(latent, weights[f"{stem}.compressor.norm.weight"], config.rms_norm_eps)
    position_N = run.position_T[:: role.ratio]
    value_BNC = run.options.codecs.entry(run.yarn(latent_BNC, position_N))
    key_BNI = latent_BNC.detach() @ weights[f"{stem}.indexer.wk.weight"].T
    key_BNI = rms(key_BNI, weights[f"{stem}.indexer.k_norm.weight"], config.rms_norm_eps)
    key_BNI = run.options.codecs.index(run.yarn(key_BNI, position_N))
    return Entries(value_BNC, key_BNI, (run.position_T + 1) // role.ratio)


def pick_entries(x_BTD: Tensor, qr_BTL: Tensor, run: Run, role: LayerRole) -> Picks:
    """Score an owner's entries for every position and choose."""
    config, weights, options = run.config, run.weights, run.options
    heads, width = config.index_n_heads, config.index_head_dim
    stem = f"{role.stem}.attn.indexer"
    entries = run.entries[_owner(role)]
    query = torch.unflatten(qr_BTL.detach() @ weights[f"{stem}.wq_b.weight"].T, -1, (heads, width))
    query_BTJI = options.codecs.index(run.yarn(query, run.position_T))
    weight_BTJ = (x_BTD.detach() @ weights[f"{stem}.weights_proj.weight"].T) * (width * heads) ** -0.5

    count = entries.key_BNI.shape[1]
    visible_TN = torch.arange(count) < entries.visible_T.unsqueeze(1)
    dense = options.attend_all or count <= options.dense_entries
    with torch.set_grad_enabled(torch.is_grad_enabled() and dense and options.index_loss):
        scores_BTN = _scores(query_BTJI, weight_BTJ, entries.key_BNI)
    if options.attend_all:
        allowed = visible_TN.expand(run.batch, -1, -1)
        return Picks(allowed, None, None, scores_BTN if options.index_loss else None, None)

    # Order by score, then by index: exact zeros are common, and the engine breaks ties so.
    allowed_BTN = visible_TN.expand(run.batch, -1, -1)
    if role.uses_candidates and config.candidate_source_layer_id is not None:
        candidates_BTN = run.picks[config.candidate_source_layer_id].candidates_BTN
        if candidates_BTN is not None:
            allowed_BTN = allowed_BTN & candidates_BTN
    best = _best(scores_BTN.detach(), allowed_BTN, min(config.index_topk, count))
    published = _candidates(scores_BTN.detach(), entries, run) if role.publishes_candidates else None
    valid_BTK = allowed_BTN.gather(2, best)
    if options.explore:
        best, valid_BTK = _with_random(best, valid_BTK, entries, run)
    if dense:
        mask = torch.zeros(scores_BTN.shape, dtype=torch.int8).scatter_add_(2, best, valid_BTK.to(torch.int8))
        return Picks(mask > 0, None, None, scores_BTN if options.index_loss else None, published)
    row = (torch.arange(run.batch) * count).view(-1, 1, 1) + best
    gathered = entries.value_BNC.flatten(0, 1).index_select(0, row.flatten()).view(*best.shape, -1)
    scores = None
    if options.index_loss:
        keys = entries.key_BNI.flatten(0, 1).index_select(0, row.flatten()).view(*best.shape, width)
        products = (query_BTJI.flatten(0, 1) @ keys.flatten(0, 1).transpose(1, 2)).relu()
        scores = torch.bmm(weight_BTJ.flatten(0, 1).unsqueeze(1), products).view(best.shape)
    return Picks(valid_BTK, best, gathered, scores, published)


def index_loss(run: Run) -> Tensor:
    """Return the cross-entropy between the masses of attention on the entries and the index scores, per position.

    A position counts by the share of its attention that went to the entries at all: where the window is enough, the
    picks matter little.
    """
    total = torch.zeros(())
    for layer, masses in run.masses.items():
        picks = run.picks[layer]
        if picks.scores is None:
            continue
        target = torch.stack(masses).mean(0)
        chance = torch.log_softmax(picks.scores.masked_fill(~picks.allowed, HIDDEN_SCORE), -1)
        total = total - (target * chance.masked_fill(~picks.allowed, 0.0)).sum(-1).mean()
    return total


def _scores(query_BTJI: Tensor, weight_BTJ: Tensor, key_BNI: Tensor) -> Tensor:
    batch, length, heads, _ = query_BTJI.shape
    products = torch.bmm(query_BTJI.flatten(1, 2), key_BNI.transpose(1, 2)).relu().view(batch * length, heads, -1)
    return torch.bmm(weight_BTJ.flatten(0, 1).unsqueeze(1), products).view(batch, length, -1)


def _best(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    return _order_keys(scores, allowed).topk(count, dim=-1).indices


def _order_keys(scores: Tensor, allowed: Tensor) -> Tensor:
    """Return int64 keys of the total order: score descending, then index ascending; forbidden ones last."""
    bits = (scores + 0.0).contiguous().view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).masked_fill(~allowed, -(2**31))
    return (ordered << 24) - torch.arange(scores.shape[-1])


def _candidates(scores_BTN: Tensor, entries: Entries, run: Run) -> Tensor | None:
    """Return the entries that lie in the best blocks: a block is as good as its best entry, the newest always in."""
    size, kept = run.config.candidate_block_size, run.config.candidate_topk_blocks
    count = scores_BTN.shape[-1]
    blocks = -(-count // size)
    if blocks <= kept:
        return None
    visible_TN = torch.arange(blocks * size) < entries.visible_T.unsqueeze(1)
    padded = torch.nn.functional.pad(scores_BTN, (0, blocks * size - count), value=HIDDEN_SCORE)
    padded = padded.masked_fill(~visible_TN, HIDDEN_SCORE)
    score_BTb = torch.unflatten(padded, -1, (blocks, size)).amax(-1)
    newest_T = (entries.visible_T - 1).clamp(min=0) // size
    newest_Tb = torch.arange(blocks) == newest_T.unsqueeze(1)
    score_BTb = score_BTb.masked_fill(newest_Tb, 1e30)
    chosen = _best(score_BTb, torch.ones_like(score_BTb, dtype=torch.bool), kept)
    inside = torch.zeros(score_BTb.shape, dtype=torch.bool).scatter_(2, chosen, value=True)
    return inside.repeat_interleave(size, -1)[..., :count]


def _with_random(best: Tensor, valid: Tensor, entries: Entries, run: Run) -> tuple[Tensor, Tensor]:
    """Append random visible entries that the picks do not hold."""
    shape = (*best.shape[:2], run.options.explore)
    drawn = torch.rand(shape, generator=run.generator) * entries.visible_T.view(1, -1, 1)
    drawn = drawn.long().clamp(max=entries.key_BNI.shape[1] - 1)
    fresh = (drawn.unsqueeze(3) != best.unsqueeze(2)).all(3) & (entries.visible_T.view(1, -1, 1) > 0)
    first = (drawn.unsqueeze(3) == drawn.unsqueeze(2)).long().argmax(3) == torch.arange(shape[2])
    return torch.cat((best, drawn), 2), torch.cat((valid, fresh & first), 2)


def _owner(role: LayerRole) -> int:
    if role.kv_owner is None:
        message = f"layer {role.layer} picks among entries that nobody owns"
        raise ValueError(message)
    return role.kv_owner
