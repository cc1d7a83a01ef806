"""Exchanges between ranks over HCCL."""

from __future__ import annotations

import datetime
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # public, not re-exported

from deepinfer.accelerator.collectives import RankPlace
from deepinfer.accelerator.process_group import MakeTransport, ProcessGroupCollectives
from deepinfer_ascend import runtime


def hccl(store: Store, place: RankPlace) -> Any:
    """Return torch-npu's process group over HCCL; its own watchdog is given the same deadline."""
    group_type = runtime.load()._C._distributed_c10d.ProcessGroupHCCL
    options = group_type.Options()
    options.is_high_priority_stream = False
    options._timeout = datetime.timedelta(seconds=place.deadline_s)
    options.global_ranks_in_group = list(range(place.world_size))
    options.group_id = place.address
    return group_type(store, place.rank, place.world_size, options)


class HcclCollectives(ProcessGroupCollectives):
    """A group over HCCL."""

    def __init__(self, place: RankPlace, transport: MakeTransport = hccl) -> None:
        """Join; see :class:`ProcessGroupCollectives`."""
        super().__init__(place, "HCCL", transport)
