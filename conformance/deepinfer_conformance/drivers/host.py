"""What the test drivers have in common: a CPU device without a vendor, and weights of which only the name matters.

Legend: T rows, S streams, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from deepinfer.accelerator.capabilities import Capabilities, OpCapability, Repeatability
from deepinfer.accelerator.interface import AcceleratorDriver, Availability, LinearShape, MemoryInfo, OpOptions
from deepinfer.accelerator.ops.base import OpGroup
from deepinfer.accelerator.ops.mixing import Mix
from deepinfer.accelerator.weights import ExpertSlot, Precision, PreparedWeight, StoredExpert
from deepinfer.errors import DeterminismError, OpRefusedError

DEFAULT_MEMORY_BYTES = 1 << 30
"""What a test driver says it has: constant, so that pool sizes do not depend on the machine that runs a test."""


@dataclass(frozen=True, slots=True)
class NamedWeight(PreparedWeight):
    """A prepared weight without numbers.

    Attributes:
        name: checkpoint name.
        nbytes: always 0, nothing is held.
        out_features: width of the product.
        precision: decides the dtype of the product.
        experts: how many experts of a layer it names; 0 for other weights.
    """

    name: str
    nbytes: int
    out_features: int
    precision: Precision = "activation"
    experts: int = 0

    def expert_slots(self) -> tuple[ExpertSlot, ...]:
        """Return slots in which nothing lies: an expert without numbers is moved by saying so."""
        return (ExpertSlot("named", ()),) * self.experts

    def dtype(self, options: OpOptions) -> torch.dtype:
        """Return the dtype of a product with this weight."""
        activation = options.activation_dtype
        return at_least_float32(activation) if self.precision == "float32" else activation


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def require_named(weight: PreparedWeight) -> NamedWeight:
    """Return the weight as one that a test driver made; OpRefusedError for a stranger's."""
    if not isinstance(weight, NamedWeight):
        raise OpRefusedError(
            f"weight {weight.name!r} was prepared by {type(weight).__qualname__}, not by this driver; "
            f"an op takes what its own `prepare` returned."
        )
    return weight


def zero_mix(streams_TSD: torch.Tensor, dtype: torch.dtype) -> Mix:
    """Return coefficients of zero for these streams."""
    rows, streams = streams_TSD.shape[:2]
    return Mix(
        pre_TS=streams_TSD.new_zeros((rows, streams), dtype=dtype),
        post_TS=streams_TSD.new_zeros((rows, streams), dtype=dtype),
        comb_TSS=streams_TSD.new_zeros((rows, streams, streams), dtype=dtype),
    )


def named_experts(experts: Sequence[StoredExpert]) -> NamedWeight:
    """Return one name for all routed experts of a layer: that of the first, with the hidden size."""
    if not experts:
        raise OpRefusedError("experts.prepare was given no expert; a layer has at least one")
    return NamedWeight(experts[0].w2.name, 0, experts[0].w2.out_features, experts=len(experts))


class OptionedGroup(OpGroup):
    """Mixin of an op group that was built for certain options."""

    def __init__(self, options: OpOptions) -> None:
        self._options = options

    @property
    def activation_dtype(self) -> torch.dtype:
        """Dtype of activations between ops."""
        return self._options.activation_dtype

    @property
    def wide_dtype(self) -> torch.dtype:
        """Dtype of results that the contract wants in at least float32."""
        return at_least_float32(self._options.activation_dtype)


class HostDriver(AcceleratorDriver):
    """A driver on the CPU whose results are exact, so that every order of computing gives the same bits."""

    def __init__(self, *, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> None:
        self._memory_bytes = memory_bytes

    @classmethod
    def availability(cls) -> Availability:
        """Available everywhere."""
        return Availability(device_name=f"{cls.name} (test driver, CPU)", runtime=f"torch {torch.__version__}")

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def memory(self) -> MemoryInfo:
        """Return what the constructor was told, all of it free."""
        return MemoryInfo(total_bytes=self._memory_bytes, free_bytes=self._memory_bytes)

    def set_determinism(self, level: Repeatability, shapes: Sequence[LinearShape]) -> None:
        """Accept up to R2: no value depends on an order of summation or on another row."""
        del shapes
        if level > Repeatability.BATCH_INVARIANT:
            raise DeterminismError(
                f"driver {self.name!r} keeps R{int(Repeatability.BATCH_INVARIANT)} and was asked for R{int(level)}; "
                f"nothing here proves more. Ask for less."
            )


def claims_of(
    groups: Mapping[str, type[OpGroup]],
    dtypes: frozenset[torch.dtype],
    *,
    declared_fallbacks: tuple[str, ...] = (),
) -> Capabilities:
    """Return the claims of a driver that implements what ``groups`` override, in every numerics mode and format."""
    claim = OpCapability(
        dtypes=dtypes,
        numerics=frozenset({"portable", "served"}),
        kv_formats=frozenset({"released", "float32"}),
        repeatability=Repeatability.BATCH_INVARIANT,
    )
    ops = {f"{name}.{op}": claim for name, group in groups.items() for op in group.implemented()}
    return Capabilities(ops=ops, declared_fallbacks=declared_fallbacks)
