"""Exchanges between ranks over NCCL."""

from __future__ import annotations

import datetime
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # public, not re-exported

from deepinfer.accelerator.collectives import RankPlace
from deepinfer.accelerator.process_group import MakeTransport, ProcessGroupCollectives


def nccl(store: Store, place: RankPlace) -> Any:
    """Return torch's process group over NCCL; its own watchdog is given the same deadline."""
    # By name: builds of torch without CUDA do not have it.
    group_type: Any = torch.distributed.ProcessGroupNCCL
    options = group_type.Options()
    options._timeout = datetime.timedelta(seconds=place.deadline_s)
    options.global_ranks_in_group = list(range(place.world_size))
    return group_type(store, place.rank, place.world_size, options)


class NcclCollectives(ProcessGroupCollectives):
    """A group over NCCL."""

    def __init__(self, place: RankPlace, transport: MakeTransport = nccl) -> None:
        """Join; see :class:`ProcessGroupCollectives`."""
        super().__init__(place, "NCCL", transport)

    def _give_up(self) -> None:
        # NCCL leaves a kernel behind that waits for ever; nothing later on its stream would run.
        if hasattr(self._group, "abort"):
            self._group.abort()
