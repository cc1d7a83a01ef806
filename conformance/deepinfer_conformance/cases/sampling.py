"""Cases of sampling: adjustments, integer probabilities, draws, log-probabilities. All of them are exact but for exp.

Legend: B rows, V vocabulary, N entries, W words of a bitmask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from deepinfer.accelerator import OpOptions
from deepinfer.accelerator.ops.sampling import (
    AllowedEntries,
    BiasEntries,
    LogitAdjustments,
    PenaltyEntries,
    RowStatus,
    SamplingRows,
    TokenEntries,
    TokenWeights,
)
from deepinfer_conformance.case import Specimen
from deepinfer_conformance.cases.axes import ONCE, Specimens
from deepinfer_conformance.data.call import OpCall
from deepinfer_conformance.data.draws import Draws

NAN, INFINITY = float("nan"), float("inf")
WIDTH = 97


def specimens(seed: int) -> Iterator[Specimen]:
    """Yield the specimens of group ``sampling``."""
    yield from _adjust(seed)
    yield from _weigh_and_sample(seed)
    yield from _uniforms(seed)
    yield from _draw(seed)
    yield from _log_probabilities(seed)


def _adjust(seed: int) -> Iterator[Specimen]:
    found = Specimens("sampling.adjust", seed, ONCE)

    def adjust(name: str, make: Callable[[Draws, int], LogitAdjustments], rows: int = 5) -> None:
        def build(draws: Draws, _: OpOptions) -> OpCall:
            logits_BV = draws.normal("logits", rows, WIDTH, scale=3.0)
            if rows > 3:
                logits_BV[1, 4], logits_BV[2, 5], logits_BV[3, 6] = NAN, INFINITY, -0.0
            return OpCall(found.op, {"logits_BV": logits_BV, "adjustments": make(draws, rows)})

        found.add(name, build)

    adjust("nothing", lambda _draws, _rows: LogitAdjustments())
    adjust("bias", lambda draws, rows: LogitAdjustments(bias=_bias(draws, rows)))
    adjust("penalties", lambda draws, rows: LogitAdjustments(penalties=_penalties(draws, rows)))
    adjust("bans", lambda draws, rows: LogitAdjustments(bans=_places(draws, "bans", rows, 9, repeated=True)))
    adjust("allowed", lambda draws, rows: LogitAdjustments(allowed=_allowed(draws, rows)))
    adjust("bitmask", lambda draws, rows: LogitAdjustments(bitmask_BW=_bitmask(draws, rows)))
    adjust("everything", _everything)
    adjust("everything_without_rows", _everything, rows=0)
    return iter(found)


def _places(draws: Draws, name: str, rows: int, count: int, *, repeated: bool = False) -> TokenEntries:
    flat = draws.permutation(name, rows * WIDTH)[: count if rows else 0]
    if repeated and len(flat) > 1:
        flat[1] = flat[0]
    return TokenEntries(flat // WIDTH, flat % WIDTH)


def _bias(draws: Draws, rows: int) -> BiasEntries:
    places = _places(draws, "bias", rows, 12)
    return BiasEntries(places.rows_N, places.ids_N, draws.normal("bias values", len(places.ids_N), scale=4.0))


def _penalties(draws: Draws, rows: int) -> PenaltyEntries:
    places = _places(draws, "penalties", rows, 40)
    count = len(places.ids_N)
    factors_N = (0.5 + draws.uniform("factors", count)).to(torch.float32)
    return PenaltyEntries(places.rows_N, places.ids_N, factors_N, draws.normal("subtract", count))


def _allowed(draws: Draws, rows: int) -> AllowedEntries:
    """Rows 0 and 2 are restricted; row 2 to nothing at all."""
    if rows == 0:
        none = torch.zeros(0, dtype=torch.int64)
        return AllowedEntries(none, TokenEntries(none, none))
    ids_N = draws.permutation("allowed", WIDTH)[:7]
    return AllowedEntries(torch.tensor([0, 2]), TokenEntries(torch.zeros(7, dtype=torch.int64), ids_N))


def _bitmask(draws: Draws, rows: int) -> torch.Tensor:
    words = -(-WIDTH // 32)
    mask = (draws.words("bitmask", rows * words) - 2**31).to(torch.int32).view(rows, words)
    if rows > 1:
        mask[0], mask[1] = -1, 0
    return mask


def _everything(draws: Draws, rows: int) -> LogitAdjustments:
    bans = _places(draws, "bans", rows, 9, repeated=True)
    return LogitAdjustments(
        _bias(draws, rows), _penalties(draws, rows), bans, _allowed(draws, rows), _bitmask(draws, rows)
    )


def sampling_rows(draws: Draws, rows: int, width: int) -> SamplingRows:
    """Return rows of every kind: greedy, plain, each filter alone and together, filters at their ends, forced."""
    kinds = torch.arange(rows) % 10
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.0, 1.3, 1.0, 0.9, 1.0, 2.0, 0.05], dtype=torch.float64)
    top_k = torch.tensor([0, 0, 5, 0, 0, 3, 1, width, width + 9, 0])
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.8, 1.0, 0.5, 1.0, 0.0, 0.95, 1.0], dtype=torch.float64)
    min_weight = torch.tensor([0, 0, 0, 0, 2**28, 0, 0, 0, 2**20, 0])
    forced = torch.tensor([-1, -1, -1, -1, -1, -1, -1, -1, -1, width - 1])
    return SamplingRows(
        temperature_B=temperature[kinds],
        top_k_B=top_k[kinds],
        top_p_B=top_p[kinds],
        min_weight_B=min_weight[kinds],
        seeds_B=draws.integers("seeds", 0, 2**31 - 1, rows) * 2**32 - 2**62,
        streams_B=draws.integers("streams", 0, 2**31 - 1, rows) - 2**30,
        forced_ids_B=forced[kinds],
    )


def logits_of(draws: Draws, name: str, rows: int, width: int) -> torch.Tensor:
    """Return logits: "plain", "ties", "flat", or "broken" (NaN, infinities, everything masked)."""
    logits_BV = draws.normal("logits", rows, width, scale=4.0)
    if name == "ties":
        logits_BV = draws.integers("logits", -3, 4, rows, width).to(torch.float32)
    elif name == "flat":
        logits_BV = torch.zeros(rows, width)
        logits_BV[:, ::2] = -0.0
    elif name == "broken":
        logits_BV[1, 3], logits_BV[2, 4] = NAN, INFINITY
        logits_BV[3], logits_BV[4, 5:] = -INFINITY, -INFINITY
        logits_BV[5, 0] = -INFINITY
    return logits_BV


LOGITS = (
    ("plain", 20, WIDTH),
    ("ties", 20, 64),
    ("flat", 10, 33),
    ("broken", 10, WIDTH),
    ("one_token", 10, 1),
    ("no_rows", 0, 40),
)


def _weigh_and_sample(seed: int) -> Iterator[Specimen]:
    for op in ("sampling.weigh", "sampling.sample"):
        found = Specimens(op, seed, ONCE)
        for name, rows, width in LOGITS:

            def build(
                draws: Draws, _: OpOptions, op: str = op, name: str = name, rows: int = rows, width: int = width
            ) -> OpCall:
                logits_BV = logits_of(draws, name, rows, width)
                return OpCall(op, {"logits_BV": logits_BV, "rows": sampling_rows(draws, rows, width)})

            found.add(name, build, by_rows=name in ("plain", "ties", "broken"))
        yield from found


def _uniforms(seed: int) -> Iterator[Specimen]:
    found = Specimens("sampling.uniforms", seed, ONCE)
    for rows in (0, 1, 64):

        def build(draws: Draws, _: OpOptions, rows: int = rows) -> OpCall:
            settings = sampling_rows(draws, rows, WIDTH)
            return OpCall(found.op, {"seeds_B": settings.seeds_B, "streams_B": settings.streams_B})

        found.add(f"{rows}_rows", build, by_rows=rows == 64)
    ends = torch.tensor([0, -1, 2**63 - 1, -(2**63), 2**32, 2**31])
    found.add("ends_of_the_range", lambda _draws, _: OpCall(found.op, {"seeds_B": ends, "streams_B": ends.flip(0)}))
    return iter(found)


def _draw(seed: int) -> Iterator[Specimen]:
    found = Specimens("sampling.draw", seed, ONCE)
    for name, rows, width in (("600_tokens", 12, 600), ("one_token", 3, 1), ("no_rows", 0, 30)):

        def build(draws: Draws, _: OpOptions, rows: int = rows, width: int = width) -> OpCall:
            weights_BV = draws.integers("weights", 0, 2**31 - 1, rows, width)
            weights_BV = torch.where(draws.uniform("zero", rows, width) < 0.5, 0, weights_BV)
            status_B = torch.zeros(rows, dtype=torch.int32)
            uniforms_B = draws.uniform("u", rows)
            if rows > 2:
                weights_BV[:, -1] = torch.clamp(weights_BV[:, -1], min=1)
                weights_BV[1], status_B[1] = 0, int(RowStatus.EMPTY)
                uniforms_B[0], uniforms_B[2] = 0.0, 1 - 2.0**-53
            return OpCall(
                found.op,
                {"weights": TokenWeights(weights_BV, weights_BV.sum(-1), status_B), "uniforms_B": uniforms_B},
            )

        found.add(name, build, by_rows=name == "600_tokens")
    return iter(found)


def _log_probabilities(seed: int) -> Iterator[Specimen]:
    for op in ("sampling.log_probabilities", "sampling.raw_log_probabilities"):
        found = Specimens(op, seed, ONCE)
        for name, rows, width in LOGITS:

            def build(
                draws: Draws, _: OpOptions, op: str = op, name: str = name, rows: int = rows, width: int = width
            ) -> OpCall:
                logits = logits_of(draws, name, rows, width)
                tokens = draws.integers("tokens", -1, width, rows)
                if op == "sampling.log_probabilities":
                    settings = sampling_rows(draws, rows, width)
                    arguments: dict[str, object] = {"logits_BV": logits, "rows": settings, "token_ids_B": tokens}
                else:
                    arguments = {"logits_TV": logits, "token_ids_T": tokens}
                return OpCall(op, {**arguments, "top_count": 6})

            found.add(name, build, by_rows=name in ("plain", "ties", "broken"))
        yield from found
