"""Drafts over the released vocabulary, against the readable reference; all that is launched is listed.

Legend: R requests, n drafts a request, m = n + 1, B rows, V vocabulary, K kept tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from deepinfer.accelerator import OpOptions
from deepinfer.accelerator.ops.drafting import DraftDistributions, DraftRuns
from deepinfer.accelerator.ops.sampling import SamplingRows
from deepinfer.errors import OpRefusedError
from deepinfer_cpu_ref import Driver as CpuRef
from deepinfer_triton.drafting import TritonDraftingOps
from deepinfer_triton.registry import configurations

if TYPE_CHECKING:
    from deepinfer_conformance.triton_cpu import Session

OPTIONS = OpOptions()
VOCABULARY = 129_280
CAPACITY = 300
"""More than one block of kept tokens."""


def readable():  # type: ignore[no-untyped-def]
    return CpuRef(readable=True).op_groups(OPTIONS)["drafting"]


def settings(count: int, top_k: int = 0) -> SamplingRows:
    """Return rows without filters, which take the interpreter long over such a vocabulary, but for a top-k."""
    return SamplingRows(
        temperature_B=torch.tensor([1.0, 0.7, 1.2], dtype=torch.float64).repeat(count)[:count],
        top_k_B=torch.full((count,), top_k),
        top_p_B=torch.ones(count, dtype=torch.float64),
        min_weight_B=torch.zeros(count, dtype=torch.int64),
        seeds_B=torch.arange(count) * 977 - 3,
        streams_B=torch.arange(count) * 4,
        forced_ids_B=torch.full((count,), -1),
    )


def logits(count: int) -> torch.Tensor:
    logits_BV = torch.randn((count, VOCABULARY), generator=torch.Generator().manual_seed(count))
    # Few likely tokens in distant chunks, the last id among them, so that drafts are both accepted and rejected.
    logits_BV[:, [3, 4096, 70_001, VOCABULARY - 1]] += 14.0
    return logits_BV


def test_drafts_over_the_whole_vocabulary_are_those_of_the_reference(session: Session) -> None:
    logits_BV, rows = logits(1), settings(1)
    got = TritonDraftingOps(OPTIONS).propose(logits_BV, rows, CAPACITY)
    wanted = readable().propose(logits_BV, rows, CAPACITY)
    assert torch.equal(got.token_ids_B, wanted.token_ids_B)
    assert torch.equal(got.ids_BK, wanted.ids_BK)
    assert (got.ids_BK >= 0).sum(-1).tolist() == [CAPACITY]
    # Two exponentials may differ in the last bit of float64, and so in one unit of a weight.
    assert (got.weights_BK - wanted.weights_BK).abs().max() <= 1


@pytest.mark.parametrize("reach", [0.0, 0.25])
def test_guesses_over_the_whole_vocabulary_are_those_of_the_reference(reach: float, session: Session) -> None:
    logits_BV, rows = logits(2), settings(2)
    got = TritonDraftingOps(OPTIONS).guess(logits_BV, rows, reach)
    assert torch.equal(got.token_ids_B, readable().guess(logits_BV, rows, reach).token_ids_B)


def test_runs_over_the_whole_vocabulary_are_those_of_the_reference(session: Session) -> None:
    drafts, requests = 2, 3
    token_ids_Rn = torch.tensor([[3, 70_001], [4096, 5], [VOCABULARY - 1, VOCABULARY - 1]])
    starts_R = torch.arange(requests) * (drafts + 1)
    runs = DraftRuns(starts_R, torch.full((requests,), drafts), token_ids_Rn)
    generator = torch.Generator().manual_seed(5)
    others_K = torch.randperm(VOCABULARY, generator=generator)[: CAPACITY - 1]
    ids_RnK = torch.cat([others_K.expand(requests, drafts, -1), token_ids_Rn[:, :, None]], -1).sort(-1).values
    ids_RnK[:, :, 1:][ids_RnK[:, :, 1:] == ids_RnK[:, :, :-1]] = -1  # a draft that was among the others
    weights_RnK = torch.randint(1, 2**20, ids_RnK.shape, generator=generator)
    weights_RnK = torch.where(ids_RnK == token_ids_Rn[:, :, None], 2**27, weights_RnK).masked_fill(ids_RnK < 0, 0)
    distributions = DraftDistributions(ids_RnK, weights_RnK, weights_RnK.sum(-1))
    logits_BV, rows = logits(requests * (drafts + 1)), settings(requests * (drafts + 1))
    streams = (rows.streams_B + 1, rows.streams_B + 2)
    got = TritonDraftingOps(OPTIONS).verify(logits_BV, rows, runs, distributions, *streams)
    wanted = readable().verify(logits_BV, rows, runs, distributions, *streams)
    assert torch.equal(got.accepted_R, wanted.accepted_R)
    assert torch.equal(got.token_ids_Rm, wanted.token_ids_Rm)
    assert 0 < int(got.accepted_R.sum()) < requests * drafts  # both ways out of the judgement were taken
    launched = {launch.kernel for launch in session.launches}
    assert {"judge_kernel", "own_weights_kernel", "taken_shares_kernel", "verdict_kernel"} <= (launched)
    assert launched <= {configuration.name for configuration in configurations()}


def test_bad_arguments_are_refused_as_the_reference_does(session: Session) -> None:
    ops, rows = TritonDraftingOps(OPTIONS), settings(1)
    with pytest.raises(OpRefusedError, match="capacity is 0"):
        ops.propose(logits(1), rows, 0)
    with pytest.raises(OpRefusedError, match=r"reach is 1\.5"):
        ops.guess(logits(1), rows, 1.5)
    runs = DraftRuns(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.zeros((1, 0)).long())
    nothing = DraftDistributions(*(torch.zeros((1, 0, 1), dtype=torch.int64),) * 2, torch.zeros((1, 0)).long())
    none = settings(0)
    with pytest.raises(OpRefusedError, match="1 requests name rows of a step without rows"):
        ops.verify(logits(1)[:0], none, runs, nothing, none.streams_B, none.streams_B)
