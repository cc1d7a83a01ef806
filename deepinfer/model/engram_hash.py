"""Engram's hash of the last few token ids to table rows: layout, multipliers, and a slow readable reference.

Everything here is exact integer arithmetic on the host; drivers are compared with it bit for bit.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from deepinfer.errors import ArgumentError, ConfigurationError

if TYPE_CHECKING:
    from deepinfer.model.config.base import ModelConfig

IMAGE_ROW = -1
"""What every column of an image position holds: no table row is read there."""

_SMALLEST_NGRAM = 2
_SEED_STEP = 10007
_INT64_MAX = 2**63 - 1
_SENTINEL = "\ue000"
_COLLAPSED = frozenset(" \t\r\n")
# The Unicode White_Space property; Python's own strip() also takes the four ASCII separators, which are not in it.
_WHITE_SPACE = (
    "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)


class TokenizerBackend(Protocol):
    """The part of a ``tokenizers.Tokenizer`` that the token map reads."""

    def get_vocab_size(self, *, with_added_tokens: bool = ...) -> int:
        """Number of token ids."""

    def id_to_token(self, id: int) -> str | None:  # the library's parameter name
        """The raw string of one token."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """The text of some tokens."""


@dataclass(frozen=True, slots=True)
class EngramLayout:
    """The hash of one Engram layer; columns are ordered by n-gram size, then head.

    Attributes:
        layer: the text layer before which the table is read.
        primes: one modulus per column; a column's rows fill ``[offset, offset + prime)`` of the table.
        offsets: first table row of each column.
        multipliers: one odd multiplier per look-back distance 0, 1, ....
        num_rows: rows of the table.
        num_heads: columns per n-gram size.
    """

    layer: int
    primes: tuple[int, ...]
    offsets: tuple[int, ...]
    multipliers: tuple[int, ...]
    num_rows: int
    num_heads: int


def engram_primes(num_layers: int, max_ngram_size: int, num_heads: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Give each layer's column moduli: the primes from ``vocab_size`` up, none used twice in the whole model."""
    used: set[int] = set()
    layers: list[tuple[int, ...]] = []
    for _ in range(num_layers):
        primes: list[int] = []
        for _ in range(_SMALLEST_NGRAM, max_ngram_size + 1):
            candidate = vocab_size - 1
            for _ in range(num_heads):
                candidate += 1
                while candidate in used or not _is_prime(candidate):
                    candidate += 1
                used.add(candidate)
                primes.append(candidate)
        layers.append(tuple(primes))
    return layers


def engram_multipliers(layer: int, compressed_vocab_size: int, max_ngram_size: int) -> tuple[int, ...]:
    """Give one odd multiplier per look-back distance, small enough that id times multiplier fits in int64."""
    bound = max(1, (_INT64_MAX // compressed_vocab_size) // 2)
    draws = np.random.default_rng(_SEED_STEP * layer).integers(0, bound, size=max_ngram_size, dtype=np.int64)
    return tuple(2 * int(draw) + 1 for draw in draws)


def engram_layouts(config: ModelConfig) -> tuple[EngramLayout, ...]:
    """Give the hash of every Engram layer, in the order of ``engram_layer_ids``."""
    all_primes = engram_primes(
        len(config.engram_layer_ids), config.engram_max_ngram_size, config.engram_n_heads, config.engram_vocab_size
    )
    layouts: list[EngramLayout] = []
    for layer, primes in zip(config.engram_layer_ids, all_primes, strict=True):
        offsets = tuple(sum(primes[:column]) for column in range(len(primes)))
        multipliers = engram_multipliers(layer, config.engram_compressed_vocab_size, config.engram_max_ngram_size)
        layouts.append(EngramLayout(layer, primes, offsets, multipliers, sum(primes), config.engram_n_heads))
    return tuple(layouts)


def token_map(backend: TokenizerBackend | None, config: ModelConfig) -> npt.NDArray[np.int64]:
    """Give the compressed id of every token id: int64 [vocab_size].

    The map is the identity if and only if ``engram_compressed_vocab_size`` equals ``vocab_size``; the tokenizer is
    then not looked at. Otherwise tokens whose texts differ only in case, accents, width or white space share an id.

    Raises:
        ConfigurationError: if a tokenizer is needed and absent, or gives another number of compressed ids.
    """
    wanted = config.engram_compressed_vocab_size
    if not config.engram_layer_ids or wanted == config.vocab_size:
        return np.arange(config.vocab_size, dtype=np.int64)
    if backend is None:
        raise ConfigurationError(
            "Engram token map",
            [
                f"engram_compressed_vocab_size {wanted} differs from vocab_size {config.vocab_size}, so the map is "
                "built from the tokenizer, and there is none. Put tokenizer.json beside the checkpoint"
            ],
        )
    size = backend.get_vocab_size(with_added_tokens=True)
    if size != config.vocab_size:
        raise ConfigurationError(
            "Engram token map",
            [f"the tokenizer has {size} ids and the configuration {config.vocab_size}; they must be of one model"],
        )
    first_seen: dict[str, int] = {}
    mapped = [first_seen.setdefault(_token_key(backend, token), len(first_seen)) for token in range(size)]
    if len(first_seen) != wanted:
        raise ConfigurationError(
            "Engram token map",
            [
                f"the tokenizer's texts give {len(first_seen)} compressed ids and engram_compressed_vocab_size is "
                f"{wanted}; the tokenizer is not the one this model was trained with"
            ],
        )
    return np.array(mapped, dtype=np.int64)


def normalise_text(text: str) -> str:
    """Fold width, accents, case and white space, the way Engram's token map compares texts."""
    decomposed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    # Every combining mark goes, spacing vowel signs included: that is what the released 99,092 ids come from.
    plain = "".join(char for char in decomposed if not unicodedata.category(char).startswith("M"))
    # Character by character, because str.lower() treats a final sigma by its neighbours.
    lowered = "".join(char.lower() for char in plain)
    collapsed: list[str] = []
    for char in lowered:
        if char not in _COLLAPSED:
            collapsed.append(char)
        elif not collapsed or collapsed[-1] != " ":
            collapsed.append(" ")
    folded = "".join(collapsed)
    if folded == " ":
        folded = _SENTINEL
    return folded.strip(_WHITE_SPACE).replace(_SENTINEL, " ")


def engram_rows_reference(
    ids: Sequence[int] | npt.NDArray[np.int64],
    image_mask: Sequence[bool] | npt.NDArray[np.bool_] | None,
    config: ModelConfig,
    layer_index: int,
    mapping: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.int64]:
    """Give the table rows of every position of one request from its start: int64 [T, columns], image rows all -1.

    Args:
        ids: the request's token ids from position 0.
        image_mask: True where a position lies inside an image span; None means nowhere.
        config: the model.
        layer_index: which Engram table, 0 for the first of ``engram_layer_ids``.
        mapping: what `token_map` gave; None asks for the identity, which the configuration must admit.

    Raises:
        ArgumentError: if an id is outside the vocabulary, the mask has another length, or there is no such table.
    """
    tokens = [int(token) for token in ids]
    is_image = [False] * len(tokens) if image_mask is None else [bool(flag) for flag in image_mask]
    _check_hash_arguments(tokens, is_image, config, layer_index)
    compressed = token_map(None, config) if mapping is None else mapping
    layout = engram_layouts(config)[layer_index]
    pad = int(compressed[config.engram_pad_token_id])
    rows_TC = np.full((len(tokens), len(layout.primes)), IMAGE_ROW, dtype=np.int64)
    for position in range(len(tokens)):
        if is_image[position]:
            continue
        rolling, blocked = 0, False
        for distance, multiplier in enumerate(layout.multipliers):
            source = position - distance
            blocked = blocked or source < 0 or is_image[source]
            rolling ^= (pad if blocked else int(compressed[tokens[source]])) * multiplier
            first = (distance - 1) * layout.num_heads
            for column in range(max(first, 0), first + layout.num_heads):
                rows_TC[position, column] = rolling % layout.primes[column] + layout.offsets[column]
    return rows_TC


def _check_hash_arguments(tokens: list[int], is_image: list[bool], config: ModelConfig, layer_index: int) -> None:
    problems: list[str] = []
    if len(is_image) != len(tokens):
        problems.append(f"image_mask has {len(is_image)} positions and ids {len(tokens)}; give one flag per id")
    if not 0 <= layer_index < len(config.engram_layer_ids):
        problems.append(f"layer_index {layer_index}: the model has {len(config.engram_layer_ids)} Engram tables")
    outside = sorted({token for token in tokens if not 0 <= token < config.vocab_size})
    if outside:
        problems.append(f"ids {outside[:5]} are outside the vocabulary of {config.vocab_size}")
    if problems:
        raise ArgumentError("engram_rows_reference", problems)


def _token_key(backend: TokenizerBackend, token: int) -> str:
    text = backend.decode([token], skip_special_tokens=False)
    if "\ufffd" in text:
        # Part of a multi-byte character: only the raw token tells such pieces apart.
        return backend.id_to_token(token) or ""
    return normalise_text(text) or text


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    if number % 2 == 0 or number % 3 == 0:
        return False
    # Every other prime lies beside a multiple of six.
    return all(number % divisor and number % (divisor + 2) for divisor in range(5, isqrt(number) + 1, 6))
