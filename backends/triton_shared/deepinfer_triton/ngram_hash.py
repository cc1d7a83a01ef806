"""Rows of the n-gram table from token ids: integer arithmetic in int64 that wraps, exact.

Legend: T rows, G n-gram length, h heads, F hash columns ((G-1) * h).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.accelerator.ops.memory import NgramHash
from deepinfer_triton.arithmetic import refuse
from deepinfer_triton.configuration import Configuration, launch, pointers, power_of_two
from deepinfer_triton.jit import kernel
from deepinfer_triton.rows import consecutive
from deepinfer_triton.sizes import ModelSizes

ROWS = 32


@kernel(unaligned=("token_ptr", "multiplier_ptr", "prime_ptr", "offset_ptr"))
def ngram_hash_kernel(
    token_ptr: tl.tensor,
    multiplier_ptr: tl.tensor,
    prime_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.int64,
    pad_id: tl.int64,
    LENGTH: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One program a few rows."""
    COLUMNS: tl.constexpr = (LENGTH - 1) * HEADS
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    head = tl.arange(0, HEAD_BLOCK)
    real = head < HEADS
    own = tl.load(token_ptr + row * LENGTH, mask=here, other=-1)
    blocked = own < 0
    roll = tl.where(blocked, pad_id, own) * tl.load(multiplier_ptr)
    for back in tl.static_range(1, LENGTH):
        token = tl.load(token_ptr + row * LENGTH + back, mask=here, other=-1)
        blocked = blocked | (token < 0)
        roll = roll ^ (tl.where(blocked, pad_id, token) * tl.load(multiplier_ptr + back))
        column = (back - 1) * HEADS + head
        prime = tl.load(prime_ptr + column, mask=real, other=1)[None, :]
        offset = tl.load(offset_ptr + column, mask=real, other=0)[None, :]
        # The remainder of a machine has the sign of the dividend; the contract's lies in 0 .. prime - 1.
        rest = roll[:, None] % prime
        rest = tl.where(rest < 0, rest + prime, rest)
        found = tl.where((own < 0)[:, None], -1, rest + offset)
        place = out_ptr + row[:, None] * COLUMNS + column[None, :]
        tl.store(place, found, mask=here[:, None] & real[None, :])


@cache
def configuration(length: int, heads: int) -> Configuration:
    """Return the configuration for n-grams of one length and so many hashes of each."""
    names = ("token_ptr", "multiplier_ptr", "prime_ptr", "offset_ptr", "out_ptr")
    return Configuration(
        ngram_hash_kernel,
        {**pointers(**dict.fromkeys(names, torch.int64)), "rows": "i64", "pad_id": "i64"},
        {"LENGTH": length, "HEADS": heads, "HEAD_BLOCK": power_of_two(heads), "ROWS": ROWS},
        num_warps=1,
    )


def configurations(sizes: ModelSizes) -> Iterator[Configuration]:
    """Yield what a model's Engram layers use."""
    yield configuration(sizes.ngram, sizes.ngram_heads)


def ngram_rows(tokens_TG: Tensor, constants: NgramHash) -> Tensor:
    """See :meth:`deepinfer.accelerator.ops.MemoryOps.ngram_rows`."""
    length = constants.multipliers_G.shape[0]
    if tokens_TG.dtype != torch.int64 or tokens_TG.dim() != 2 or tokens_TG.shape[1] != length:
        refuse("memory.ngram_rows", f"tokens are {tokens_TG.dtype} {tuple(tokens_TG.shape)}; give int64 [T, {length}]")
    rows, heads = tokens_TG.shape[0], constants.primes_Gh.shape[1]
    rows_TF = torch.empty((rows, (length - 1) * heads), dtype=torch.int64, device=tokens_TG.device)
    launch(
        configuration(length, heads),
        (-(-rows // ROWS),),
        consecutive(tokens_TG),
        consecutive(constants.multipliers_G),
        consecutive(constants.primes_Gh),
        consecutive(constants.offsets_F),
        rows_TF,
        rows,
        constants.pad_id,
    )
    return rows_TF
