"""What every rank does in a check of collectives: the exchange, and its own opinion of the result.

Values are functions of (rank, element), so that each rank knows what it must receive. Problems are returned as words.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from deepinfer.accelerator import AcceleratorDriver, Collectives, LostRanksError, RankPlace

SHAPES: tuple[tuple[int, ...], ...] = ((0,), (1,), (5,), (3, 4), (0, 7), (2, 3, 5), (3, 70_001))
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.float64, torch.bool)
CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
DEAD_STATUS = 7
GONE = 1
"""The rank that dies, stays silent or stays away; rank 0 is needed to meet, and rank 2 must learn of it as well."""
GRACE_S = 1.0
"""What an error may come after the deadline: the machine is busy with the suite's own processes."""


@dataclass(frozen=True, slots=True)
class Seat:
    """What one rank has.

    Attributes:
        driver: its own.
        place: where it is to join.
        folder: a folder that all ranks of the check see.
        joined: groups that live until every rank has answered.
    """

    driver: AcceleratorDriver
    place: RankPlace
    folder: Path
    joined: list[Collectives] = field(default_factory=list)

    def join(self) -> Collectives:
        """Join the group and hold it: one that is dropped closes its connections, and its rank looks dead."""
        group = self.driver.join_group(self.place)
        self.joined.append(group)
        return group


Act = Callable[[Seat], list[str]]
"""What a rank does, and the problems that it saw."""
Exchange = Callable[[Collectives, torch.device], list[str]]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the tensor of a rank: small whole numbers, different in every element and rank."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    whole = (torch.arange(count).view(shape) * 7 + rank * 31) % 101
    return whole % 2 == 0 if dtype == torch.bool else whole.to(dtype)


def all_reduce(group: Collectives, device: torch.device) -> list[str]:
    """Sums are added in rank order: large terms that cancel give another sum in any other order."""
    problems = []
    for shape in SHAPES:
        wanted = sum((values(rank, shape) for rank in range(group.world_size)), torch.zeros(shape))
        problems += _differs(
            f"all_reduce_sum of {shape}", group.all_reduce_sum(values(group.rank, shape).to(device)), wanted
        )
    terms = [
        torch.tensor([2.0**24, 1.0, 2.0**-3]),
        torch.tensor([1.0, 2.0**24, 3.0]),
        torch.tensor([-(2.0**24), 1.0, 0.1]),
    ]
    terms.append(torch.tensor([1.0, -(2.0**24), 7.0]))
    for dtype in (torch.float32, torch.bfloat16):
        rounded = [term.to(dtype) for term in terms]
        wanted = rounded[0].clone()
        for term in rounded[1 : group.world_size]:
            wanted = wanted + term
        got = group.all_reduce_sum(rounded[group.rank].to(device))
        problems += _differs(f"all_reduce_sum of {dtype} in rank order", got, wanted)
    return problems


def all_gather(group: Collectives, device: torch.device) -> list[str]:
    """Tensors come stacked in rank order, empty ones too."""
    problems = []
    for shape in SHAPES:
        wanted = torch.stack([values(rank, shape) for rank in range(group.world_size)])
        problems += _differs(f"all_gather of {shape}", group.all_gather(values(group.rank, shape).to(device)), wanted)
    return problems


def all_to_all(group: Collectives, device: torch.device) -> list[str]:
    """Counts are uneven, some are zero, some ranks send or receive nothing; rows have any shape."""
    problems = []
    for pattern in range(4):
        for inner in ((), (4,), (2, 3)):
            counts = [
                [_count(pattern, one, other) for other in range(group.world_size)] for one in range(group.world_size)
            ]
            sent = counts[group.rank]
            received = [counts[other][group.rank] for other in range(group.world_size)]
            rows = values(group.rank, (sum(sent), *inner))
            parts = []
            for other in range(group.world_size):
                start = sum(counts[other][: group.rank])
                parts.append(values(other, (sum(counts[other]), *inner))[start : start + received[other]])
            got = group.all_to_all(rows.to(device), sent, received)
            problems += _differs(f"all_to_all pattern {pattern} of rows {inner}", got, torch.cat(parts))
    return problems


def _count(pattern: int, sender: int, receiver: int) -> int:
    match pattern:
        case 0:
            return 2
        case 1:
            return (3 * sender + 2 * receiver) % 4
        case 2:
            return 5 if sender == 0 and receiver == 1 else 0
        case _:
            return 0


def broadcast(group: Collectives, device: torch.device) -> list[str]:
    """Every rank is the source once."""
    problems = []
    for source in range(group.world_size):
        for shape in SHAPES:
            got = group.broadcast(values(group.rank, shape).to(device), source)
            problems += _differs(f"broadcast of {shape} from {source}", got, values(source, shape))
    return problems


def barrier(seat: Seat) -> list[str]:
    """What every rank wrote before a barrier is there for all after it."""
    group, problems = seat.join(), []
    for turn in range(5):
        (seat.folder / f"{turn}-{group.rank}").touch()
        group.barrier()
        missing = [rank for rank in range(group.world_size) if not (seat.folder / f"{turn}-{rank}").exists()]
        if missing:
            problems.append(f"barrier {turn} returned before ranks {missing} had called it")
        group.barrier()
    return problems


def dtypes(group: Collectives, device: torch.device) -> list[str]:
    """Every dtype, bytes of fp8 records and views that are not contiguous keep their bits; inputs are not written."""
    problems = []
    for dtype in DTYPES:
        mine = values(group.rank, (3, 4), dtype).to(device)
        wanted = torch.stack([values(rank, (3, 4), dtype) for rank in range(group.world_size)])
        problems += _differs(f"all_gather of {dtype}", group.all_gather(mine), wanted)
        problems += _differs(f"input of all_gather of {dtype}", mine, values(group.rank, (3, 4), dtype))
        turned = values(group.rank, (4, 3), dtype).to(device).t()
        wanted = torch.stack([values(rank, (4, 3), dtype).t() for rank in range(group.world_size)])
        problems += _differs(f"all_gather of a transposed {dtype}", group.all_gather(turned), wanted)
    for dtype in CODES:
        problems += _codes(group, device, dtype)
    return problems


def _codes(group: Collectives, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Records of fp8 travel as bytes: a view on the way in, a view on the way out, NaN codes and all."""
    codes = [
        ((torch.arange(256) * 3 + 41 * rank) % 256).to(torch.uint8).view(8, 32) for rank in range(group.world_size)
    ]
    mine = codes[group.rank].to(device).view(dtype)
    rows = 8 // group.world_size
    counts = [rows] * (group.world_size - 1) + [8 - rows * (group.world_size - 1)]
    start = sum(counts[: group.rank])
    received = torch.cat([each[start : start + counts[group.rank]] for each in codes])
    told = f"{dtype} as bytes"
    got = group.all_to_all(mine.view(torch.uint8), counts, [counts[group.rank]] * group.world_size).view(dtype)
    return [
        *_differs(f"all_gather of {told}", group.all_gather(mine.view(torch.uint8)), torch.stack(codes)),
        *_differs(f"all_to_all of {told}", got.view(torch.uint8), received),
        *_differs(f"broadcast of {told}", group.broadcast(mine.view(torch.uint8), 0), codes[0]),
    ]


def dead_rank(seat: Seat) -> list[str]:
    """A rank dies: the others must raise, within the group's deadline, and name it."""
    group = seat.join()
    if group.rank == GONE:
        os._exit(DEAD_STATUS)
    return _misses_the_rank(seat, lambda: group.all_reduce_sum(torch.ones(4, device=seat.driver.device)))


def silent_rank(seat: Seat) -> list[str]:
    """A rank lives on and never calls: the same, however long it would take."""
    group = seat.join()
    return [] if group.rank == GONE else _misses_the_rank(seat, group.barrier)


def absent_rank(seat: Seat) -> list[str]:
    """A rank never joins: the same for those who do."""
    return [] if seat.place.rank == GONE else _misses_the_rank(seat, seat.join)


def _misses_the_rank(seat: Seat, act: Callable[[], object]) -> list[str]:
    began = time.monotonic()
    try:
        act()
    except LostRanksError as error:
        took_s, limit_s = time.monotonic() - began, seat.place.deadline_s + GRACE_S
        late = [f"the error came after {took_s:.3g} s, the deadline is {seat.place.deadline_s:g} s"]
        named = [f"the error names ranks {list(error.missing)} as missing, it is rank {GONE}: {error}"]
        return [*(late if took_s > limit_s else []), *(named if error.missing != (GONE,) else [])]
    return [f"all went well without rank {GONE}"]


def _joined(exchange: Exchange) -> Act:
    def act(seat: Seat) -> list[str]:
        group, place = seat.join(), seat.place
        if (group.rank, group.world_size) != (place.rank, place.world_size):
            return [f"the group says rank {group.rank} of {group.world_size}, its place is {place}"]
        return exchange(group, seat.driver.device)

    return act


ACTS: Mapping[str, Act] = {
    "all_reduce": _joined(all_reduce),
    "all_gather": _joined(all_gather),
    "all_to_all": _joined(all_to_all),
    "broadcast": _joined(broadcast),
    "barrier": barrier,
    "dtypes": _joined(dtypes),
    "dead_rank": dead_rank,
    "silent_rank": silent_rank,
    "absent_rank": absent_rank,
}


def _differs(what: str, got: torch.Tensor, wanted: torch.Tensor) -> list[str]:
    got = got.cpu()
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return [f"{what}: {got.dtype} {tuple(got.shape)} came, {wanted.dtype} {tuple(wanted.shape)} is right"]
    return (
        []
        if torch.equal(got, wanted)
        else [f"{what}: {got.flatten()[:6].tolist()} came, {wanted.flatten()[:6].tolist()} is right"]
    )
