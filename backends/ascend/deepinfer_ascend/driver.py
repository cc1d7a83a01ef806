"""The driver class: device, memory, streams, graphs, ranks, claims and op groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

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
from deepinfer.accelerator.ops import OpGroup
from deepinfer.errors import DriverUnavailableError
from deepinfer_ascend import availability, environment, providers, runtime, soc
from deepinfer_ascend.arithmetic import Arithmetic
from deepinfer_ascend.capabilities import claims_of
from deepinfer_ascend.collectives import HcclCollectives
from deepinfer_ascend.determinism import prove
from deepinfer_ascend.memory import npu_memory
from deepinfer_ascend.native_cache import NativeCodec, NativeMoves
from deepinfer_ascend.native_experts import NativeExperts
from deepinfer_ascend.native_linear import NativeLinear
from deepinfer_ascend.native_memory import NativeMemory
from deepinfer_ascend.native_mixing import NativeMixing
from deepinfer_ascend.native_norm import NativeNorm
from deepinfer_ascend.native_plumbing import NativePlumbing
from deepinfer_ascend.native_sampling import NativeSampling
from deepinfer_ascend.operators import Operators
from deepinfer_ascend.streams import NpuGraph, NpuStream


class Driver(AcceleratorDriver):
    """Ascend 950 PR and DT first, 910B and 910_93 with what they have, over torch-npu, HCCL and Triton kernels."""

    name: ClassVar[str] = "ascend"
    interface_version: ClassVar[tuple[int, int]] = (1, 1)
    version: ClassVar[str] = "0.2.0"

    def __init__(self, *, weights_in_nz: bool = False) -> None:
        """Keep weights in plain order, or move the experts' packed weights into the NZ format at load."""
        self._weights_in_nz = weights_in_nz
        self._chip: soc.Soc | None = None
        self._has_joined = False

    @classmethod
    def availability(cls) -> Availability:
        """Look at every layer of the stack and report each that is missing, with its remedy."""
        return availability.survey(availability.ThisMachine())

    @property
    def device(self) -> torch.device:
        """The NPU that the launcher gave this rank: the current one."""
        runtime.load()
        return torch.device("npu", runtime.npu().current_device())

    @property
    def chip(self) -> soc.Soc:
        """The chip behind :attr:`device`; DriverUnavailableError when there is none that the driver knows."""
        if self._chip is None:
            runtime.load()
            name = str(runtime.npu().get_device_name(self.device.index)) if runtime.npu().is_available() else ""
            found = soc.detect(name)
            if found is None:
                raise DriverUnavailableError(
                    f"driver 'ascend' found {name or 'no NPU'!r}; it knows {', '.join(soc.supported_families())}. Run "
                    f"`deepinfer devices` for what is missing"
                )
            self._chip = found
        return self._chip

    def memory(self) -> MemoryInfo:
        """Return the memory of the device."""
        return npu_memory(self.device.index)

    def capabilities(self) -> Capabilities:
        """Return the claims on this chip."""
        return claims_of(self.chip, providers.triton_claims(providers.triton_groups()))

    def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
        """Return the driver's own ops, completed by installed kernels."""
        own = native_groups(Arithmetic.of(options, self.chip, self.device), Operators(), in_nz=self._weights_in_nz)
        others = {name: kind(options) for name, kind in providers.triton_groups().items()}  # type: ignore[call-arg]
        return MappingProxyType(providers.merged(own, others))

    def synchronize(self) -> None:
        """Wait for the device."""
        runtime.npu().synchronize(self.device.index)

    def new_stream(self) -> Stream:
        """Return a stream of the device."""
        return NpuStream(self.device.index)

    def new_graph(self) -> Graph:
        """Return an empty NPUGraph."""
        return NpuGraph(self.device.index)

    def join_group(self, place: RankPlace) -> Collectives:
        """Join the HCCL group at ``place``; one rank needs no group.

        The first group that a process joins gives it its NPU: the ranks of a machine are numbered in a row, and take
        its NPUs in turn.
        """
        if place.world_size == 1:
            return SoloCollectives()
        runtime.load()
        if not self._has_joined:
            runtime.npu().set_device(place.rank % runtime.npu().device_count())
            self._has_joined = True
        return HcclCollectives(place)

    def set_determinism(self, level: Repeatability, shapes: Sequence[LinearShape]) -> None:
        """Set the stack to ``level`` and try it, or refuse with every reason; see `deepinfer_ascend.determinism`."""
        if level > Repeatability.NONE:
            prove(level, shapes, self.capabilities().ops, self.device)

    def runtime_variables(self) -> Mapping[str, str]:
        """Return the variables of CANN and HCCL that decide about order, as they are in force."""
        return environment.in_force()


def native_groups(arithmetic: Arithmetic, operators: Operators, *, in_nz: bool = False) -> dict[str, OpGroup]:
    """Return one instance of every native group."""
    return {
        NativeLinear.group: NativeLinear(arithmetic, operators),
        NativeNorm.group: NativeNorm(operators),
        NativeCodec.group: NativeCodec(operators),
        NativeMixing.group: NativeMixing(arithmetic, operators),
        NativeMemory.group: NativeMemory(arithmetic),
        NativeExperts.group: NativeExperts(arithmetic, operators, weights_in_nz=in_nz),
        NativeSampling.group: NativeSampling(),
        NativePlumbing.group: NativePlumbing(),
        NativeMoves.group: NativeMoves(),
    }
