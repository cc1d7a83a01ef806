"""Sampling: logit adjustments, exact integer probabilities, counter-based draws, log-probabilities (engine.md 6).

One step's order of operations is fixed: logit bias, penalties, bans (blacklist, end-token ban), allowed ids and the
grammar's bitmask (:meth:`SamplingOps.adjust`); temperature, top-k, top-p, min-p (:meth:`SamplingOps.weigh`);
the draw (:meth:`SamplingOps.draw`); last, a forced token takes the place of the drawn one.

Nothing here depends on a row's neighbours: every value is elementwise, an order-free maximum, or an integer sum.

Legend: B sampled rows, V vocabulary, N listed entries, M restricted rows, W words of a bitmask, T rows of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import torch

from deepinfer.accelerator.ops.base import OpGroup, not_implemented, op

WEIGHT_BITS = 31
"""The largest token of a row weighs ``2 ** WEIGHT_BITS``."""

NORMALISER_BITS = 44
"""Log-probabilities sum exponentials in integer units of ``2 ** -NORMALISER_BITS`` (V up to 2**19 fits int64)."""

NO_MASS = -9999.0
"""Stands in log-probabilities for minus infinity, which JSON cannot carry; lower values are raised to it."""


class RowStatus(IntEnum):
    """What became of one sampled row."""

    OK = 0
    NAN = 1
    """The row holds NaN or +inf: the request ends as ``invalid``, nothing is emitted."""
    EMPTY = 2
    """Every token is at -inf (all masked): nothing can be drawn, nothing is emitted."""


@dataclass(frozen=True, slots=True)
class TokenEntries:
    """A sparse set of (row, token id) places; duplicates are allowed and mean the same as one.

    Attributes:
        rows_N: int64 [N], each in [0, B).
        ids_N: int64 [N], each in [0, V).
    """

    rows_N: torch.Tensor
    ids_N: torch.Tensor


@dataclass(frozen=True, slots=True)
class BiasEntries:
    """Sparse additions to logits; no (row, id) appears twice.

    Attributes:
        rows_N: int64 [N], each in [0, B).
        ids_N: int64 [N], each in [0, V).
        values_N: float32 [N], finite.
    """

    rows_N: torch.Tensor
    ids_N: torch.Tensor
    values_N: torch.Tensor


@dataclass(frozen=True, slots=True)
class PenaltyEntries:
    """Sparse penalties of tokens that were seen before; no (row, id) appears twice.

    Attributes:
        rows_N: int64 [N], each in [0, B).
        ids_N: int64 [N], each in [0, V).
        factors_N: float32 [N], the repetition penalty, positive and finite (1: none).
        subtract_N: float32 [N], frequency penalty times count plus presence penalty (0: none).
    """

    rows_N: torch.Tensor
    ids_N: torch.Tensor
    factors_N: torch.Tensor
    subtract_N: torch.Tensor


@dataclass(frozen=True, slots=True)
class AllowedEntries:
    """The only tokens that some rows may emit.

    Attributes:
        restricted_rows_M: int64 [M], the rows that are restricted, each once.
        entries: the allowed places; every row of theirs is one of ``restricted_rows_M``.
    """

    restricted_rows_M: torch.Tensor
    entries: TokenEntries


@dataclass(frozen=True, slots=True)
class LogitAdjustments:
    """Everything that changes logits before the temperature, sparse; None where no row of the step asks for it.

    Attributes:
        bias: additions, applied first.
        penalties: repetition, frequency and presence penalties.
        bans: places that must not be emitted.
        allowed: rows that may emit listed tokens only.
        bitmask_BW: int32 [B, ceil(V / 32)]; bit ``id % 32`` of word ``id // 32`` set means allowed (the layout of
            grammar compilers; bits beyond V are ignored). Rows without a grammar hold all ones.
    """

    bias: BiasEntries | None = None
    penalties: PenaltyEntries | None = None
    bans: TokenEntries | None = None
    allowed: AllowedEntries | None = None
    bitmask_BW: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What the host knows about a :class:`SamplingRows`, so that an op can skip work without reading the device.

    A flag may be True although no row needs it, never False although one does. No result depends on it.

    Attributes:
        has_greedy: some row may have temperature 0.
        has_drawn: some row may have a positive temperature.
        has_top_k: some row may have a top-k.
        has_top_p: some row may have a top-p below 1.
        has_min_p: some row may have a positive least weight.
        has_forced: some row may have a forced token.
        bounded_by_top_k: every row with a top-p has a top-k too.
        largest_top_k: no row's top-k is above this (0 without top-k).
    """

    has_greedy: bool = True
    has_drawn: bool = True
    has_top_k: bool = True
    has_top_p: bool = True
    has_min_p: bool = True
    has_forced: bool = True
    bounded_by_top_k: bool = False
    largest_top_k: int = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The settings of B sampled rows, one value a row.

    Attributes:
        temperature_B: float64 [B], finite and >= 0; 0 means exact argmax.
        top_k_B: int64 [B]; 0 or >= V: no filter.
        top_p_B: float64 [B] in [0, 1]; 1: no filter.
        min_weight_B: int64 [B], ``floor(min_p * 2**31)``; 0: no filter.
        seeds_B: int64 [B], the keys of the random draws.
        streams_B: int64 [B], their counters.
        forced_ids_B: int64 [B], the token to emit whatever is drawn, or -1.
        facts: what the host knows about these tensors.
    """

    temperature_B: torch.Tensor
    top_k_B: torch.Tensor
    top_p_B: torch.Tensor
    min_weight_B: torch.Tensor
    seeds_B: torch.Tensor
    streams_B: torch.Tensor
    forced_ids_B: torch.Tensor
    facts: RowFacts = RowFacts()

    def select(self, rows_N: torch.Tensor) -> SamplingRows:
        """Return the settings of some rows (int64 [N]), in that order, on the same device."""
        return SamplingRows(
            temperature_B=self.temperature_B.index_select(0, rows_N),
            top_k_B=self.top_k_B.index_select(0, rows_N),
            top_p_B=self.top_p_B.index_select(0, rows_N),
            min_weight_B=self.min_weight_B.index_select(0, rows_N),
            seeds_B=self.seeds_B.index_select(0, rows_N),
            streams_B=self.streams_B.index_select(0, rows_N),
            forced_ids_B=self.forced_ids_B.index_select(0, rows_N),
            facts=self.facts,
        )

    def limited(self, capacity: int, vocabulary: int) -> SamplingRows:
        """Return the settings with a top-k of at most ``capacity`` in force, in every row."""
        if capacity >= vocabulary:
            return self
        is_limited_B = (self.top_k_B > 0) & (self.top_k_B < capacity)
        return replace(
            self,
            top_k_B=torch.where(is_limited_B, self.top_k_B, capacity),
            facts=replace(self.facts, has_top_k=True, bounded_by_top_k=True, largest_top_k=capacity),
        )

    def slice(self, start: int, stop: int) -> SamplingRows:
        """Return views of the rows from ``start`` to ``stop``."""
        return SamplingRows(
            temperature_B=self.temperature_B[start:stop],
            top_k_B=self.top_k_B[start:stop],
            top_p_B=self.top_p_B[start:stop],
            min_weight_B=self.min_weight_B[start:stop],
            seeds_B=self.seeds_B[start:stop],
            streams_B=self.streams_B[start:stop],
            forced_ids_B=self.forced_ids_B[start:stop],
            facts=self.facts,
        )


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """Integer probabilities: token i of row b is drawn with chance ``weights[b, i] / sums[b]``, exactly.

    Attributes:
        weights_BV: int64 [B, V], 0 for tokens that were masked or filtered away, at most ``2**31``.
        sums_B: int64 [B], the rows' sums; 0 where the status is not OK.
        status_B: int32 [B], values of :class:`RowStatus`.
    """

    weights_BV: torch.Tensor
    sums_B: torch.Tensor
    status_B: torch.Tensor


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The outcome of a draw.

    Attributes:
        token_ids_B: int64 [B], in [0, V), or -1 where the status is not OK.
        status_B: int32 [B], values of :class:`RowStatus`.
    """

    token_ids_B: torch.Tensor
    status_B: torch.Tensor


@dataclass(frozen=True, slots=True)
class TokenLogProbabilities:
    """Log-probabilities of one chosen token and of the best tokens of each row.

    Attributes:
        chosen_B: float32 [B], of the chosen token; ``NO_MASS`` where it has none.
        top_ids_BN: int64 [B, N], the best tokens with mass, best first, then -1.
        top_values_BN: float32 [B, N], theirs, then ``NO_MASS``.
    """

    chosen_B: torch.Tensor
    top_ids_BN: torch.Tensor
    top_values_BN: torch.Tensor


class SamplingOps(OpGroup):
    """From logits to tokens, exactly repeatable on every device."""

    group = "sampling"

    @op
    def adjust(self, logits_BV: torch.Tensor, adjustments: LogitAdjustments) -> None:
        """Apply bias, penalties, bans, allowed ids and bitmask to the logits, in place, in this order.

        * bias: ``x + value``.
        * penalties: ``y = x / factor if x > 0 else x * factor``, then ``y - subtract``; one float32 rounding each.
        * bans, ids outside a restricted row's allowed set, and cleared bits of the bitmask: ``x + (-inf)``, so that a
          NaN or +inf which the model produced stays visible (as NaN) even where a mask covers it.

        Places that nothing names keep their bits. Every step is one float32 operation an element.

        Args:
            logits_BV: float32 [B, V], contiguous in V; overwritten.
            adjustments: sparse changes on the same device. Entries are in range: the caller has checked them, an
                implementation need not. An empty entry list changes nothing (an ``allowed`` row without entries is
                masked whole).

        B = 0 does nothing. Graph-safe if the number of entries is fixed. Class R2. Source: engine.md section 6, order
        of all steps; penalties as in the CTRL paper (repetition) and the OpenAI interface (frequency, presence).
        """
        not_implemented(self, "adjust")

    @op
    def weigh(self, logits_BV: torch.Tensor, rows: SamplingRows) -> TokenWeights:
        """Return the integer probabilities of every token, by the exact definition.

        Per row, with ``M = max(x)``: status NAN if M is NaN or +inf (any NaN in the row makes it NaN), EMPTY if M is
        -inf (or V = 0), else OK, and then, all in float64 and int64:

        1. temperature ``T > 0``: ``w_i = floor(exp((x_i - M) / T) * 2**31)``, subtraction first, then division, never
           a reciprocal. ``T = 0``: ``w = 2**31`` on the lowest id with ``x_i == M`` and 0 elsewhere.
        2. total order of the tokens: w descending, then id ascending.
        3. top-k, if ``1 <= k < V``: the first k of that order stay. ``S_k``: the sum of what stays.
        4. top-p, if ``p < 1``: of those the shortest prefix whose sum is > ``floor(p * S_k)`` (product in float64)
           stays; it holds at least the first token.
        5. min-p: of those stay the tokens with ``w_i >= min_weight``; the first token always does.

        What does not stay gets 0. Rows that are not OK are all 0.

        Args:
            logits_BV: float32 [B, V], after :meth:`adjust`; not changed.
            rows: the settings; seeds, streams and forced ids are not used.

        Returns:
            New tensors on the device of the logits. B = 0 gives empty tensors.

        Determinism: R2, and the same on every driver but for the last bit of ``exp``: it must be a float64 function
        within 1 ulp whose value does not depend on the element's place, so two drivers may differ by 1 in about one
        weight per million. Everything after ``exp`` is exact. Source: engine.md section 6.
        """
        not_implemented(self, "weigh")

    @op
    def uniforms(self, seeds_B: torch.Tensor, streams_B: torch.Tensor) -> torch.Tensor:
        """Return float64 [B] in [0, 1): the 53 high bits of Philox4x32-10(key = seed, counter = stream) / 2**53.

        Defined by :func:`deepinfer.numerics.uniform_53`; every driver returns the same bits. Seeds and streams are
        int64, negative values taken modulo 2**64. B = 0 gives an empty tensor.
        """
        not_implemented(self, "uniforms")

    @op
    def draw(self, weights: TokenWeights, uniforms_B: torch.Tensor) -> torch.Tensor:
        """Return the token of each row: the first in id order whose cumulative weight is > ``min(floor(u*S), S-1)``.

        Args:
            weights: integer probabilities.
            uniforms_B: float64 [B] in [0, 1); the product ``u * S`` is rounded once, in float64.

        Returns:
            int64 [B]; -1 for rows that are not OK. A token of weight 0 is never returned. B = 0 gives an empty
            tensor. Exact: the same on every driver for the same weights.
        """
        not_implemented(self, "draw")

    @op
    def sample(self, logits_BV: torch.Tensor, rows: SamplingRows) -> SampledTokens:
        """Return ``draw(weigh(logits, rows), uniforms(seeds, streams))``, forced tokens in their place.

        This is the op of the step; it exists so that an implementation need not store weights of the size [B, V]. It
        must agree with the three ops it is made of on every row.

        A row with ``forced_ids >= 0`` returns that id if its status is OK, whatever masks and filters say of it; rows
        that are not OK return -1 even if a token is forced.

        Args:
            logits_BV: float32 [B, V], after :meth:`adjust`; not changed.
            rows: the settings.

        Returns:
            New tensors. B = 0 gives empty tensors. Graph-safe where the driver says so. Class R2.
        """
        not_implemented(self, "sample")

    @op
    def log_probabilities(
        self, logits_BV: torch.Tensor, rows: SamplingRows, token_ids_B: torch.Tensor, top_count: int
    ) -> TokenLogProbabilities:
        """Return processed log-probabilities: after masks, temperature and filters, renormalised.

        A token is kept if its logit is above -inf and, where the row has a filter in force (top-k, top-p, min-p or
        temperature 0), its weight of :meth:`weigh` is positive. For kept tokens, with ``M = max(x)``:
        ``log p_i = (x_i - M) / T - ln(N / 2**44)``, ``N = sum over kept j of floor(exp((x_j - M) / T) * 2**44)``, in
        float64 and int64, rounded once to float32, at least ``NO_MASS``. Temperature 0: 0.0 for the one kept token.

        Without filters and at temperature 1 this equals :meth:`raw_log_probabilities` of the same logits, up to the
        order of the list.

        Args:
            logits_BV: float32 [B, V], after :meth:`adjust`; not changed.
            rows: the settings; seeds, streams and forced ids are not used.
            token_ids_B: int64 [B], the chosen (drawn or forced) tokens, or -1.
            top_count: N, how many of the best tokens to list; 0 lists none; may exceed V.

        Returns:
            The chosen token's value (``NO_MASS`` if it is not kept, -1, or the row is not OK) and the first ``N``
            tokens of positive weight in the total order (weight descending, id ascending); rows that are not OK list
            none. A list of N is the beginning of every longer one. B = 0 gives empty tensors. Class R2.
        """
        not_implemented(self, "log_probabilities")

    @op
    def raw_log_probabilities(
        self, logits_TV: torch.Tensor, token_ids_T: torch.Tensor, top_count: int
    ) -> TokenLogProbabilities:
        """Return log-probabilities of the logits as they are: log-softmax at temperature 1, nothing filtered.

        ``log p_i = (x_i - M) - ln(N / 2**44)``, ``N = sum_j floor(exp(x_j - M) * 2**44)``, in float64 and int64,
        rounded once to float32, at least ``NO_MASS``. Used for raw log-probabilities (logits before :meth:`adjust`)
        and for prompts, whose rows the caller hands over in pieces, so that vocabulary x prompt never exists at once.

        Args:
            logits_TV: float32 [T, V]; not changed.
            token_ids_T: int64 [T], the tokens that really follow, or -1.
            top_count: how many of the best tokens to list, by (logit descending, id ascending); -0 equals +0.

        Returns:
            As :meth:`log_probabilities`; tokens at -inf have no mass and are not listed. A row that holds NaN or
            +inf, or is all -inf, has no values at all. T = 0 gives empty tensors. Class R2.
        """
        not_implemented(self, "raw_log_probabilities")
