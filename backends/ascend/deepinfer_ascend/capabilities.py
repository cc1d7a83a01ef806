"""What the driver claims, chip by chip: conservative, because nothing of it has run on an Ascend device yet.

An op is claimed for the numerics whose rounding points it keeps: MX products quantise activations, so that they belong
to "served"; a chip without an MX matrix unit claims quantised products for "portable" only. R2 is claimed for what
only copies, addresses or compares; everything that adds or multiplies in a vendor's kernel claims R1 until the suite's
L2 has run on the chip.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from deepinfer.accelerator.capabilities import Capabilities, KvCacheDtype, Numerics, OpCapability, Repeatability
from deepinfer.accelerator.ops import all_op_names
from deepinfer_ascend.arithmetic import ACTIVATION_DTYPES
from deepinfer_ascend.soc import Soc

TORCH_NPU: Final = "torch-npu"
ATEN: Final = "aten"
"""torch's own operators, which torch-npu runs one by one."""
HOST: Final = "host"
"""Computed on the host; values travel."""

BOTH: Final[frozenset[Numerics]] = frozenset({"portable", "served"})
PORTABLE: Final[frozenset[Numerics]] = frozenset({"portable"})
FORMATS: Final[frozenset[KvCacheDtype]] = frozenset({"released", "float32"})
_R1, _R2 = Repeatability.RUN_TO_RUN, Repeatability.BATCH_INVARIANT


@dataclass(frozen=True, slots=True)
class Native:
    """One op that the driver computes itself.

    Attributes:
        provider: who computes it.
        operators: torch-npu's operators that it calls, where the chip has them.
        repeatability: the level that it keeps by nature.
        graph_safe: it never waits for the device nor copies from the host.
        needs_mx: "served" needs an MX matrix unit.
    """

    provider: str
    operators: tuple[str, ...] = ()
    repeatability: Repeatability = _R1
    graph_safe: bool = True
    needs_mx: bool = False


_MX = ("npu_dynamic_mx_quant", "npu_quant_matmul")
_MX_GROUPED = ("npu_dynamic_mx_quant", "npu_transpose_quant_batchmatmul")
_EXPERTS = ("npu_moe_init_routing_v2", "npu_dynamic_mx_quant", "npu_grouped_matmul")

NATIVE: Final = MappingProxyType(
    {
        "linear.embed": Native(ATEN, repeatability=_R2),
        "linear.prepare": Native(HOST, graph_safe=False, needs_mx=True),
        "linear.dense": Native(TORCH_NPU, _MX, needs_mx=True),
        "linear.prepare_grouped": Native(HOST, graph_safe=False, needs_mx=True),
        "linear.grouped": Native(TORCH_NPU, _MX_GROUPED, needs_mx=True),
        "norm.rms": Native(TORCH_NPU, ("npu_rms_norm",)),
        "norm.rotary": Native(TORCH_NPU, ("npu_rotary_mul",)),
        "codec.store_window": Native(TORCH_NPU, ("npu_scatter_nd_update_",), repeatability=_R2),
        "mixing.mixes": Native(TORCH_NPU, ("npu_mhc_pre", "npu_mhc_sinkhorn")),
        "mixing.collapse": Native(ATEN),
        "mixing.post": Native(TORCH_NPU, ("npu_mhc_post",)),
        "memory.ngram_rows": Native(ATEN, repeatability=_R2),
        "memory.gather_rows": Native(HOST, repeatability=_R2, graph_safe=False),
        "memory.gate": Native(ATEN),
        "experts.route": Native(TORCH_NPU, ("npu_moe_gating_top_k",)),
        "experts.prepare": Native(HOST, graph_safe=False, needs_mx=True),
        "experts.prepare_shared": Native(HOST, graph_safe=False, needs_mx=True),
        "experts.routed": Native(TORCH_NPU, _EXPERTS, needs_mx=True),
        "experts.shared": Native(TORCH_NPU, _MX, needs_mx=True),
        "experts.combine": Native(ATEN),
        "experts.local": Native(TORCH_NPU, (*_EXPERTS, "npu_moe_finalize_routing"), needs_mx=True),
        "sampling.adjust": Native(ATEN, repeatability=_R2, graph_safe=False),
        "plumbing.window_slots": Native(ATEN, repeatability=_R2),
        "plumbing.entry_slots": Native(ATEN, repeatability=_R2),
        "moves.copy": Native(ATEN, repeatability=_R2, graph_safe=False),
        "moves.zero": Native(ATEN, repeatability=_R2, graph_safe=False),
        "moves.save": Native(ATEN, repeatability=_R2, graph_safe=False),
        "moves.restore": Native(ATEN, repeatability=_R2, graph_safe=False),
    }
)
"""The ops of this driver, by contract identifier."""


def native_claims(chip: Soc) -> dict[str, OpCapability]:
    """Return the claims of the driver's own ops on ``chip``."""
    claims = {}
    for op, native in NATIVE.items():
        numerics = PORTABLE if native.needs_mx and not chip.has_mx else BOTH
        claims[op] = OpCapability(
            dtypes=frozenset(ACTIVATION_DTYPES),
            numerics=numerics,
            kv_formats=FORMATS,
            graph_safe=native.graph_safe,
            repeatability=native.repeatability,
            provider=native.provider if _uses_operators(native, chip) else ATEN,
        )
    return claims


def claims_of(chip: Soc, others: dict[str, OpCapability] | None = None) -> Capabilities:
    """Return all claims on ``chip``; ``others`` are those of kernels that came with other packages.

    What nobody claims is a declared fallback: the plan runs it on the reference and names it, line by line.
    """
    claims = {**(others or {}), **native_claims(chip)}
    partly = [op for op, claim in claims.items() if claim.numerics != BOTH]
    missing = [op for op in all_op_names() if op not in claims or op in partly]
    return Capabilities(
        ops=MappingProxyType(claims),
        graphs=True,
        collectives=("hccl",),
        declared_fallbacks=tuple(missing),
    )


def _uses_operators(native: Native, chip: Soc) -> bool:
    if native.provider != TORCH_NPU:
        return True
    hyper = any(name.startswith("npu_mhc") for name in native.operators)
    gating = "npu_moe_gating_top_k" in native.operators
    quantised_only = native.operators in (_MX, _MX_GROUPED)
    return not (
        (hyper and not chip.has_hyper_connections)
        or (gating and not chip.has_sqrt_softplus_gate)
        or (quantised_only and not chip.has_mx)
    )
