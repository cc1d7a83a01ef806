"""Cases of drafting: a block's attention, drafts and guesses, and their verification. All but attention are exact.

Legend: R requests, n drafts a request, B rows, V vocabulary, K kept tokens, P positions, H heads, C width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from deepinfer.accelerator import OpOptions, WindowCache
from deepinfer.accelerator.ops.drafting import DraftBlock, DraftDistributions, DraftRuns
from deepinfer.accelerator.ops.sampling import SampledTokens
from deepinfer.numerics import Float32Record, RecordFormat, WindowRecord
from deepinfer_conformance.case import Specimen
from deepinfer_conformance.cases.axes import KV_NUMERIC, ONCE, Specimens
from deepinfer_conformance.cases.sampling import LOGITS, WIDTH, logits_of, sampling_rows
from deepinfer_conformance.data.call import OpCall
from deepinfer_conformance.data.draws import Draws
from deepinfer_conformance.data.worlds import NAN_BYTE

WINDOW, RING, HEADS, CHANNELS, SLOTS = 8, 12, 3, 32, 9
CAPACITY = 7


def specimens(seed: int) -> Iterator[Specimen]:
    """Yield the specimens of group ``drafting``."""
    yield from _attend(seed)
    yield from _propose_and_guess(seed)
    yield from _verify(seed)
    yield from _match(seed)


def _attend(seed: int) -> Iterator[Specimen]:
    found = Specimens("drafting.attend", seed, KV_NUMERIC)

    def attend(
        name: str,
        contexts: tuple[int, ...],
        drafts: int = 5,
        *,
        by_rows: bool = False,
        padding: int = 0,
        start: int = 0,
    ) -> None:
        def build(draws: Draws, options: OpOptions) -> OpCall:
            return attention_call(draws, options, contexts, drafts, padding=padding, start=start)

        found.add(name, build, by_rows=by_rows)

    attend("middle", (3, 30, 0, WINDOW, RING + 1), by_rows=True)
    for delta in (-1, 0, 1):
        attend(f"context_is_window{delta:+d}", (WINDOW + delta, 1))
        attend(f"context_is_ring{delta:+d}", (RING + delta,), drafts=4)
    attend("one_draft", (9, 2), drafts=1)
    attend("more_drafts_than_backtrack", (17, 40), drafts=11)
    attend("truncated_prompt", (30, 34), start=27)
    attend("padding_requests", (30, 5), padding=2)
    attend("no_rows", ())
    return iter(found)


def attention_call(
    draws: Draws, options: OpOptions, contexts: tuple[int, ...], drafts: int, *, padding: int = 0, start: int = 0
) -> OpCall:
    """Return a call over rings whose unowned places, those of rejected rows included, hold NaN bytes."""
    released = options.kv_cache_dtype == "released"
    record: RecordFormat = WindowRecord(CHANNELS) if released else Float32Record(CHANNELS)
    requests = len(contexts) + padding
    bytes_ZRb = torch.full((SLOTS, RING, record.nbytes), NAN_BYTE, dtype=torch.uint8)
    slots = draws.permutation("slots", SLOTS - 1)[:requests] + 1
    for number, context in enumerate(contexts):
        first = max(start, context - WINDOW, 0)
        keys_PC = draws.normal(f"keys/{number}", context, CHANNELS)[first:]
        bytes_ZRb[slots[number], torch.arange(first, context) % RING] = record.encode(keys_PC)
    block_RnC = draws.normal("block", requests, drafts, CHANNELS)
    block = DraftBlock(
        context_R=torch.tensor([*contexts, *[0] * padding], dtype=torch.int64),
        state_slots_R=slots,
        window_start_R=torch.full((requests,), start),
        valid_R=torch.arange(requests) < len(contexts),
    )
    return OpCall(
        "drafting.attend",
        {
            "query_RnHC": draws.normal("query", requests, drafts, HEADS, CHANNELS, dtype=options.activation_dtype),
            "block_records_Rnb": record.encode(block_RnC),
            "window": WindowCache(bytes_ZRb, record),
            "sinks_H": draws.normal("sinks", HEADS),
            "window_size": WINDOW,
            "block": block,
        },
    )


def _propose_and_guess(seed: int) -> Iterator[Specimen]:
    for op in ("drafting.propose", "drafting.guess"):
        found = Specimens(op, seed, ONCE)
        for name, rows, width in LOGITS:

            def build(
                draws: Draws, _: OpOptions, op: str = op, name: str = name, rows: int = rows, width: int = width
            ) -> OpCall:
                arguments: dict[str, object] = {
                    "logits_BV": logits_of(draws, name, rows, width),
                    "rows": sampling_rows(draws, rows, width),
                }
                # Without reach the plain way, which must be exactly `sampling.draw`.
                reach = 0.0 if name == "ties" else 0.3
                last = {"capacity": CAPACITY} if op == "drafting.propose" else {"reach": reach}
                return OpCall(op, {**arguments, **last})

            found.add(name, build, by_rows=name in ("plain", "ties", "broken"))
        yield from found


COUNTS = (0, 3, 1, 2, 3, 3, 0, 2)
"""Drafts of each request of the usual step."""


def runs_of(draws: Draws, counts: tuple[int, ...], width: int, *, placeholders: bool = False) -> DraftRuns:
    """Return runs of these lengths, side by side, with drafts of likely ids."""
    drafts = max(counts, default=0)
    starts = torch.tensor([0, *(count + 1 for count in counts)], dtype=torch.int64).cumsum(0)[:-1]
    tokens_Rn = draws.integers("drafts", 0, min(width, 4), len(counts), drafts)
    if placeholders:
        tokens_Rn[1, 0], tokens_Rn[3, 1], tokens_Rn[5, 2] = -1, -1, -1
    return DraftRuns(starts, torch.tensor(counts, dtype=torch.int64), tokens_Rn)


def distributions_of(draws: Draws, runs: DraftRuns, width: int, kept: int) -> DraftDistributions:
    """Return distributions that hold each draft: ids ascending, weights up to 2**31, one place of padding."""
    requests, drafts = runs.token_ids_Rn.shape
    ids_RnK = torch.full((requests, drafts, kept), -1)
    weights_RnK = torch.zeros(requests, drafts, kept, dtype=torch.int64)
    for request in range(requests):
        for draft in range(drafts):
            others = draws.permutation(f"kept/{request}/{draft}", width)[: kept - 2]
            own = runs.token_ids_Rn[request, draft].clamp(min=0).view(1)
            ids = torch.cat([own, others[others != own]]).sort().values
            ids_RnK[request, draft, : len(ids)] = ids
            weights = draws.integers(f"weights/{request}/{draft}", 1, 2**30, len(ids))
            weights_RnK[request, draft, : len(ids)] = weights
    return DraftDistributions(ids_RnK, weights_RnK, weights_RnK.sum(-1))


def _verify(seed: int) -> Iterator[Specimen]:
    found = Specimens("drafting.verify", seed, ONCE)

    def verify(
        name: str,
        logits: str = "plain",
        counts: tuple[int, ...] = COUNTS,
        *,
        placeholders: bool = False,
        by_rows: bool = False,
        same: bool = False,
    ) -> None:
        def build(draws: Draws, _: OpOptions) -> OpCall:
            rows = sum(counts) + len(counts)
            runs = runs_of(draws, counts, WIDTH, placeholders=placeholders)
            settings = sampling_rows(draws, rows, WIDTH)
            logits_BV = logits_of(draws, logits, rows, WIDTH)
            if logits == "plain" and rows:
                # Drafts come from the first ids: the target likes them too, so that runs of every length happen.
                logits_BV[:, :4] += 6.0
            if same:  # nothing is left after a rejection: draft and target agree
                logits_BV = torch.zeros_like(logits_BV)
                settings = dataclasses.replace(settings, forced_ids_B=torch.full((rows,), -1))
            return OpCall(
                found.op,
                {
                    "logits_BV": logits_BV,
                    "rows": settings,
                    "runs": runs,
                    "distributions": distributions_of(draws, runs, WIDTH, WIDTH if same else 9),
                    "resample_streams_B": settings.streams_B + 1,
                    "accept_streams_B": settings.streams_B + 2,
                },
            )

        found.add(name, build, by_rows=by_rows)

    verify("middle", by_rows=True)
    verify("placeholders", placeholders=True)
    verify("ties", "ties")
    verify("flat", same=True)
    verify("broken", "broken")
    verify("one_request", counts=(3,))
    verify("nobody_has_drafts", counts=(0, 0, 0))
    verify("no_rows", counts=())
    return iter(found)


def _match(seed: int) -> Iterator[Specimen]:
    found = Specimens("drafting.match", seed, ONCE)

    def match(
        name: str, counts: tuple[int, ...] = COUNTS, *, placeholders: bool = False, by_rows: bool = False
    ) -> None:
        def build(draws: Draws, _: OpOptions) -> OpCall:
            rows = sum(counts) + len(counts)
            runs = runs_of(draws, counts, WIDTH, placeholders=placeholders)
            tokens_B = draws.integers("tokens", 0, 4, rows)
            status_B = (draws.integers("status", 0, 12, rows) - 9).clamp(min=0).to(torch.int32)
            if placeholders:  # who reads a placeholder as id 0 would accept it
                tokens_B, status_B = torch.zeros_like(tokens_B), torch.zeros_like(status_B)
            tokens = SampledTokens(torch.where(status_B == 0, tokens_B, -1), status_B)
            return OpCall(found.op, {"tokens": tokens, "runs": runs})

        found.add(name, build, by_rows=by_rows)

    match("middle", by_rows=True)
    match("placeholders", placeholders=True)
    match("one_request", counts=(3,))
    match("nobody_has_drafts", counts=(0, 0, 0))
    match("no_rows", counts=())
    return iter(found)
