"""Who may compute an op besides this driver, in which order, and what is installed.

Kernels in Triton come as a package of their own. The vendor's builds of attention operators for DeepSeek-V4 register
under three namespaces of ``torch.ops``; they are looked for and reported. None of them serves an op: each was made for
V4's records or V4's compression, and the table below says for each what does not fit V4.1.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import Final, cast

import torch

from deepinfer.accelerator.capabilities import Numerics, OpCapability
from deepinfer.accelerator.ops import OP_GROUPS, OpGroup
from deepinfer.errors import DriverLoadError
from deepinfer_ascend.arithmetic import ACTIVATION_DTYPES

NATIVE: Final = "native"
TRITON: Final = "triton"
REFERENCE: Final = "cpu_ref"
TRITON_PACKAGE: Final = "deepinfer_triton"
TRITON_CLASSES: Final = MappingProxyType(
    {
        "codec": "TritonCodecOps",
        "compression": "TritonCompressionOps",
        "attention": "TritonAttentionOps",
        "drafting": "TritonDraftAttention",
    }
)
"""Group by group, the class in the module of the same name; each is constructed with the options.

Left out, because the lowering check shows that kernels of theirs do not reach the chip: the sampler and the draws and
verification of drafts (float64), and the selection (index_scores ends bishengir-compile-a5 with an assertion,
radix_selection is not read by triton-adapter 3.2).
"""

NOT_TAKEN: Final = frozenset({"drafting.propose", "drafting.guess", "drafting.verify", "drafting.match"})
"""Ops of these groups whose kernels are in another class, which is left out."""

NOT_LOWERED: Final = MappingProxyType(
    {
        "served_attention_kernel": "bishengir-compile-a5 1.2.0 ends with an assertion (MutableArrayRef index)",
    }
)
"""Kernels of these groups that the lowering check shows not to reach the chip, with the tool's reason."""

PORTABLE_ONLY: Final = frozenset({"attention"})
"""Groups whose kernels for served numerics are among them: claimed for portable numerics alone."""

_KERNELS_FIRST = (TRITON, REFERENCE)
_REFERENCE_ONLY = (REFERENCE,)
ORDER: Final = MappingProxyType(
    {
        "codec.encode": _KERNELS_FIRST,
        "codec.store_entries": _KERNELS_FIRST,
        "codec.store_index_keys": _KERNELS_FIRST,
        "codec.gather_window": _KERNELS_FIRST,
        "codec.gather_entries": _KERNELS_FIRST,
        "codec.gather_index_keys": _KERNELS_FIRST,
        "compression.pool_pairs": _KERNELS_FIRST,
        "selection.top_entries": _REFERENCE_ONLY,
        "attention.sparse": _KERNELS_FIRST,
        "sampling.weigh": _REFERENCE_ONLY,
        "sampling.uniforms": _REFERENCE_ONLY,
        "sampling.draw": _REFERENCE_ONLY,
        "sampling.sample": _REFERENCE_ONLY,
        "sampling.log_probabilities": _REFERENCE_ONLY,
        "sampling.raw_log_probabilities": _REFERENCE_ONLY,
    }
)
"""Providers of the ops that are not native, best first; every other op is native alone."""


@dataclass(frozen=True, slots=True)
class VendorOperator:
    """An operator of a vendor's build.

    Attributes:
        name: its name, the same in every namespace that has it.
        op: the op of the contract that it comes closest to.
        misfit: why it does not serve that op.
    """

    name: str
    op: str
    misfit: str


NAMESPACES: Final = ("custom", "_C_ascend", "cann_ops_transformer")
VENDOR_OPERATORS: Final = (
    VendorOperator(
        "npu_kv_quant_sparse_attn_sharedkv",
        "attention.sparse",
        "reads V4 records (448 fp8 + 64 bfloat16 in 584 bytes); ours are 528 and 288 bytes",
    ),
    VendorOperator(
        "npu_sparse_attn_sharedkv",
        "attention.sparse",
        "reads bfloat16 keys in blocks; our records would have to be decoded into a second cache first",
    ),
    VendorOperator(
        "npu_quant_sparse_flash_mla",
        "attention.sparse",
        "its quantisation modes name no scale per 32 (fp8) or e4m3 scale per 16 (fp4)",
    ),
    VendorOperator(
        "compressor", "compression.pool_pairs", "pools with a learned position bias and overlapping groups of 4 or 128"
    ),
    VendorOperator(
        "quant_compressor", "compression.pool_pairs", "pools with a learned position bias and overlapping groups"
    ),
    VendorOperator("kv_compress_epilog", "codec.store_entries", "writes V4 records; ours are e2m1 with e4m3 scales"),
    VendorOperator(
        "indexer_compress_epilog", "codec.store_index_keys", "writes fp8 keys with float32 scales; ours are mxfp4"
    ),
    VendorOperator(
        "npu_quant_lightning_indexer",
        "selection.top_entries",
        "takes fp8 or int8 keys, knows no candidate blocks and promises no order on ties",
    ),
    VendorOperator(
        "inplace_partial_rotary_mul",
        "norm.rotary",
        "takes cosines in the dtype of its rows, so that bfloat16 rounds them",
    ),
    VendorOperator(
        "npu_hc_pre", "mixing.mixes", "returns the collapse with the sublayer's own weights, not the weights"
    ),
    VendorOperator("npu_hc_post", "mixing.post", "npu_mhc_post of torch-npu computes the same and is always there"),
)


@dataclass(frozen=True, slots=True)
class FoundOperator:
    """A vendor's operator that is registered in this process."""

    namespace: str
    operator: VendorOperator

    def as_json(self) -> dict[str, str]:
        """Return plain values."""
        return {
            "operator": f"{self.namespace}.{self.operator.name}",
            "op": self.operator.op,
            "used": "no",
            "why": self.operator.misfit,
        }


def is_registered(namespace: str, name: str) -> bool:
    """Return True when ``torch.ops.NAMESPACE.NAME`` exists in this process."""
    return hasattr(getattr(torch.ops, namespace), name)


def vendor_operators(registered: Callable[[str, str], bool] = is_registered) -> tuple[FoundOperator, ...]:
    """Return the vendor's operators that are registered, with the reason why each is left alone."""
    return tuple(
        FoundOperator(namespace, operator)
        for namespace in NAMESPACES
        for operator in VENDOR_OPERATORS
        if registered(namespace, operator.name)
    )


def _exists(module: str) -> bool:
    return find_spec(module) is not None


def triton_targets_npus() -> bool:
    """Return True when the installed Triton is the one that compiles for NPUs; upstream's cannot."""
    return find_spec("triton") is not None and find_spec("triton.backends.ascend") is not None


def triton_groups(
    targets_npus: Callable[[], bool] = triton_targets_npus, exists: Callable[[str], bool] = _exists
) -> dict[str, type[OpGroup]]:
    """Return the op groups whose kernels are installed and can be compiled here, by group name.

    Raises DriverLoadError when a module of kernels is there and does not load, or lacks its class.
    """
    if not targets_npus() or not exists(TRITON_PACKAGE):
        return {}
    groups: dict[str, type[OpGroup]] = {}
    for group, class_name in TRITON_CLASSES.items():
        name = f"{TRITON_PACKAGE}.{group}"
        if not exists(name):
            continue
        try:
            found = getattr(importlib.import_module(name), class_name)
        except (ImportError, AttributeError) as error:
            raise DriverLoadError(f"driver 'ascend': the kernels of {name} do not load: {error}") from error
        groups[group] = cast("type[OpGroup]", found)
    return groups


def triton_claims(groups: Mapping[str, type[OpGroup]]) -> dict[str, OpCapability]:
    """Return the claims of installed kernels: R1 and no graphs until they have run on a chip."""
    both: frozenset[Numerics] = frozenset({"portable", "served"})
    portable: frozenset[Numerics] = frozenset({"portable"})
    return {
        f"{group}.{name}": OpCapability(
            dtypes=frozenset(ACTIVATION_DTYPES),
            numerics=portable if group in PORTABLE_ONLY else both,
            kv_formats=frozenset({"released", "float32"}),
            provider=TRITON,
        )
        for group, kind in groups.items()
        for name in kind.implemented()
    }


def merged(own: Mapping[str, OpGroup], others: Mapping[str, OpGroup]) -> dict[str, OpGroup]:
    """Return one group per name: the driver's own ops, and from ``others`` what it does not implement."""
    groups: dict[str, OpGroup] = {}
    for group_type in OP_GROUPS:
        mine, spare = own.get(group_type.group), others.get(group_type.group)
        if mine is None or spare is None:
            present = mine if mine is not None else spare
            if present is not None:
                groups[group_type.group] = present
            continue
        implemented = dict.fromkeys(type(mine).implemented(), mine)
        sources = {**dict.fromkeys(type(spare).implemented(), spare), **implemented}
        members = {name: staticmethod(getattr(source, name)) for name, source in sources.items()}
        groups[group_type.group] = type(f"Ascend{group_type.__name__}", (group_type,), members)()
    return groups
