"""The driver class: device, memory, claims, op groups and the proof of repeatability."""

from __future__ import annotations

import platform
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import torch

from deepinfer.accelerator.capabilities import Capabilities, OpCapability, Repeatability
from deepinfer.accelerator.collectives import Collectives, RankPlace
from deepinfer.accelerator.interface import (
    AcceleratorDriver,
    Availability,
    Graph,
    LinearShape,
    MemoryInfo,
    OpOptions,
    Stream,
)
from deepinfer.accelerator.ops import OpGroup
from deepinfer_cpu_ref.attention import CpuRefAttention
from deepinfer_cpu_ref.call_list import CallList, Recorder
from deepinfer_cpu_ref.codec import CpuRefCodec
from deepinfer_cpu_ref.compression import CpuRefCompression
from deepinfer_cpu_ref.computation import ACTIVATION_DTYPES, Computation
from deepinfer_cpu_ref.determinism import prove
from deepinfer_cpu_ref.drafting import CpuRefDrafting
from deepinfer_cpu_ref.experts import CpuRefExperts
from deepinfer_cpu_ref.host_copies import HOST, on_host
from deepinfer_cpu_ref.host_memory import host_memory
from deepinfer_cpu_ref.linear import CpuRefLinear
from deepinfer_cpu_ref.memory import CpuRefMemory
from deepinfer_cpu_ref.mixing import CpuRefMixing
from deepinfer_cpu_ref.moves import CpuRefMoves
from deepinfer_cpu_ref.norm import CpuRefNorm
from deepinfer_cpu_ref.plumbing import CpuRefPlumbing
from deepinfer_cpu_ref.quick_groups import can_be_quick, quick_groups
from deepinfer_cpu_ref.sampling import CpuRefSampling, ReadableSampling
from deepinfer_cpu_ref.selection import CpuRefSelection
from deepinfer_cpu_ref.streams import ThreadStream

GROUPS: tuple[type[OpGroup], ...] = (
    CpuRefLinear,
    CpuRefNorm,
    CpuRefCodec,
    CpuRefCompression,
    CpuRefSelection,
    CpuRefAttention,
    CpuRefMixing,
    CpuRefMemory,
    CpuRefExperts,
    CpuRefSampling,
    CpuRefPlumbing,
    CpuRefMoves,
    CpuRefDrafting,
)


NOT_RECORDED = frozenset(
    {"linear.prepare", "linear.prepare_grouped", "experts.prepare", "experts.prepare_shared"}
    | {"moves.save", "moves.restore"}
)
"""Ops that no graph holds: they run once a weight while it is loaded, or carry data out of the device."""


class Driver(AcceleratorDriver):
    """Every op of the contract on any machine with torch: the reference, the fallback and the embedded default."""

    name: ClassVar[str] = "cpu_ref"
    interface_version: ClassVar[tuple[int, int]] = (1, 1)
    version: ClassVar[str] = "0.1.0"

    def __init__(self, *, readable: bool = False, device: torch.device = HOST) -> None:
        """Choose the readable ops in every mode, or (the default) the quick ones where they compute the same.

        Args:
            readable: the readable ops, which are written in torch for any device.
            device: where tensors are when these ops stand in for another driver's; elsewhere than on the host all are
                readable, and what needs float64 to the bit (sampling, drafts) is computed on copies on the host.
        """
        self._tensors_on = device
        self._readable = readable or device.type != HOST.type
        self._streams: weakref.WeakSet[ThreadStream] = weakref.WeakSet()
        self._recorder = Recorder()

    @classmethod
    def availability(cls) -> Availability:
        """Return that the driver can run: it needs nothing but torch."""
        return Availability(
            device_name=f"CPU ({platform.machine() or 'unknown architecture'})", runtime=f"torch {torch.__version__}"
        )

    @property
    def device(self) -> torch.device:
        """The host."""
        return torch.device("cpu")

    def memory(self) -> MemoryInfo:
        """Return host memory, bounded by the control group of the process."""
        return host_memory()

    def capabilities(self) -> Capabilities:
        """Return the claims: every op, in both numerics and cache formats, R2 when asked for, ranks where Gloo is.

        Graphs are lists of calls, see `deepinfer_cpu_ref.call_list`; elsewhere than on the host there are none.
        """
        on_host = self._tensors_on.type == HOST.type
        ops = {}
        for group in GROUPS:
            for name in group.implemented():
                identifier = f"{group.group}.{name}"
                ops[identifier] = OpCapability(
                    dtypes=frozenset(ACTIVATION_DTYPES),
                    numerics=frozenset({"portable", "served"}),
                    kv_formats=frozenset({"released", "float32"}),
                    graph_safe=on_host and identifier not in NOT_RECORDED,
                    repeatability=Repeatability.BATCH_INVARIANT,
                    provider="native",
                )
        return Capabilities(
            ops=MappingProxyType(ops), graphs=on_host, collectives=("gloo",) if _gloo_is_there() else ()
        )

    def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
        """Return one instance of every group, with the arithmetic that ``options`` ask for."""
        computation = Computation.of(options)
        quick = {} if self._readable or not can_be_quick(computation) else quick_groups(computation)
        groups: dict[str, OpGroup] = {
            CpuRefLinear.group: CpuRefLinear(computation),
            CpuRefNorm.group: CpuRefNorm(),
            CpuRefCodec.group: CpuRefCodec(),
            CpuRefCompression.group: CpuRefCompression(computation),
            CpuRefSelection.group: CpuRefSelection(computation),
            CpuRefAttention.group: CpuRefAttention(computation),
            CpuRefMixing.group: CpuRefMixing(computation),
            CpuRefMemory.group: CpuRefMemory(computation),
            CpuRefExperts.group: CpuRefExperts(computation),
            CpuRefSampling.group: ReadableSampling() if self._readable else CpuRefSampling(),
            CpuRefPlumbing.group: CpuRefPlumbing(),
            CpuRefMoves.group: CpuRefMoves(),
            CpuRefDrafting.group: CpuRefDrafting(computation, ReadableSampling()),
        } | quick
        if self._tensors_on.type != HOST.type:
            groups["sampling"] = on_host(groups["sampling"], self._tensors_on, but=("adjust",))
            groups["drafting"] = on_host(groups["drafting"], self._tensors_on, but=("attend",))
            return MappingProxyType(groups)
        return MappingProxyType({name: self._recorder.watched(group) for name, group in groups.items()})

    def new_graph(self) -> Graph:
        """Return an empty list of calls."""
        return CallList(self._recorder) if self._tensors_on.type == HOST.type else super().new_graph()

    def new_stream(self) -> Stream:
        """Return a queue with a thread of its own."""
        stream = ThreadStream()
        self._streams.add(stream)
        return stream

    def synchronize(self) -> None:
        """Wait for the work of every stream; what it raises is for those who wait for its events."""
        for stream in list(self._streams):
            stream.record_event().wait()

    def serving(self, device: torch.device) -> Driver:
        """Return a reference whose ops take tensors of another driver's device."""
        return Driver(readable=self._readable, device=device)

    def join_group(self, place: RankPlace) -> Collectives:
        """Join over Gloo; a group of one needs nobody."""
        if place.world_size == 1 or not _gloo_is_there():
            return super().join_group(place)
        # Here, because builds of torch without torch.distributed have none of what it imports.
        from deepinfer_cpu_ref.collectives import GlooCollectives

        return GlooCollectives(place)

    def set_determinism(self, level: Repeatability, shapes: Sequence[LinearShape]) -> None:
        """Try ``level`` with the model's shapes, or refuse; see `deepinfer_cpu_ref.determinism`."""
        prove(level, shapes)


def _gloo_is_there() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()
