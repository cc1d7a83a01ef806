"""One step's verification: rows of one token and its drafts, judged, with log-probabilities of what is emitted.

A request that verifies k drafts has 1 + k rows: row j gives the token behind its newest token and j drafts. Every row
is described as it would be in a step without drafts (:class:`~deepinfer.sampling.rows.RowRequest`), so bans, penalties,
masks, random streams and log-probabilities of a token do not depend on whether drafts stood before it.

Legend: R requests, B rows, n drafts a request, m = n + 1, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.accelerator.ops.drafting import DraftingOps, DraftRuns, Verdicts
from deepinfer.accelerator.ops.sampling import RowStatus, SampledTokens, SamplingOps
from deepinfer.accelerator.upload import on_device
from deepinfer.sampling.draft_pool import Drafts
from deepinfer.sampling.drafting import DraftPolicy
from deepinfer.sampling.request import RequestSampling
from deepinfer.sampling.rows import RowRequest, SamplingStep, build_sampling_step
from deepinfer.sampling.sampler import SampledRow, SampledStep, Sampler
from deepinfer.sampling.streams import ORIGINAL_ROW_STEP, DrawCase, Keying


class RunRequest(NamedTuple):
    """One request of a verifying step.

    Attributes:
        sampling: the request's constants.
        token_index: index of the first token being made, in the request's whole history.
        output_token_ids: the outputs so far.
        draft_token_ids: the drafts to verify, as many as the request has rows beside its first. Only their count
            matters to a request without penalties: where the host does not know them yet, any ids will do.
        allowed_mW: int32 [1 + k, W], the tokens that each row's grammar allows (``RowRequest.allowed_W``), or None.
        is_due: False for rows that contribute nothing, because the request has ended meanwhile: they count nowhere.
    """

    sampling: RequestSampling
    token_index: int
    output_token_ids: Sequence[int]
    draft_token_ids: Sequence[int] = ()
    allowed_mW: NDArray[np.int32] | None = None
    is_due: bool = True


@dataclass(frozen=True, slots=True)
class VerificationStep:
    """Everything that one step's verification needs beside logits and drafts.

    Attributes:
        sampling: settings of all B rows, fresh streams.
        first_row_R: int64 [R], first row of each request.
        counts_R: int64 [R], drafts of each request.
        request_B: int64 [B], request of each row.
        place_B: int64 [B], j of each row.
        resample_streams_B: int64 [B].
        accept_streams_B: int64 [B].
    """

    sampling: SamplingStep
    first_row_R: torch.Tensor
    counts_R: torch.Tensor
    request_B: torch.Tensor
    place_B: torch.Tensor
    resample_streams_B: torch.Tensor
    accept_streams_B: torch.Tensor


def build_verification_step(
    requests: Sequence[RunRequest],
    device: torch.device,
    *,
    keying: Keying = Keying.INDEX,
) -> VerificationStep:
    """Describe the verification of one step; a request's description does not depend on the other requests.

    Args:
        requests: in the order of their rows; the rows of a request follow each other.
        device: where the tensors go.
        keying: how random streams are numbered; the original's gives row j the position of the first row plus
            j times :data:`ORIGINAL_ROW_STEP`.
    """
    row_step = ORIGINAL_ROW_STEP if keying is Keying.ORIGINAL else 1
    rows = [
        RowRequest(
            request.sampling,
            request.token_index + place * row_step,
            request.output_token_ids,
            None if request.allowed_mW is None else request.allowed_mW[place],
            request.draft_token_ids[:place],
        )
        for request in requests
        for place in range(1 + len(request.draft_token_ids))
    ]
    sampling = build_sampling_step(rows, device, keying=keying)
    counts_R = np.array([len(request.draft_token_ids) for request in requests], np.int64)
    first_row_R = np.cumsum(counts_R + 1) - counts_R - 1
    request_B = np.repeat(np.arange(len(requests), dtype=np.int64), counts_R + 1)

    def moved(values: NDArray[np.int64]) -> torch.Tensor:
        return on_device(values, device)

    # Both keyings number the cases of a token one after the other.
    streams_B = sampling.rows.streams_B
    return VerificationStep(
        sampling=sampling,
        first_row_R=moved(first_row_R),
        counts_R=moved(counts_R),
        request_B=moved(request_B),
        place_B=moved(np.arange(len(rows), dtype=np.int64) - first_row_R[request_B]),
        resample_streams_B=streams_B + int(DrawCase.RESAMPLE),
        accept_streams_B=streams_B + int(DrawCase.ACCEPT),
    )


class VerifiedRun(NamedTuple):
    """What one request emits in one step.

    Attributes:
        rows: the emitted tokens in order, each with its log-probabilities where asked for. The last entry has no token
            (-1) if its status is not OK: the request ends behind the tokens before it.
        accepted: how many drafts were accepted.
    """

    rows: tuple[SampledRow, ...]
    accepted: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The emitted tokens."""
        return tuple(row.token_id for row in self.rows if row.token_id >= 0)


@dataclass(frozen=True, slots=True)
class VerifiedStep:
    """A step's results, still on the device.

    Attributes:
        verdicts: tokens, accepted counts and statuses; what an asynchronous next step reads.
        sampled: token (-1 for rows behind a run's end), status and log-probabilities of every row.
        counts_R: rows of each request, less one.
    """

    verdicts: Verdicts
    sampled: SampledStep
    counts_R: torch.Tensor

    def read(self) -> list[VerifiedRun]:
        """Wait for the device and return every request's run."""
        rows = self.sampled.read()
        accepted: list[int] = self.verdicts.accepted_R.tolist()
        runs = []
        start = 0
        for count, accepted_drafts in zip(self.counts_R.tolist(), accepted, strict=True):
            runs.append(VerifiedRun(tuple(rows[start : start + accepted_drafts + 1]), accepted_drafts))
            start += count + 1
        return runs


class Verifier:
    """Runs the verification of a step through the ops of one accelerator; keeps nothing between steps."""

    def __init__(self, sampling: SamplingOps, drafting: DraftingOps, policy: DraftPolicy) -> None:
        self._sampling = sampling
        self._drafting = drafting
        self._policy = policy
        self._sampler = Sampler(sampling)

    def verify(self, logits_BV: torch.Tensor, step: VerificationStep, drafts: Drafts) -> VerifiedStep:
        """Judge every request's drafts without waiting for the device.

        Args:
            logits_BV: float32 [B, V]; the adjustments are written into it.
            step: what the rows want, in the order of the logits.
            drafts: the drafts of the same R requests; those behind a request's count are not looked at.
        """
        rows = step.sampling.rows
        runs = DraftRuns(step.first_row_R, step.counts_R, drafts.token_ids_Rn)
        raw_NV = self._sampler.before_adjustments(logits_BV, step.sampling)
        self._sampler.adjust(logits_BV, step.sampling)
        if self._policy.verification == "coupled":
            verdicts = self._drafting.match(self._sampling.sample(logits_BV, rows), runs)
        else:
            verdicts = self._drafting.verify(
                logits_BV, rows, runs, drafts.distributions, step.resample_streams_B, step.accept_streams_B
            )
        tokens = _row_tokens(verdicts, step)
        return VerifiedStep(verdicts, self._sampler.listed(logits_BV, raw_NV, tokens, step.sampling), step.counts_R)


def _row_tokens(verdicts: Verdicts, step: VerificationStep) -> SampledTokens:
    """Return the token that each row gave to its run, -1 behind the run's end, and the status of its last row."""
    # A run has fewer places than a longer one of the same step; what it has not is never gathered.
    token_ids_B = verdicts.token_ids_Rm[step.request_B, step.place_B]
    is_last_B = step.place_B == verdicts.accepted_R[step.request_B]
    status_B = torch.where(is_last_B, verdicts.status_R[step.request_B], int(RowStatus.OK))
    return SampledTokens(token_ids_B, status_B)
