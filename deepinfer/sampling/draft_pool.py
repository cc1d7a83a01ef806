"""The draft pool: what the last round left for each request, on the device, kept set only.

A slot belongs to one request from admission to its end. Slot 0 belongs to nobody: it always holds placeholders, so that
a request without drafts, and a padding row of a recorded graph, read it like any other.

Legend: P slots, R requests, n drafts a request, K kept tokens of a draft's distribution.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from deepinfer.accelerator.ops.drafting import PLACEHOLDER, DraftDistributions
from deepinfer.errors import ArgumentError

_NOBODY = 0


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts of R requests.

    Attributes:
        token_ids_Rn: int64 [R, n], -1 for a placeholder. Never an index: see :meth:`input_ids`.
        distributions: what they were drawn from; K is 0 in coupled verification.
        chances_Rn: float32 [R, n], cumulative chances of acceptance; 0 for placeholders.
    """

    token_ids_Rn: torch.Tensor
    distributions: DraftDistributions
    chances_Rn: torch.Tensor

    def usable(self) -> torch.Tensor:
        """Return int64 [R]: how many drafts come before a request's first placeholder."""
        return (self.token_ids_Rn >= 0).to(torch.int64).cumprod(-1).sum(-1)

    def where(self, valid_T: torch.Tensor, row_starts_R1: torch.Tensor) -> Drafts:
        """Return the drafts, with placeholders in the places of those whose row in a step is invalid.

        Args:
            valid_T: bool [T].
            row_starts_R1: int64 [R + 1], first row of each request; its drafts stand behind that row. Drafts beyond a
                request's rows are left as they are.
        """
        if not valid_T.shape[0]:
            return self
        row_Rn = row_starts_R1[:-1, None] + torch.arange(1, self.token_ids_Rn.shape[1] + 1, device=valid_T.device)
        is_lost_Rn = (row_Rn < row_starts_R1[1:, None]) & ~valid_T[row_Rn.clamp(max=valid_T.shape[0] - 1)]
        return replace(self, token_ids_Rn=torch.where(is_lost_Rn, PLACEHOLDER, self.token_ids_Rn))

    def input_ids(self) -> torch.Tensor:
        """Return the drafts as ids that may be embedded; places from the first placeholder on hold 0.

        Their rows must be invalid in the step's layout (``valid_T``): id 0 keeps the index in range and means nothing.
        """
        places_n = torch.arange(self.token_ids_Rn.shape[1], device=self.token_ids_Rn.device)
        return torch.where(places_n < self.usable()[:, None], self.token_ids_Rn, 0)


def pool_bytes(*, num_slots: int, drafts: int, kept_tokens: int) -> int:
    """Return what a pool of this size holds: ids, chances and sums of all drafts, and of each kept token id and weight.

    Args:
        num_slots: slot 0 included.
        drafts: of a slot.
        kept_tokens: tokens that are kept of a draft's distribution; 0 in coupled verification.
    """
    return num_slots * drafts * (8 + 4 + 8 + kept_tokens * (4 + 8))


class DraftPool:
    """Tensors of P slots with n drafts each; reading and writing never wait for the device.

    Attributes:
        num_slots: P, slot 0 included.
        drafts: n.
        kept_tokens: K.
    """

    def __init__(self, *, num_slots: int, drafts: int, kept_tokens: int, device: torch.device) -> None:
        """Allocate; every slot holds placeholders."""
        problems = []
        if num_slots < 1:
            problems.append(f"num_slots: {num_slots} is below 1, the slot of nobody")
        if drafts < 0 or kept_tokens < 0:
            problems.append(f"drafts: {drafts} and kept_tokens: {kept_tokens} are not negative")
        if problems:
            raise ArgumentError("draft pool", problems)
        self.num_slots, self.drafts, self.kept_tokens = num_slots, drafts, kept_tokens
        self._token_ids_Pn = torch.full((num_slots, drafts), PLACEHOLDER, dtype=torch.int64, device=device)
        self._chances_Pn = torch.zeros((num_slots, drafts), dtype=torch.float32, device=device)
        # 31 bits hold any id; weights reach 2**31.
        self._ids_PnK = torch.full((num_slots, drafts, kept_tokens), -1, dtype=torch.int32, device=device)
        self._weights_PnK = torch.zeros((num_slots, drafts, kept_tokens), dtype=torch.int64, device=device)
        self._sums_Pn = torch.zeros((num_slots, drafts), dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes that the pool holds."""
        tensors = (self._token_ids_Pn, self._chances_Pn, self._ids_PnK, self._weights_PnK, self._sums_Pn)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def store(
        self,
        slots_R: torch.Tensor,
        token_ids_Rn: torch.Tensor,
        chances_Rn: torch.Tensor,
        distributions: DraftDistributions | None,
    ) -> None:
        """Replace what the slots hold by a new round.

        Args:
            slots_R: int64 [R], distinct but for slot 0, which stays as it is.
            token_ids_Rn: the drafts, -1 where there is none.
            chances_Rn: their cumulative chances.
            distributions: what they were drawn from; None keeps none (K = 0).
        """
        self._token_ids_Pn[slots_R] = token_ids_Rn
        self._chances_Pn[slots_R] = torch.where(token_ids_Rn >= 0, chances_Rn.to(torch.float32), 0.0)
        if distributions is not None:
            self._ids_PnK[slots_R] = distributions.ids_RnK.to(torch.int32)
            self._weights_PnK[slots_R] = distributions.weights_RnK
            self._sums_Pn[slots_R] = distributions.sums_Rn
        self._empty(slice(_NOBODY, _NOBODY + 1))

    def clear(self, slots_R: torch.Tensor) -> None:
        """Put placeholders into slots: of requests that are new, were preempted, or have ended."""
        self._empty(slots_R)

    def gather(self, slots_R: torch.Tensor) -> Drafts:
        """Return copies of what the slots hold."""
        distributions = DraftDistributions(
            ids_RnK=self._ids_PnK[slots_R].to(torch.int64),
            weights_RnK=self._weights_PnK[slots_R],
            sums_Rn=self._sums_Pn[slots_R],
        )
        return Drafts(self._token_ids_Pn[slots_R], distributions, self._chances_Pn[slots_R])

    def chances(self, slots_R: torch.Tensor) -> torch.Tensor:
        """Return a copy of the cumulative chances [R, n] that the slots hold."""
        return self._chances_Pn[slots_R]

    def _empty(self, slots: torch.Tensor | slice) -> None:
        self._token_ids_Pn[slots] = PLACEHOLDER
        self._chances_Pn[slots] = 0.0
        self._ids_PnK[slots] = -1
        self._weights_PnK[slots] = 0
        self._sums_Pn[slots] = 0
