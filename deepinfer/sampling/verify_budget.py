"""How many drafts each request verifies: the prefix of all drafts, best first, that makes the most tokens a second.

Every draft costs a row. What a step costs depends on its rows, what a row is worth on the chance that its draft and all
drafts before it are accepted. The host chooses the total (:func:`choose_drafts`); where it has to do so before it knows
the newest chances, the device hands the same total out anew (:func:`rank_drafts`).

Legend: R requests, n drafts a request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class CostCurve:
    """What a decode step costs, by its rows.

    Attributes:
        sizes: rows that were measured, ascending.
        seconds: what each of them took.
        is_padded: steps are padded to one of the sizes, as recorded graphs are, so that a step costs what the smallest
            size that holds it costs; else its cost lies on the line between its neighbours.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    is_padded: bool = True

    def __post_init__(self) -> None:
        problems = []
        if not self.sizes or len(self.sizes) != len(self.seconds):
            problems.append(f"{len(self.sizes)} sizes and {len(self.seconds)} costs; give at least one, and as many")
        if list(self.sizes) != sorted(set(self.sizes)) or any(size < 1 for size in self.sizes):
            problems.append(f"sizes {list(self.sizes)} are not ascending numbers of rows")
        if not all(np.isfinite(cost) and cost > 0 for cost in self.seconds):
            problems.append(f"costs {list(self.seconds)} are not all positive seconds")
        if problems:
            raise ArgumentError("cost curve", problems)

    def of(self, rows: int) -> float:
        """Return the seconds of a step; one of more rows than were measured costs in proportion to the largest."""
        place = bisect_left(self.sizes, rows)
        if place == len(self.sizes):
            return self.seconds[-1] * rows / self.sizes[-1]
        if self.is_padded or self.sizes[place] == rows or place == 0:
            return self.seconds[place]
        low, high = self.sizes[place - 1 : place + 1]
        share = (rows - low) / (high - low)
        return self.seconds[place - 1] * (1 - share) + self.seconds[place] * share


@dataclass(frozen=True, slots=True)
class VerifyBudget:
    """What a step verifies.

    Attributes:
        counts_R: int64 [R], drafts of each request.
        expected_tokens: tokens that the step is expected to make.
        seconds: what it is expected to take, the sampler included.
    """

    counts_R: NDArray[np.int64]
    expected_tokens: float
    seconds: float

    @property
    def rows(self) -> int:
        """Rows of the step."""
        return len(self.counts_R) + int(self.counts_R.sum())

    @property
    def tokens_per_s(self) -> float:
        """What the choice maximises."""
        return self.expected_tokens / self.seconds


def choose_drafts(
    chances_Rn: NDArray[np.floating],
    curve: CostCurve,
    sampler_s: float = 0.0,
    most_R: NDArray[np.integer] | None = None,
) -> VerifyBudget:
    """Return the budget with the most expected tokens a second; of equal ones that with the fewest rows.

    The candidates are the prefixes of all drafts, ordered by chance, highest first, then by request, then by place. For
    each number of rows that order makes the most tokens, so no other choice is better. To verify every draft is one of
    the candidates: the choice is never estimated to be worse than a fixed length.

    Args:
        chances_Rn: cumulative chances of acceptance; 0 where there is no draft. What is no number counts as 0, and a
            chance above that of the draft before it as equal to it.
        curve: costs of steps.
        sampler_s: seconds that judging takes beside.
        most_R: drafts that each request has room for; None for n.
    """
    chances_Rn = _settled(chances_Rn)
    requests, drafts = chances_Rn.shape
    allowed_Rn = np.ones(chances_Rn.shape, np.bool_)
    if most_R is not None:
        allowed_Rn = np.arange(drafts) < np.asarray(most_R)[:, None]
    places = np.flatnonzero(allowed_Rn)
    order = places[np.argsort(-chances_Rn.reshape(-1)[places], kind="stable")]
    tokens = np.concatenate(([float(requests)], requests + np.cumsum(chances_Rn.reshape(-1)[order])))
    seconds = np.array([curve.of(requests + extra) + sampler_s for extra in range(len(order) + 1)])
    best = int(np.argmax(tokens / seconds))
    counts_R = np.bincount(order[:best] // drafts, minlength=requests) if drafts else np.zeros(requests)
    return VerifyBudget(counts_R.astype(np.int64), float(tokens[best]), float(seconds[best]))


def rank_rounds(
    chances_n: NDArray[np.floating], requests: int, curve: CostCurve, after_s: Sequence[float]
) -> list[int]:
    """Return the numbers of drafts that a round can make of each request, the best first; of equal ones the fewest.

    What counts are the expected tokens a second of steps that go on like this: all drafts of a round are verified. So
    no fixed number is estimated to be better than the first; what :func:`choose_drafts` then leaves out only helps.

    Args:
        chances_n: cumulative chances of acceptance.
        requests: of the step.
        curve: costs of steps.
        after_s: n + 1 seconds, what judging takes together with a round of 0 to n drafts.
    """
    tokens = requests * (1.0 + np.concatenate(([0.0], np.cumsum(chances_n))))
    seconds = [curve.of(requests * (1 + drafts)) + after for drafts, after in enumerate(after_s)]
    ranked: list[int] = np.argsort(-tokens / np.array(seconds), kind="stable").tolist()
    return ranked


def rank_drafts(
    chances_Rn: torch.Tensor, total: int | torch.Tensor, most_R: torch.Tensor | None = None
) -> torch.Tensor:
    """Return int64 [R]: how many of ``total`` draft rows each request gets, by chances that only the device knows.

    The order is that of :func:`choose_drafts`. Nothing is read on the host and no shape depends on a value, so that it
    can stand between two steps that were both launched already. A request never gets more rows than it has room for;
    where all rooms together hold less than the total, the rest of the rows is nobody's.

    Args:
        chances_Rn: cumulative chances, on the device.
        total: draft rows of the step, which the host has fixed.
        most_R: int64 [R], drafts that each request has room for; None for n.
    """
    requests, drafts = chances_Rn.shape
    settled_Rn = torch.nan_to_num(chances_Rn.to(torch.float64), nan=0.0).clamp(0.0, 1.0)
    if drafts:
        settled_Rn = settled_Rn.cummin(-1).values
    place_n = torch.arange(drafts, device=chances_Rn.device)
    most_R = torch.full((requests,), drafts, device=chances_Rn.device) if most_R is None else most_R
    has_room_Rn = place_n < most_R[:, None]
    order = torch.sort(torch.where(has_room_Rn, settled_Rn, -1.0).flatten(), descending=True, stable=True).indices
    is_taken = (torch.arange(requests * drafts, device=chances_Rn.device) < total) & has_room_Rn.flatten()[order]
    counts_R = torch.zeros(requests, dtype=torch.int64, device=chances_Rn.device)
    return counts_R.scatter_add_(0, order // max(drafts, 1), is_taken.to(torch.int64))


def _settled(chances_Rn: NDArray[np.floating]) -> NDArray[np.float64]:
    known_Rn = np.nan_to_num(np.asarray(chances_Rn, np.float64), nan=0.0).clip(0.0, 1.0)
    settled_Rn: NDArray[np.float64] = np.minimum.accumulate(known_Rn, axis=1) if known_Rn.shape[1] else known_Rn
    return settled_Rn
