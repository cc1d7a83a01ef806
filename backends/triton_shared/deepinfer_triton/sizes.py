"""Sizes of the models whose kernel configurations are listed: model.md sections 1 and 15."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Widths that choose a configuration.

    Attributes:
        name: of the model.
        hidden: width of the residual streams.
        streams: residual streams.
        heads: attention heads.
        head_width: channels of a head, and of window and long-range records.
        rotary: rotated channels.
        query_rank: width of the compressed queries.
        index_heads: heads of the indexer.
        index_width: channels of an index key.
        routers: (experts, experts per token) of the model's and of the draft's layers.
        ngram: tokens of the longest n-gram.
        ngram_heads: hashes of each n-gram length.
        ngram_width: width of a table row.
    """

    name: str
    hidden: int
    streams: int
    heads: int
    head_width: int
    rotary: int
    query_rank: int
    index_heads: int
    index_width: int
    routers: tuple[tuple[int, int], ...]
    ngram: int
    ngram_heads: int
    ngram_width: int


RELEASED = ModelSizes(
    name="V4.1-Flash",
    hidden=5120,
    streams=4,
    heads=64,
    head_width=512,
    rotary=64,
    query_rank=1280,
    index_heads=32,
    index_width=128,
    routers=((384, 6), (128, 3)),
    ngram=4,
    ngram_heads=8,
    ngram_width=256,
)
TINY = ModelSizes(
    name="tiny8",
    hidden=128,
    streams=4,
    heads=4,
    head_width=64,
    rotary=32,
    query_rank=64,
    index_heads=4,
    index_width=64,
    routers=((8, 2), (4, 1)),
    ngram=4,
    ngram_heads=2,
    ngram_width=32,
)
MODELS = (RELEASED, TINY)
