"""The suite's cases of drafting catch drivers that misread the contract, op by op, in the ways that are likely."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from deepinfer.accelerator import AcceleratorDriver
from deepinfer.accelerator.ops.drafting import DraftRuns, Proposals
from deepinfer.accelerator.wrapped import OpFunction
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.catalogue import catalogue
from deepinfer_conformance.mutants.rewiring import RewiredDriver
from deepinfer_conformance.outcomes import Outcome
from deepinfer_conformance.runner.attempt import attempt


def causal(original: OpFunction) -> OpFunction:
    """A block row sees only the rows up to its own."""

    def attend(query_RnHC, block_records_Rnb, window, sinks_H, window_size, block):
        rows = [
            original(query_RnHC[:, : row + 1], block_records_Rnb[:, : row + 1], window, sinks_H, window_size, block)[
                :, -1
            ]
            for row in range(query_RnHC.shape[1])
        ]
        return torch.stack(rows, 1)

    return attend


def one_position_more(original: OpFunction) -> OpFunction:
    def attend(query_RnHC, block_records_Rnb, window, sinks_H, window_size, block):
        return original(query_RnHC, block_records_Rnb, window, sinks_H, min(window_size + 1, window.ring), block)

    return attend


def window_of_each_row(original: OpFunction) -> OpFunction:
    """The context's window moves on with the row, as in ordinary attention."""

    def attend(query_RnHC, block_records_Rnb, window, sinks_H, window_size, block):
        rows = [
            original(query_RnHC, block_records_Rnb, window, sinks_H, max(1, window_size - row), block)[:, row]
            for row in range(query_RnHC.shape[1])
        ]
        return torch.stack(rows, 1)

    return attend


def ignores_the_window_start(original: OpFunction) -> OpFunction:
    def attend(query_RnHC, block_records_Rnb, window, sinks_H, window_size, block):
        everything = dataclasses.replace(block, window_start_R=torch.zeros_like(block.window_start_R))
        return original(query_RnHC, block_records_Rnb, window, sinks_H, window_size, everything)

    return attend


def no_limit(original: OpFunction) -> OpFunction:
    """The draft is drawn from everything, and only the kept set is cut."""

    def propose(logits_BV, rows, capacity):
        found: Proposals = original(logits_BV, rows, max(capacity, logits_BV.shape[1], 1))
        kept_BK = found.weights_BK.topk(min(capacity, found.weights_BK.shape[1]), -1).indices.sort(-1).values
        missing = (0, capacity - kept_BK.shape[1])
        return dataclasses.replace(
            found,
            ids_BK=torch.nn.functional.pad(found.ids_BK.gather(1, kept_BK), missing, value=-1),
            weights_BK=torch.nn.functional.pad(found.weights_BK.gather(1, kept_BK), missing),
        )

    return propose


def best_first(original: OpFunction) -> OpFunction:
    def propose(logits_BV, rows, capacity):
        found: Proposals = original(logits_BV, rows, capacity)
        order_BK = found.weights_BK.sort(dim=-1, descending=True, stable=True).indices
        return dataclasses.replace(
            found, ids_BK=found.ids_BK.gather(1, order_BK), weights_BK=found.weights_BK.gather(1, order_BK)
        )

    return propose


def no_reach(original: OpFunction) -> OpFunction:
    return lambda logits_BV, rows, reach: original(logits_BV, rows, 0.0)


def same_spread_everywhere(original: OpFunction) -> OpFunction:
    return lambda logits_BV, rows, reach: original(logits_BV, rows, reach / 2)


def verifies_placeholders(original: OpFunction) -> OpFunction:
    """A placeholder is read as the id 0."""

    def verify(logits_BV, rows, runs, *others):
        return original(logits_BV, rows, _without_placeholders(runs), *others)

    return verify


def matches_placeholders(original: OpFunction) -> OpFunction:
    return lambda tokens, runs: original(tokens, _without_placeholders(runs))


def _without_placeholders(runs: DraftRuns) -> DraftRuns:
    return dataclasses.replace(runs, token_ids_Rn=runs.token_ids_Rn.clamp(min=0))


def ignores_counts(original: OpFunction) -> OpFunction:
    def match(tokens, runs):
        most = tokens.token_ids_B.shape[0] - 1 - runs.first_row_R
        every_R = torch.minimum(torch.full_like(runs.counts_R, runs.token_ids_Rn.shape[1]), most)
        return original(tokens, dataclasses.replace(runs, counts_R=every_R))

    return match


def fresh_stream_after_rejection(original: OpFunction) -> OpFunction:
    def verify(logits_BV, rows, runs, distributions, resample_streams_B, accept_streams_B):
        del resample_streams_B
        return original(logits_BV, rows, runs, distributions, rows.streams_B, accept_streams_B)

    return verify


def no_residual(original: OpFunction) -> OpFunction:
    """After a rejection the target's whole distribution is drawn from."""

    def verify(logits_BV, rows, runs, distributions, resample_streams_B, accept_streams_B):
        found = original(logits_BV, rows, runs, distributions, resample_streams_B, accept_streams_B)
        nothing = dataclasses.replace(distributions, ids_RnK=torch.full_like(distributions.ids_RnK, -1))
        whole = original(logits_BV, rows, runs, nothing, resample_streams_B, accept_streams_B)
        return (
            whole
            if bool((found.accepted_R == whole.accepted_R).all())
            else dataclasses.replace(found, token_ids_Rm=whole.token_ids_Rm)
        )

    return verify


def bonus_is_a_resample(original: OpFunction) -> OpFunction:
    def verify(logits_BV, rows, runs, distributions, resample_streams_B, accept_streams_B):
        swapped = dataclasses.replace(rows, streams_B=resample_streams_B)
        return original(logits_BV, swapped, runs, distributions, resample_streams_B, accept_streams_B)

    return verify


MISREADINGS = {
    "drafting.attend": (causal, one_position_more, window_of_each_row, ignores_the_window_start),
    "drafting.propose": (no_limit, best_first),
    "drafting.guess": (no_reach, same_spread_everywhere),
    "drafting.verify": (verifies_placeholders, fresh_stream_after_rejection, no_residual, bonus_is_a_resample),
    "drafting.match": (matches_placeholders, ignores_counts),
}


@pytest.mark.parametrize(
    ("op", "misread"),
    [(op, misread) for op, each in MISREADINGS.items() for misread in each],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_misreading_is_caught(
    op: str, misread: Callable[[OpFunction], OpFunction], reference: AcceleratorDriver
) -> None:
    bench = Bench(RewiredDriver(reference, {op: misread}), reference)
    cases = [case for case in catalogue(0, "quick") if case.op == op and case.check == "numerics"]
    outcomes = {attempt(case, bench).outcome for case in cases if case.options.activation_dtype == torch.float32}
    assert Outcome.FAIL in outcomes
