"""Widths of the products of the models whose kernel configurations are listed: model.md sections 1, 11 and 15."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from deepinfer_triton import (
    dense_product,
    draft_draws,
    draft_judgement,
    draft_verdicts,
    embedding,
    expert_product,
    expert_tiles,
    logit_entries,
    row_codes,
    slot_sum,
    token_draw,
    token_scores,
    token_weights,
    weight_threshold,
)
from deepinfer_triton.arithmetic import ACTIVATION_DTYPES
from deepinfer_triton.configuration import Configuration
from deepinfer_triton.sizes import ModelSizes
from deepinfer_triton.stored_matrices import FLOAT, FP8, MXFP4
from deepinfer_triton.tile_product import BFLOAT16, CODES, FLOAT32, has_long_tile, tile_of


@dataclass(frozen=True, slots=True)
class Products:
    """In and out features of a model's products.

    Attributes:
        vocabulary: rows of the embedding and of the head.
        fp8: dense layers with block-scaled weights.
        grouped: groups, and in and out features of one, of the output projection.
        bfloat16: dense layers with bfloat16 weights.
        promoted: those whose results are float32.
        intermediate: width of an expert's hidden layer.
    """

    vocabulary: int
    fp8: tuple[tuple[int, int], ...]
    grouped: tuple[int, int, int]
    bfloat16: tuple[tuple[int, int], ...]
    promoted: tuple[tuple[int, int], ...]
    intermediate: int


PRODUCTS: Mapping[str, Products] = MappingProxyType(
    {
        "V4.1-Flash": Products(
            vocabulary=129280,
            fp8=((6144, 25600), (5120, 1280), (1280, 32768), (5120, 512), (1280, 4096), (8192, 5120), (15360, 5120)),
            grouped=(8, 4096, 1024),
            bfloat16=((5120, 512), (512, 128), (5120, 32)),
            promoted=((5120, 512), (5120, 129280), (256, 129280), (5376, 1)),
            intermediate=2304,
        ),
        "tiny8": Products(
            vocabulary=512,
            fp8=((192, 640), (128, 64), (64, 256), (128, 64), (64, 256), (64, 128), (384, 128)),
            grouped=(2, 128, 32),
            bfloat16=((128, 64), (64, 64), (128, 4)),
            promoted=((128, 64), (128, 512), (16, 512), (144, 1)),
            intermediate=64,
        ),
    }
)
"""By the name of `sizes.ModelSizes`."""

_WEIGHTS = {FP8: torch.uint8, MXFP4: torch.uint8, FLOAT: torch.bfloat16}


def ways(kind: int, activation: torch.dtype) -> Iterator[int]:
    """Yield the ways in which weights of one format are multiplied with rows of one dtype."""
    if kind != FLOAT:
        yield CODES
    yield BFLOAT16 if activation == torch.bfloat16 else FLOAT32


def many_rows_or_few(kind: int, product: int) -> Iterator[bool]:
    """Yield whether a tile has many rows, for the tiles that there are."""
    yield False
    if has_long_tile(kind, product):
        yield True


def linear_configurations(sizes: ModelSizes) -> Iterator[Configuration]:
    """Yield what a model's dense and grouped layers use."""
    own = PRODUCTS[sizes.name]
    for activation in ACTIVATION_DTYPES:
        for table in ACTIVATION_DTYPES:
            yield embedding.configuration(sizes.hidden, table, activation)
        for in_features, out_features in own.fp8:
            yield from _dense(in_features, out_features, 1, FP8, activation, activation)
        groups, in_features, out_features = own.grouped
        yield from _dense(in_features, out_features, groups, FP8, activation, activation)
        for in_features, out_features in own.bfloat16:
            yield from _dense(in_features, out_features, 1, FLOAT, activation, activation)
        for in_features, out_features in own.promoted:
            yield from _dense(in_features, out_features, 1, FLOAT, activation, torch.float32)


def _dense(
    in_features: int, out_features: int, groups: int, kind: int, activation: torch.dtype, out: torch.dtype
) -> Iterator[Configuration]:
    for product in ways(kind, activation):
        if product == CODES:
            yield row_codes.configuration(in_features, activation)
        for many_rows in many_rows_or_few(kind, product):
            tile = tile_of(kind, product, many_rows=many_rows)
            pieces = dense_product.pieces_of(in_features, out_features, groups, tile.columns, tile.depth)
            pieces = 1 if many_rows else pieces
            yield dense_product.configuration(
                in_features, _WEIGHTS[kind], activation, out,
                kind=kind, product=product, pieces=pieces, many_rows=many_rows,
            )  # fmt: skip
            if pieces > 1:
                yield dense_product.sum_configuration(pieces, out)


def expert_configurations(sizes: ModelSizes) -> Iterator[Configuration]:
    """Yield what a model's routed experts (mxfp4) and shared experts (fp8) use."""
    yield expert_tiles.counts_configuration()
    for activation in ACTIVATION_DTYPES:
        for kind, routed in ((MXFP4, True), (FP8, False)):
            for product in ways(kind, activation):
                for many_rows in many_rows_or_few(kind, product):
                    yield from _experts(sizes, activation, kind, product, many_rows=many_rows, routed=routed)
        for _, top_k in sizes.routers:
            yield slot_sum.configuration(top_k, sizes.hidden, torch.float32, torch.bfloat16, activation)


def _experts(
    sizes: ModelSizes, activation: torch.dtype, kind: int, product: int, *, many_rows: bool, routed: bool
) -> Iterator[Configuration]:
    served, intermediate = product == CODES, PRODUCTS[sizes.name].intermediate
    hidden = torch.uint8 if served else activation
    modes = {"kind": kind, "product": product, "many_rows": many_rows, "routed": routed, "served": served}
    if served:
        yield row_codes.configuration(sizes.hidden, activation)
    if routed:
        for experts, _ in sizes.routers:
            yield expert_tiles.tiles_configuration(experts, tile_of(kind, product, many_rows=many_rows).rows)
    yield expert_product.gate_up_configuration(sizes.hidden, _WEIGHTS[kind], activation, hidden, **modes)
    outs = (torch.float32, torch.bfloat16) if served and routed else (torch.float32,)
    for out in outs:
        yield expert_product.down_configuration(intermediate, _WEIGHTS[kind], hidden, out, **modes)


def sampling_configurations(sizes: ModelSizes) -> Iterator[Configuration]:
    """Yield what sampling from a model's vocabulary uses."""
    width = PRODUCTS[sizes.name].vocabulary
    chunk = token_weights.chunk_of(width)
    for action in (logit_entries.BIAS, logit_entries.BAN, logit_entries.SAVE, logit_entries.RESTORE):
        yield logit_entries.entries_configuration(action)
    yield logit_entries.penalties_configuration()
    yield logit_entries.row_mask_configuration()
    yield logit_entries.bitmask_configuration()
    yield token_weights.maxima_configuration(chunk)
    yield token_weights.weights_configuration(width)
    yield token_weights.filter_configuration(chunk)
    yield weight_threshold.configuration(weight_threshold.block_of(width))
    yield token_draw.uniforms_configuration()
    yield token_draw.sums_configuration(chunk)
    for flag in (False, True):
        yield token_draw.draw_configuration(width, forced=flag)
        yield token_draw.greedy_configuration(width, forced=flag)
        yield token_scores.chunks_configuration(width, by_weight=flag)
        yield token_scores.scores_configuration(width, by_weight=flag)


def drafting_configurations(sizes: ModelSizes) -> Iterator[Configuration]:
    """Yield what drafts over a model's vocabulary and their verification use, beside the sampler's."""
    width = PRODUCTS[sizes.name].vocabulary
    yield from draft_draws.configurations(width)
    yield from draft_judgement.configurations(width)
    yield from draft_verdicts.configurations(width)
