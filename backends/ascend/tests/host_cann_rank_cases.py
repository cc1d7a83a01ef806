"""Run by test_host_cann_ranks.py, once per rank: every collective of ProcessGroupHCCL, then the planted faults.

Prints one line of JSON: {case: result}; a refused case is {"error": text, "seconds": how long it took}.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable

import host_cann

DEADLINE_S = 3.0
RANK, RANKS, STORE = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
warnings.simplefilter("ignore")
host_cann.load(devices=RANKS, hccl_deadline_s=60)

import torch  # noqa: E402 (after the libraries)
import torch.distributed as dist  # noqa: E402

torch.npu.set_device(RANK)
dist.init_process_group("hccl", init_method=f"file://{STORE}", rank=RANK, world_size=RANKS)
DEVICE = f"npu:{RANK}"


def tensor(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to(DEVICE)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=DEVICE)


def all_reduce(dtype: torch.dtype, reduction: dist.ReduceOp) -> list[float]:
    x = tensor([1.0 + RANK, 2.0, 3.0 - RANK], dtype)
    dist.all_reduce(x, op=reduction)
    return x.cpu().tolist()


def all_gather() -> list[int]:
    out = empty(4, dtype=torch.int64)
    dist.all_gather_into_tensor(out, tensor([RANK, RANK * 10], torch.int64))
    return out.cpu().tolist()


def all_gather_list() -> list[list[int]]:
    out = [empty(2, dtype=torch.uint8) for _ in range(RANKS)]
    dist.all_gather(out, tensor([RANK, 9], torch.uint8))
    return [part.cpu().tolist() for part in out]


def reduce_scatter() -> list[float]:
    out = empty(2)
    dist.reduce_scatter_tensor(out, tensor([0, 1, 2, 3]))
    return out.cpu().tolist()


def all_to_all() -> list[int]:
    out = empty(2, dtype=torch.int64)
    dist.all_to_all_single(out, tensor([10 * RANK, 10 * RANK + 1], torch.int64))
    return out.cpu().tolist()


def all_to_all_uneven() -> list[int]:
    out, source = empty(3, dtype=torch.int64), tensor([10 * RANK, 10 * RANK + 1, 10 * RANK + 2], torch.int64)
    sizes = [1, 2] if RANK == 0 else [2, 1]
    dist.all_to_all_single(out, source, sizes, sizes)
    return out.cpu().tolist()


def broadcast() -> list[float]:
    x = tensor([float(RANK)] * 2)
    dist.broadcast(x, 1)
    return x.cpu().tolist()


def reduce() -> list[float]:
    x = tensor([RANK + 1.0] * 2)
    dist.reduce(x, 0)
    return x.cpu().tolist()


def scatter() -> list[float]:
    out = empty(1)
    dist.scatter(out, [tensor([5]), tensor([6])] if RANK == 0 else None, 0)
    return out.cpu().tolist()


def point_to_point() -> list[float]:
    x = tensor([RANK + 7.0])
    if RANK == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    return x.cpu().tolist()


def barrier() -> str:
    dist.barrier()
    return "passed"


def graph() -> list[float]:
    x, gathered, out = tensor([1.0 + RANK]), empty(2), empty(2)
    dist.all_gather_into_tensor(gathered, x)
    captured = torch.npu.NPUGraph()
    with torch.npu.graph(captured):
        dist.all_gather_into_tensor(gathered, x)
        torch.add(gathered, 1, out=out)
    x.fill_(7.0 + RANK)
    captured.replay()
    return out.cpu().tolist()


def other_count(group: dist.ProcessGroup) -> list[float]:
    x = tensor([1.0] * (3 + RANK))
    dist.all_reduce(x, group=group)
    return x.cpu().tolist()


def other_type(group: dist.ProcessGroup) -> list[float]:
    x = tensor([1.0], torch.float32 if RANK else torch.bfloat16)
    dist.all_reduce(x, group=group)
    return x.cpu().tolist()


def other_operation(group: dist.ProcessGroup) -> list[float]:
    x = tensor([1.0])
    if RANK:
        dist.all_reduce(x, group=group)
    else:
        dist.broadcast(x, 0, group=group)
    return x.cpu().tolist()


def other_split(group: dist.ProcessGroup) -> list[float]:
    out = empty(4)
    sizes = [2, 2] if RANK == 0 else [1, 3]
    dist.all_to_all_single(out, tensor([0, 1, 2, 3]), [2, 2], sizes, group=group)
    return out.cpu().tolist()


def absent_rank(group: dist.ProcessGroup) -> str:
    x = tensor([1.0])
    dist.all_reduce(x, group=group)
    os.environ["HOST_CANN_HCCL_DEADLINE_S"] = str(DEADLINE_S)
    if RANK == 0:
        dist.all_reduce(x, group=group)
    return "did not call"


def dead_rank(group: dist.ProcessGroup) -> str:
    x = tensor([1.0])
    dist.all_reduce(x, group=group)
    if RANK == 1:
        report()
        os._exit(3)
    os.environ["HOST_CANN_HCCL_DEADLINE_S"] = "60"
    dist.all_reduce(x, group=group)
    return "came through"


RESULTS: dict[str, object] = {}


def report() -> None:
    sys.stdout.write(json.dumps(RESULTS) + "\n")
    sys.stdout.flush()


def attempt(name: str, case: Callable[[], object]) -> None:
    started = time.monotonic()
    try:
        RESULTS[name] = case()
    except RuntimeError as error:
        RESULTS[name] = {"error": str(error), "seconds": time.monotonic() - started}


for label, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("int32", torch.int32)):
    for reduction in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        attempt(f"all_reduce {label} {reduction}", lambda d=dtype, r=reduction: all_reduce(d, r))  # type: ignore[misc]
for healthy in (
    all_gather, all_gather_list, reduce_scatter, all_to_all, all_to_all_uneven, broadcast, reduce, scatter,
    point_to_point, barrier, graph,
):  # fmt: skip
    attempt(healthy.__name__, healthy)
for fault in (other_count, other_type, other_operation, other_split, absent_rank, dead_rank):
    own = dist.new_group(list(range(RANKS)))  # a fault breaks its communicator
    attempt(fault.__name__, lambda f=fault, g=own: f(g))  # type: ignore[misc]
report()
os._exit(0)  # the group's threads would wait for the dead
