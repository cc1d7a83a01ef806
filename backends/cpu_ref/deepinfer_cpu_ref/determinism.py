"""The self-check behind R2: tries on this machine that a row's bits depend on nothing but the row.

Which kernel a product takes is decided inside torch and its libraries, by processor and version. What `invariant.py`
builds was measured to be safe on some; here each matrix shape of the model, the shapes of attention and of index
scores, and the elementwise functions are computed in small and large batches, with one thread and with all, and the
first bit that differs refuses the level.

Legend: T rows, K in features, N out features, t batch, H heads, C head width, n keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from deepinfer.accelerator.capabilities import Repeatability
from deepinfer.accelerator.interface import LinearShape
from deepinfer.errors import DeterminismError
from deepinfer_cpu_ref.attention import HEAD_MULTIPLE, KEY_MULTIPLE, KEY_PIECE
from deepinfer_cpu_ref.invariant import (
    WIDTH_MULTIPLE,
    mean_square,
    pad_width,
    padded_product,
    row_sum,
    sigmoid,
    silu,
    softplus,
)
from deepinfer_cpu_ref.selection import KEY_PIECE as INDEX_KEY_PIECE

ROW_COUNTS = (1, 2, 7, 8, 9, 17, 33)
MOST_ROWS = ROW_COUNTS[-1]

PROBE_BYTES = 64 * 2**20
"""A wider weight is probed with as many out features as fit here."""

ATTENTION_WIDTHS = (64, 512)
INDEX_WIDTHS = (64, 128)

Product = Callable[[Tensor, Tensor, int], Tensor]
Batched = Callable[[Tensor], Tensor]


def prove(level: Repeatability, shapes: Sequence[LinearShape], product: Product = padded_product) -> None:
    """Return if ``level`` holds on this machine for ``shapes``; the number of threads is as before afterwards.

    Args:
        level: at most BATCH_INVARIANT can be proved; higher levels are refused.
        shapes: every matrix product of the model.
        product: the product to try, in place of the driver's own.

    Raises:
        DeterminismError: if a bit differs, with every computation in which one did, or if the level is too high.
    """
    if level <= Repeatability.NONE:
        return
    if level > Repeatability.BATCH_INVARIANT:
        raise DeterminismError(
            f"driver 'cpu_ref' proves R1 and R2; asked for R{int(level)}. Ask for "
            f"R{int(Repeatability.BATCH_INVARIANT)}, or choose a driver that claims the level."
        )
    threads = sorted({1, torch.get_num_threads()})
    failures = [
        f"{name}: {rows} rows with {count} threads"
        for name, compute, x in _computations(shapes, product)
        for rows, count in _differing_runs(compute, x, threads)
    ]
    if failures:
        raise DeterminismError(
            f"driver 'cpu_ref' cannot keep R{int(level)} on this machine (torch {torch.__version__}): results depend "
            f"on the batch in {'; '.join(failures)}. Unset DEEPINFER_BATCH_INVARIANT, or run with OMP_NUM_THREADS=1."
        )


def _differing_runs(compute: Batched, x: Tensor, threads: Sequence[int]) -> Iterator[tuple[int, int]]:
    with _threads(1):
        expected = compute(x)
    for count in threads:
        with _threads(count):
            for index, rows in enumerate(ROW_COUNTS):
                # Now from the front, now from the back, so that rows also change their place.
                part = slice(rows) if index % 2 else slice(MOST_ROWS - rows, MOST_ROWS)
                if not torch.equal(compute(x[part].contiguous()), expected[part]):
                    yield rows, count


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _computations(shapes: Sequence[LinearShape], product: Product) -> Iterator[tuple[str, Batched, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    # A bfloat16 product runs in float32 when its stored weight has more bits.
    tried = {*shapes, *(replace(shape, dtype=_wide(shape.dtype)) for shape in shapes)}
    for shape in sorted(tried, key=lambda shape: (shape.in_features, shape.out_features, str(shape.dtype))):
        widest = max(WIDTH_MULTIPLE, PROBE_BYTES // (4 * shape.in_features))
        out_features = min(shape.out_features, widest)
        weight_NK = pad_width(normal(out_features, shape.in_features).to(shape.dtype))
        yield (
            f"product {shape.in_features} x {shape.out_features} {shape.dtype}",
            partial(_apply, product, weight_NK, out_features),
            normal(MOST_ROWS, shape.in_features).to(shape.dtype),
        )
    for wide in sorted({_wide(shape.dtype) for shape in shapes}, key=str):
        yield from _attention(wide, normal)
        for width in INDEX_WIDTHS:
            keys_nI = normal(INDEX_KEY_PIECE, width).to(wide)
            yield (
                f"index scores {width} {wide}",
                partial(_apply, product, keys_nI, INDEX_KEY_PIECE),
                normal(MOST_ROWS, width).to(wide),
            )
        yield f"elementwise functions {wide}", _elementwise, normal(MOST_ROWS, 5).to(wide)
        yield f"sums {wide}", lambda x: torch.cat((row_sum(x), mean_square(x)), dim=1), normal(MOST_ROWS, 5120).to(wide)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _apply(product: Product, weight_NK: Tensor, out_features: int, x_TK: Tensor) -> Tensor:
    return product(x_TK, weight_NK, out_features)


def _attention(wide: torch.dtype, normal: Callable[..., Tensor]) -> Iterator[tuple[str, Batched, Tensor]]:
    for width in ATTENTION_WIDTHS:
        for keys in (KEY_MULTIPLE, KEY_PIECE):
            query_HC = normal(HEAD_MULTIPLE, width).to(wide)
            keys_tnC = normal(MOST_ROWS, keys, width).to(wide)
            yield f"attention {width} x {keys} {wide}", partial(_attend, query_HC), keys_tnC


def _attend(query_HC: Tensor, keys_tnC: Tensor) -> Tensor:
    query_tHC = query_HC.expand(keys_tnC.shape[0], -1, -1).contiguous()
    score_tHn = torch.bmm(query_tHC, keys_tnC.transpose(1, 2))
    weight_tHn = torch.exp(score_tHn - score_tHn.amax(-1, keepdim=True))
    return torch.bmm(weight_tHn, keys_tnC) / row_sum(weight_tHn)


def _elementwise(x: Tensor) -> Tensor:
    return torch.cat((sigmoid(x), silu(x), softplus(x), torch.rsqrt(x.abs()), torch.sqrt(x.abs())), dim=1)
