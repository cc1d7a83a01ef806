# ruff: noqa: ARG001 - all exchanges share one signature
"""What every rank does in a check of collectives: the exchange, and its own opinion of the result.

Values are functions of (rank, element), so that each rank knows what it must receive. Problems are returned as words.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from deepinfer.accelerator import Collectives

Exchange = Callable[[Collectives, torch.device, Path], list[str]]
SHAPES: tuple[tuple[int, ...], ...] = ((0,), (1,), (5,), (3, 4), (0, 7), (2, 3, 5))
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.float64, torch.bool)
DEAD_STATUS = 7


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the tensor of a rank: small whole numbers, different in every element and rank."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    whole = (torch.arange(count).view(shape) * 7 + rank * 31) % 101
    return whole % 2 == 0 if dtype == torch.bool else whole.to(dtype)


def all_reduce(group: Collectives, device: torch.device, folder: Path) -> list[str]:
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
    wanted = terms[0].clone()
    for term in terms[1 : group.world_size]:
        wanted = wanted + term
    problems += _differs("all_reduce_sum in rank order", group.all_reduce_sum(terms[group.rank].to(device)), wanted)
    return problems


def all_gather(group: Collectives, device: torch.device, folder: Path) -> list[str]:
    """Tensors come stacked in rank order, empty ones too."""
    problems = []
    for shape in SHAPES:
        wanted = torch.stack([values(rank, shape) for rank in range(group.world_size)])
        problems += _differs(f"all_gather of {shape}", group.all_gather(values(group.rank, shape).to(device)), wanted)
    return problems


def all_to_all(group: Collectives, device: torch.device, folder: Path) -> list[str]:
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


def broadcast(group: Collectives, device: torch.device, folder: Path) -> list[str]:
    """Every rank is the source once."""
    problems = []
    for source in range(group.world_size):
        for shape in SHAPES:
            got = group.broadcast(values(group.rank, shape).to(device), source)
            problems += _differs(f"broadcast of {shape} from {source}", got, values(source, shape))
    return problems


def barrier(group: Collectives, device: torch.device, folder: Path) -> list[str]:
    """What every rank wrote before a barrier is there for all after it."""
    problems = []
    for turn in range(5):
        (folder / f"{turn}-{group.rank}").touch()
        group.barrier()
        missing = [rank for rank in range(group.world_size) if not (folder / f"{turn}-{rank}").exists()]
        if missing:
            problems.append(f"barrier {turn} returned before ranks {missing} had called it")
        group.barrier()
    return problems


def dtypes(group: Collectives, device: torch.device, folder: Path) -> list[str]:
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
    return problems


def dead_rank(group: Collectives, device: torch.device, folder: Path) -> list[str]:
    """Rank 1 is gone: the others must raise, within the group's deadline, and say which group it was."""
    if group.rank == 1:
        os._exit(DEAD_STATUS)
    try:
        group.all_reduce_sum(torch.ones(4, device=device))
        group.barrier()
    except Exception as error:  # noqa: BLE001 - any error will do, if it says something
        return [] if str(error).strip() else ["the error of a dead rank says nothing"]
    return ["the exchange with a dead rank succeeded"]


EXCHANGES: Mapping[str, Exchange] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
    "barrier": barrier,
    "dtypes": dtypes,
    "dead_rank": dead_rank,
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
