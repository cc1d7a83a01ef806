"""What the oracle's tokens ought to be: computed from a request's history alone, without pages, rings or slots.

Positions are plain list places here. Only the hash functions are shared with the driver, none of its memory code.

Legend: T new rows, P positions, E entries, G n-gram length.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from deepinfer.accelerator.ops.selection import SelectionRule
from deepinfer.errors import ArgumentError
from deepinfer_conformance.drivers.oracle.hashing import (
    Flags,
    Hashes,
    Integers,
    Role,
    TokenRule,
    attended,
    combined,
    first_expert,
    linear_of_parts,
    ngram_of,
    pair_of,
    pending_linear,
    picks_term,
    query_of,
    remembered,
    score_of,
    term,
    token_of,
)
from deepinfer_conformance.drivers.oracle.model import OracleModel
from deepinfer_conformance.drivers.oracle.selection import select

_ROWS_AT_ONCE = 256
"""Rows that are scored against all entries at a time, so that a long prompt does not need rows times entries."""


@dataclass(slots=True)
class _Layer:
    """What later rows of a request need to know of one layer.

    Attributes:
        window_sums: [P + 1], sums of the window terms before each position.
        entry_sums: [E + 1], sums of the entry terms, owners only.
        keys: [E], terms of the index keys, owners only.
        waiting: `pending_linear` of the last row, owners with ratio 2 only.
    """

    window_sums: Hashes = field(default_factory=lambda: np.zeros(1, dtype=np.uint64))
    entry_sums: Hashes = field(default_factory=lambda: np.zeros(1, dtype=np.uint64))
    keys: Hashes = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    waiting: Hashes = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))


class OracleHistory:
    """The history of one request, and the token that the oracle driver gives after it.

    Extending by all tokens at once or one by one comes to the same. Tensors are never changed in place, so a copy
    shares them.
    """

    def __init__(
        self,
        model: OracleModel,
        vocab_size: int,
        *,
        rule: TokenRule | None = None,
        token_map: Sequence[int] | None = None,
    ) -> None:
        """Start an empty history.

        Args:
            model: the model's configuration.
            vocab_size: width of the logits.
            rule: how the driver was told to choose tokens; None means the driver's default.
            token_map: Engram's compressed id of every token id; None means the identity.
        """
        self._model = model
        self._vocab_size = vocab_size
        self._rule = rule or TokenRule()
        self._token_map = None if token_map is None else np.array(token_map, dtype=np.int64)
        self._layers = [_Layer() for _ in range(model.num_hidden_layers)]
        self._mapped = np.zeros(0, dtype=np.int64)
        self._last: tuple[Integers, Integers] | None = None

    def __len__(self) -> int:
        return int(self._mapped.shape[0])

    def copy(self) -> Self:
        """Return an independent history that continues from here: what a fork has."""
        twin = copy.copy(self)
        twin._layers = [copy.copy(layer) for layer in self._layers]
        return twin

    def extend(self, ids: Sequence[int], image_mask: Sequence[bool] | None = None) -> None:
        """Append tokens; ``image_mask`` marks those inside image spans (their embedding must be that of their id)."""
        problems = [f"id {token} is outside the vocabulary" for token in ids if not 0 <= token < self._vocab_size]
        if image_mask is not None and len(image_mask) != len(ids):
            problems.append(f"{len(image_mask)} image flags for {len(ids)} ids")
        if problems:
            raise ArgumentError("OracleHistory.extend", problems)
        if not ids:
            return
        rows = _Rows(
            positions=np.arange(len(self), len(self) + len(ids)),
            ids=np.array(ids, dtype=np.int64),
            images=np.array(image_mask or [False] * len(ids), dtype=np.bool_),
        )
        look_back_TG = self._look_back(rows)
        digests = np.zeros_like(rows.ids)
        picks: dict[int, Integers] = {}
        candidates: Integers | None = None
        for number, layer in enumerate(self._layers):
            if number in self._model.engram_layer_ids:
                pad_id = int(self._map(np.array([self._model.engram_pad_token_id]))[0])
                folded = remembered(digests, ngram_of(look_back_TG, pad_id))
                digests = np.where(rows.images, digests, folded)
            self._remember(layer, number, rows, digests)
            ratio = self._model.compress_ratios[number]
            linear = linear_of_parts(rows.ids, digests, rows.positions)
            if ratio and number in self._model.index_source_layer_ids:
                picks[number], published = self._pick(number, rows, linear, candidates)
                candidates = candidates if published is None else published
            digests = self._attend(layer, number, rows, linear, picks)
            first = first_expert(linear_of_parts(rows.ids, digests, np.zeros_like(digests)), rows.images, self._experts)
            slots_Tk = (first[:, None] + np.arange(self._model.num_experts_per_tok)) % self._experts + 1
            digests = combined(digests, slots_Tk)
        self._last = (rows.ids[-1:], digests[-1:])

    def next_token(self) -> int:
        """Return the token that follows; the history must not be empty."""
        if self._last is None:
            raise ArgumentError("OracleHistory.next_token", ["the history is empty; extend it first"])
        ids, digests = self._last
        return int(token_of(ids, digests, self._vocab_size, self._rule)[0])

    @property
    def _experts(self) -> int:
        return self._model.n_routed_experts

    def _map(self, ids: Integers) -> Integers:
        return ids if self._token_map is None else self._token_map[ids]

    def _look_back(self, rows: _Rows) -> Integers:
        """Return [T, G] mapped ids, -1 where there is none, and remember the new ones."""
        mapped = np.where(rows.images, -1, self._map(rows.ids))
        self._mapped = np.concatenate((self._mapped, mapped))
        size = max(self._model.engram_max_ngram_size, 1)
        padded = np.concatenate((np.full(size - 1, -1, dtype=np.int64), self._mapped))
        return np.stack([padded[rows.positions + size - 1 - back] for back in range(size)], axis=1)

    def _remember(self, layer: _Layer, number: int, rows: _Rows, digests: Integers) -> None:
        """Append the rows' window terms, and the entries that they complete."""
        linear = linear_of_parts(rows.ids, digests, rows.positions)
        layer.window_sums = _appended(layer.window_sums, term(Role.WINDOW, rows.positions, linear))
        ratio = self._model.compress_ratios[number]
        if not ratio or number not in self._model.kv_source_layer_ids:
            return
        if ratio == 1:
            places, entry_ids, entry_digests = rows.positions, rows.ids, digests
        else:
            later = linear_of_parts(rows.ids, digests, rows.positions + 1)
            halves = np.concatenate((layer.waiting, pending_linear(linear, later)))
            start = int(rows.positions[0]) - int(layer.waiting.shape[0])
            pairs = halves[: halves.shape[0] // 2 * 2].reshape(-1, 2)
            pair = pair_of(pairs[:, 0], pairs[:, 1])
            places = start // 2 + np.arange(pairs.shape[0])
            entry_ids, entry_digests = pair.ids, pair.digests
            layer.waiting = halves[pairs.size :]
        entry_linear = linear_of_parts(entry_ids, entry_digests, places * ratio)
        layer.entry_sums = _appended(layer.entry_sums, term(Role.ENTRY, places, entry_linear))
        layer.keys = np.concatenate((layer.keys, term(Role.KEY, places, entry_linear)))

    def _pick(
        self, number: int, rows: _Rows, linear: Hashes, candidates: Integers | None
    ) -> tuple[Integers, Integers | None]:
        """Return the rows' picks and, of the publishing layer, their candidate blocks."""
        model = self._model
        source = model.candidate_source_layer_id
        owner = _owner(model.kv_source_layer_ids, number)
        rule = SelectionRule(
            top_k=model.index_topk,
            candidate_blocks=model.candidate_topk_blocks,
            candidate_block_size=model.candidate_block_size,
            publish=number == source,
        )
        limit = candidates if source is not None and owner == source < number else None
        keys, queries = self._layers[owner].keys, query_of(linear)
        visible = (rows.positions + 1) // model.compress_ratios[number]
        parts = [
            select(
                score_of(queries[start:stop, None], keys),
                visible[start:stop],
                rule,
                None if limit is None else limit[start:stop],
            )
            for start, stop in _pieces(int(rows.ids.shape[0]))
        ]
        blocks = [part.candidates_TB for part in parts if part.candidates_TB is not None]
        return np.concatenate([part.entries_TK for part in parts]), np.concatenate(blocks) if blocks else None

    def _attend(self, layer: _Layer, number: int, rows: _Rows, linear: Hashes, picks: dict[int, Integers]) -> Integers:
        """Return the digests after attention."""
        model, positions = self._model, rows.positions
        start = np.maximum(positions + 1 - model.sliding_window, 0)
        window_sum = layer.window_sums[positions + 1] - layer.window_sums[start]
        ratio = model.compress_ratios[number]
        if not ratio:
            return attended(linear, positions, window_sum, None, None)
        owner = self._layers[_owner(model.kv_source_layer_ids, number)]
        picked = picks[_owner(model.index_source_layer_ids, number)]
        return attended(linear, positions, window_sum, owner.entry_sums[(positions + 1) // ratio], picks_term(picked))


def oracle_tokens(
    prompt_ids: Sequence[int],
    count: int,
    config: OracleModel,
    vocab_size: int,
    *,
    rule: TokenRule | None = None,
    token_map: Sequence[int] | None = None,
) -> list[int]:
    """Return the ``count`` tokens that the oracle driver gives after a prompt, whatever the scheduler does meanwhile.

    Args:
        prompt_ids: the prompt, not empty.
        count: tokens to make; an end token does not stop them.
        config: the model's configuration.
        vocab_size: width of the logits.
        rule: how the driver was told to choose tokens; None means the driver's default.
        token_map: Engram's compressed id of every token id; None means the identity.
    """
    history = OracleHistory(config, vocab_size, rule=rule, token_map=token_map)
    history.extend(prompt_ids)
    tokens: list[int] = []
    for _ in range(count):
        if tokens:
            history.extend(tokens[-1:])
        tokens.append(history.next_token())
    return tokens


@dataclass(frozen=True, slots=True)
class _Rows:
    """New rows of a history, one value each."""

    positions: Integers
    ids: Integers
    images: Flags


def _owner(layers: Sequence[int], number: int) -> int:
    return max(layer for layer in layers if layer <= number)


def _appended(sums: Hashes, terms: Hashes) -> Hashes:
    return np.concatenate((sums, sums[-1:] + terms.cumsum()))


def _pieces(rows: int) -> list[tuple[int, int]]:
    return [(start, min(start + _ROWS_AT_ONCE, rows)) for start in range(0, rows, _ROWS_AT_ONCE)]
