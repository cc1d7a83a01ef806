"""Normalisation, rotation, hyper-connections, activations, paged caches.

Legend: T rows, S streams, D width, B block size, H heads.
"""

# ruff: noqa: FBT001 (booleans stand where the operator has them)

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from host_cann.errors import KernelError
from host_cann.kernels.registry import KernelTable
from host_cann.views import store

TABLE = KernelTable()


def _normalise(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)
    return (wide * inverse * gamma.float()).to(x.dtype), inverse


@TABLE.add("aclnnRmsNorm(x, gamma, double eps, y*, inverse*)")
def rms_norm(x: Tensor, gamma: Tensor, eps: float, y: Tensor, inverse: Tensor) -> None:
    normed, rstd = _normalise(x, gamma, eps)
    store(y, normed)
    store(inverse, rstd)


@TABLE.add("aclnnAddRmsNorm(x1, x2, gamma, double eps, y*, inverse*, total*)")
def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, eps: float, y: Tensor, inverse: Tensor, total: Tensor) -> None:
    summed = (x1.float() + x2.float()).to(x1.dtype)
    normed, rstd = _normalise(summed, gamma, eps)
    store(y, normed)
    store(inverse, rstd)
    store(total, summed)


# ---- rotation: half pairs (i, i + D/2), interleaved pairs (2i, 2i + 1); cos and sin hold a value per channel
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    if interleaved:
        turned = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos.float() + turned.float() * sin.float()).to(x.dtype)


@TABLE.add("aclnnRotaryPositionEmbeddingV2(x, cos, sin, int mode, rotate?, out*)")
def rotary(x: Tensor, cos: Tensor, sin: Tensor, mode: int, rotate: Tensor | None, out: Tensor) -> None:
    if mode not in (0, 1) or rotate is not None:
        raise KernelError(f"is emulated for modes 0 (half) and 1 (interleave), not {mode}")
    store(out, _rotate(x, cos, sin, interleaved=mode == 1))


@TABLE.add("aclnnApplyRotaryPosEmbV2(query&, key&, cos, sin, int layout, text mode)")
def rotary_of_both(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: int, mode: str) -> None:
    if mode not in ("half", "interleave") or layout != 1:
        raise KernelError(f"is emulated for layout 1 (BSND) and modes 'half', 'interleave'; asked {layout}, {mode!r}")
    for x in (query, key):
        store(x, _rotate(x, cos, sin, interleaved=mode == "interleave"))


@TABLE.add("aclnnInterleaveRope(x, cos, sin, out*)")
def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    parted = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    store(out, _rotate(parted, cos, sin, interleaved=False))


# ---- hyper-connections
@TABLE.add(
    "aclnnMhcPreV2(x, phi, alpha, bias, gamma?, double norm_eps, double mix_eps, int precision, inner*, post*,"
    " residual*, inverse*?, mixed*?, pre*?)"
)
def mhc_pre(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, norm_eps: float, mix_eps: float,
    precision: int, inner: Tensor, post: Tensor, residual: Tensor, inverse: Tensor | None, mixed: Tensor | None,
    pre: Tensor | None,
) -> None:  # fmt: skip
    streams = x.shape[-2]
    wide = x.float().flatten(-2)
    rstd = torch.rsqrt(wide.square().mean(-1) + norm_eps)
    weighted = wide if gamma is None else wide * gamma.flatten()
    mixes = weighted @ phi.t()
    parts = torch.split(mixes * rstd.unsqueeze(-1), [streams, streams, streams * streams], dim=-1)
    bases = torch.split(bias, [streams, streams, streams * streams])
    pre_TS = torch.sigmoid(parts[0] * alpha[0] + bases[0]) + mix_eps
    store(inner, (pre_TS.unsqueeze(-1) * x.float()).sum(-2))
    store(post, 2 * torch.sigmoid(parts[1] * alpha[1] + bases[1]))
    store(residual, torch.unflatten(parts[2] * alpha[2] + bases[2], -1, (streams, streams)))
    for out, value in ((inverse, rstd), (mixed, mixes), (pre, pre_TS)):
        if out is not None:
            store(out, value)


@TABLE.add("aclnnMhcSinkhorn(x, float eps, int turns, out*, norms*?, sums*?)")
def sinkhorn(x: Tensor, eps: float, turns: int, out: Tensor, norms: Tensor | None, sums: Tensor | None) -> None:
    if norms is not None or sums is not None:
        raise KernelError("is emulated without the values that training keeps")
    matrix = x.softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(turns - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    store(out, matrix)


@TABLE.add("aclnnMhcPost(x, residual?, inner, post, out*)")
def mhc_post(x: Tensor, residual: Tensor | None, inner: Tensor, post: Tensor, out: Tensor) -> None:
    carried = x.float() if residual is None else residual.float().transpose(-1, -2) @ x.float()
    store(out, carried + post.float().unsqueeze(-1) * inner.float().unsqueeze(-2))


# ---- activations and sampling filters
TABLE.pure(
    "aclnnSwiGlu(x, int dim, out*)", lambda x, dim: F.silu(x.chunk(2, dim)[0].float()) * x.chunk(2, dim)[1].float()
)


@TABLE.add("aclnnApplyTopKTopP(logits, p?, k?, out*)")
def top_k_top_p(logits: Tensor, p: Tensor | None, k: Tensor | None, out: Tensor) -> None:
    values, order = torch.sort(logits.float(), dim=-1, stable=True)
    if k is not None:
        least = values.gather(1, (values.shape[1] - k.long().clamp(1, values.shape[1])).unsqueeze(1))
        values = values.masked_fill(values < least, float("-inf"))
    if p is not None:
        dropped = values.softmax(-1).cumsum(-1) <= 1 - p.float().unsqueeze(1)
        dropped[:, -1] = False
        values = values.masked_fill(dropped, float("-inf"))
    store(out, torch.empty_like(values).scatter_(1, order, values))


# ---- paged caches [blocks, B, H, D]
@TABLE.add("aclnnScatterNdUpdate(self&, indices, updates)")
def scatter_nd_update(self: Tensor, indices: Tensor, updates: Tensor) -> None:
    depth = indices.shape[-1]
    picked = tuple(indices.flatten(0, -2).long().unbind(-1))
    for dim, index in enumerate(picked):
        if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < self.shape[dim]):
            raise KernelError(
                f"index {int(index.min())}..{int(index.max())} leaves dimension {dim} of {self.shape[dim]}"
            )
    self[picked] = updates.reshape(-1, *self.shape[depth:])


@TABLE.add(
    "aclnnScatterPaKvCache(key, key_cache&, slots, value?, value_cache&?, lengths?, offsets?, seq_lengths?, text mode,"
    " text scatter_mode, ints strides, ints starts)"
)
def scatter_cache(
    key: Tensor, key_cache: Tensor, slots: Tensor, value: Tensor | None, value_cache: Tensor | None,
    lengths: Tensor | None, offsets: Tensor | None, seq_lengths: Tensor | None, mode: str, scatter_mode: str,
    strides: list[int], starts: list[int],
) -> None:  # fmt: skip
    extras = [extra for extra in (lengths, offsets, seq_lengths) if extra is not None]
    if mode != "Norm" or scatter_mode != "None" or extras:
        raise KernelError(f"is emulated for cache mode 'Norm' without compression, not {mode!r}, {scatter_mode!r}")
    kept = slots >= 0
    block, row = slots[kept].long() // key_cache.shape[1], slots[kept].long() % key_cache.shape[1]
    if block.numel() and int(block.max()) >= key_cache.shape[0]:
        raise KernelError(f"slot {int(slots.max())} leaves a cache of {key_cache.shape[0] * key_cache.shape[1]}")
    key_cache[block, row] = key[kept]
    if value is not None and value_cache is not None:
        value_cache[block, row] = value[kept]


@TABLE.add(
    "aclnnGatherPaKvCache(key_cache, value_cache, tables, lengths, key&, value&, starts?, text mode, bool are_sums)"
)
def gather_cache(
    key_cache: Tensor, value_cache: Tensor, tables: Tensor, lengths: Tensor, key: Tensor, value: Tensor,
    starts: Tensor | None, mode: str, are_sums: bool,
) -> None:  # fmt: skip
    if mode != "Norm" or starts is not None or are_sums:
        raise KernelError(f"is emulated for cache mode 'Norm' with plain lengths, not {mode!r}")
    block_size, end = key_cache.shape[1], 0
    for table, length in zip(tables, lengths.tolist(), strict=True):
        position = torch.arange(length)
        block = table[position // block_size].long()
        for cache, out in ((key_cache, key), (value_cache, value)):
            out[end : end + length] = cache[block, position % block_size]
        end += length
