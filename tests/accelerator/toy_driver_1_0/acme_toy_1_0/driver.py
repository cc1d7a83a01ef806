"""The driver class: three kernels are ready, everything else runs on the reference by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from deepinfer.accelerator.capabilities import Capabilities, OpCapability, Repeatability
from deepinfer.accelerator.interface import AcceleratorDriver, Availability, MemoryInfo, OpOptions, Reason
from deepinfer.accelerator.ops.base import OpGroup
from deepinfer.accelerator.ops.linear import LinearOps
from deepinfer.accelerator.ops.mixing import MixingOps
from deepinfer.accelerator.ops.norm import NormOps

_NOT_READY = (
    "linear.prepare",
    "linear.dense",
    "linear.prepare_grouped",
    "linear.grouped",
    "norm.rotary",
    "codec.encode",
    "codec.store_window",
    "codec.store_entries",
    "codec.store_index_keys",
    "codec.gather_window",
    "codec.gather_entries",
    "codec.gather_index_keys",
    "compression.pool_pairs",
    "selection.top_entries",
    "attention.sparse",
    "mixing.mixes",
    "mixing.post",
    "memory.ngram_rows",
    "memory.gather_rows",
    "memory.gate",
    "experts.route",
    "experts.prepare",
    "experts.prepare_shared",
    "experts.routed",
    "experts.shared",
    "experts.combine",
    "experts.local",
    "sampling.adjust",
    "sampling.weigh",
    "sampling.uniforms",
    "sampling.draw",
    "sampling.sample",
    "sampling.log_probabilities",
    "sampling.raw_log_probabilities",
    "plumbing.window_slots",
    "plumbing.entry_slots",
    "moves.copy",
    "moves.zero",
    "moves.save",
    "moves.restore",
)


class ToyNorm(NormOps):
    """Acme's fused RMSNorm."""

    def rms(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x_TD.double()
        statistic = wide.square().mean(-1, keepdim=True)
        return (weight_D.double() * wide * torch.rsqrt(statistic + eps)).to(x_TD.dtype)


class ToyLinear(LinearOps):
    """Acme's table look-up."""

    def __init__(self, options: OpOptions) -> None:
        self._dtype = options.activation_dtype

    def embed(self, ids_T: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
        return table_VD[ids_T].to(self._dtype)


class ToyMixing(MixingOps):
    """Acme's stream collapse."""

    def collapse(self, streams_TSD: torch.Tensor, pre_TS: torch.Tensor) -> torch.Tensor:
        total_TD = pre_TS[:, :1].double() * streams_TSD[:, 0].double()
        for stream in range(1, streams_TSD.shape[1]):
            total_TD = total_TD + pre_TS[:, stream : stream + 1].double() * streams_TSD[:, stream].double()
        return total_TD.to(streams_TSD.dtype)


class Driver(AcceleratorDriver):
    """Acme Toy."""

    name: ClassVar[str] = "toy_1_0"
    interface_version: ClassVar[tuple[int, int]] = (1, 0)
    version: ClassVar[str] = "1.0"

    @classmethod
    def availability(cls) -> Availability:
        from acme_toy_1_0 import runtime

        if runtime.device_count() == 0:
            return Availability((Reason("no Toy in this machine", "plug one in"),))
        return Availability(device_name="Acme Toy", runtime=f"toy runtime {runtime.VERSION}")

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def memory(self) -> MemoryInfo:
        return MemoryInfo(total_bytes=1 << 30, free_bytes=1 << 29, reserved_bytes=1 << 20)

    def capabilities(self) -> Capabilities:
        claim = OpCapability(
            dtypes=frozenset({torch.float32}),
            numerics=frozenset({"portable"}),
            kv_formats=frozenset({"released", "float32"}),
            repeatability=Repeatability.BATCH_INVARIANT,
            provider="acme",
        )
        own = ("norm.rms", "linear.embed", "mixing.collapse")
        return Capabilities(ops=dict.fromkeys(own, claim), declared_fallbacks=_NOT_READY)

    def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
        return {"norm": ToyNorm(), "linear": ToyLinear(options), "mixing": ToyMixing()}
