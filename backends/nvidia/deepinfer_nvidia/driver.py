"""The driver class: device, memory, streams, graphs, ranks, claims and op groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, cast

import torch

from deepinfer.accelerator.capabilities import Capabilities, Repeatability
from deepinfer.accelerator.collectives import Collectives, RankPlace, SoloCollectives
from deepinfer.accelerator.interface import (
    AcceleratorDriver,
    Availability,
    Graph,
    LinearShape,
    MemoryInfo,
    OpOptions,
    Stream,
)
from deepinfer.accelerator.ops import LinearOps, OpGroup
from deepinfer.errors import DriverUnavailableError
from deepinfer_nvidia import architecture, assembly, availability, interpreting, optional
from deepinfer_nvidia.architecture import Architecture
from deepinfer_nvidia.determinism import prove, settle
from deepinfer_nvidia.memory import cuda_memory, host_memory
from deepinfer_nvidia.streams import CudaGraph, CudaStream


class Driver(AcceleratorDriver):
    """SM100 first, SM90 second, over Triton kernels, torch's CUDA and NCCL."""

    name: ClassVar[str] = "nvidia"
    interface_version: ClassVar[tuple[int, int]] = (1, 1)
    version: ClassVar[str] = "0.2.0"

    def __init__(self, *, interpreted: bool | None = None, libraries: Sequence[str] | None = None) -> None:
        """Choose the mode and the optional libraries; the environment's where not given."""
        self._interpreted = interpreting.is_wanted() if interpreted is None else interpreted
        self._libraries = tuple(optional.wanted() if libraries is None else libraries)
        self._has_joined = False
        if self._interpreted:
            interpreting.announce()

    @classmethod
    def availability(cls) -> Availability:
        """Look at every layer of the stack and report each that is missing, with its remedy."""
        machine = availability.ThisMachine()
        names = optional.wanted()
        if interpreting.is_wanted():
            return availability.with_reasons(availability.survey_interpreted(machine), optional.problems(names, None))
        found = availability.survey(machine)
        chip = architecture.detect(machine.capability()) if found.available else None
        return availability.with_reasons(found, optional.problems(names, chip))

    @property
    def interpreted(self) -> bool:
        """True when kernels run in the interpreter, on the host."""
        return self._interpreted

    @property
    def device(self) -> torch.device:
        """The GPU that the launcher gave this rank, the current one; the host in interpreted mode."""
        return torch.device("cpu") if self._interpreted else torch.device("cuda", torch.cuda.current_device())

    @property
    def chip(self) -> Architecture:
        """The generation of :attr:`device`; DriverUnavailableError when there is none that the driver knows."""
        found = None if self._interpreted else architecture.detect(torch.cuda.get_device_capability())
        if found is None:
            raise DriverUnavailableError(
                "driver 'nvidia' has no GPU of a generation that it knows (SM100, SM90); run `deepinfer devices` for "
                "what is missing"
            )
        return found

    def memory(self) -> MemoryInfo:
        """Return the memory of the device."""
        return host_memory() if self._interpreted else cuda_memory(torch.cuda.current_device())

    def capabilities(self) -> Capabilities:
        """Return the claims; ops that a chosen library serves name it."""
        if self._interpreted:
            return assembly.Claims(assembly.INTERPRETED, graphs=False, collectives=()).capabilities({})
        return assembly.Claims(assembly.TRITON, graphs=True, collectives=("nccl",)).capabilities(self._served())

    def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
        """Return the groups of kernels, with the calls of chosen libraries put over them."""
        if self._interpreted:
            interpreting.begin()
            return MappingProxyType(assembly.groups(options))
        settle()
        return MappingProxyType(assembly.with_libraries(assembly.groups(options), options, self._libraries))

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self._interpreted:
            torch.cuda.synchronize()

    def new_stream(self) -> Stream:
        """Return a stream of the device."""
        return super().new_stream() if self._interpreted else CudaStream(torch.cuda.current_device())

    def new_graph(self) -> Graph:
        """Return an empty CUDA graph."""
        return super().new_graph() if self._interpreted else CudaGraph(torch.cuda.current_device())

    def join_group(self, place: RankPlace) -> Collectives:
        """Join the NCCL group at ``place``; one rank needs no group.

        The first group that a process joins gives it its GPU: the ranks of a machine are numbered in a row, and take
        its GPUs in turn.
        """
        if place.world_size == 1:
            return SoloCollectives()
        if self._interpreted:
            return super().join_group(place)
        if not self._has_joined:
            torch.cuda.set_device(place.rank % torch.cuda.device_count())
            self._has_joined = True
        # Here, because builds of torch without torch.distributed have none of what it imports.
        from deepinfer_nvidia.collectives import NcclCollectives

        return NcclCollectives(place)

    def set_determinism(self, level: Repeatability, shapes: Sequence[LinearShape]) -> None:
        """Try ``level`` with the model's shapes, or refuse with every reason; see `deepinfer_nvidia.determinism`."""
        options = OpOptions(batch_invariant=level >= Repeatability.BATCH_INVARIANT)
        linear = cast("LinearOps", self.op_groups(options)["linear"])
        prove(level, shapes, self.capabilities().ops, linear, self.device, interpreted=self._interpreted)

    def _served(self) -> Mapping[str, str]:
        found = {each.library.name: each.provider for each in optional.installed_libraries()}
        return {op: found[name] for name in self._libraries for op in optional.LIBRARIES[name].ops if name in found}
