"""Repeatability levels: what our kernels keep by construction, what other parts must be told, and a trial.

R1 and R2 hold by construction: no float atomics, fixed split counts, a form of each kernel that depends on widths and
dtypes alone. A library that was chosen must keep them as well, and torch's own products, which serve only ops that
fell back, are told to. R3 and R4 are refused: they need an exchange of expert rows in a fixed order, and kernels whose
sums are the same for one row and for several, neither of which this driver has proved.

Legend: T rows, N out features, K in features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from deepinfer.accelerator.capabilities import OpCapability, Repeatability
from deepinfer.accelerator.interface import LinearShape
from deepinfer.accelerator.ops.linear import LinearOps
from deepinfer.accelerator.weights import StoredFormat, StoredWeight
from deepinfer.errors import DeterminismError

ROW_COUNTS: Final = (1, 7, 17, 33)
"""Below, across and above the row tiles of the kernels."""
MOST_FEATURES: Final = 512
"""A wider weight is tried with this many out features: a program's columns know nothing of the others."""
MOST_INTERPRETED: Final = 64
"""The same, and for in features as well, where a trial on real sizes would take minutes."""


def missing_for(level: Repeatability, claims: Mapping[str, OpCapability]) -> list[str]:
    """Return what ``level`` needs and the driver lacks, one sentence each."""
    found = []
    if level >= Repeatability.BATCH_INVARIANT:
        weaker = sorted(op for op, claim in claims.items() if claim.repeatability < Repeatability.BATCH_INVARIANT)
        found += [f"{claims[op].provider} does not keep R2 in {op}" for op in weaker]
    if level >= Repeatability.PLACEMENT_INVARIANT:
        found.append("R3 needs an exchange of expert rows with a fixed order of sums, which the driver does not have")
    if level >= Repeatability.SPECULATION_INVARIANT:
        found.append("R4 needs sums that are the same for one row and for several, which is not proved")
    return found


def settle(backends: Any = torch.backends) -> None:
    """Tell torch's own products, which serve ops that fell back, to keep float32 and one order of sums."""
    backends.cuda.matmul.allow_tf32 = False
    backends.cudnn.allow_tf32 = False
    backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def prove(
    level: Repeatability,
    shapes: Sequence[LinearShape],
    claims: Mapping[str, OpCapability],
    linear: LinearOps,
    device: torch.device,
    *,
    interpreted: bool,
) -> None:
    """Try ``level`` with every shape, or raise DeterminismError with every reason.

    Args:
        level: the level that is demanded; NONE does nothing.
        shapes: every matrix product of the model.
        claims: the driver's claims.
        linear: the ops that are tried, built for batch invariance.
        device: where they are tried.
        interpreted: try them on small sizes.
    """
    if level <= Repeatability.NONE:
        return
    missing = missing_for(level, claims)
    if missing:
        raise DeterminismError(
            f"driver 'nvidia' cannot keep R{int(level)}: {'; '.join(missing)}. Unset DEEPINFER_BATCH_INVARIANT or "
            f"choose a driver that claims it."
        )
    most = MOST_INTERPRETED if interpreted else 0
    tried = dict.fromkeys(_cut(shape, most) for shape in shapes)
    failures = [failure for shape in tried for failure in _differing(shape, linear, device)]
    if failures:
        raise DeterminismError(f"driver 'nvidia' cannot keep R{int(level)} on this device: {'; '.join(failures)}.")


def _cut(shape: LinearShape, most: int) -> LinearShape:
    rows = min(shape.out_features, most or MOST_FEATURES)
    return LinearShape(min(shape.in_features, most) if most else shape.in_features, rows, shape.dtype)


def _differing(shape: LinearShape, linear: LinearOps, device: torch.device) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    rows = max(ROW_COUNTS)
    name = f"product {shape.in_features} x {shape.out_features} {shape.dtype}"
    kind: StoredFormat = "bfloat16" if shape.dtype == torch.bfloat16 else "float32"
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    weight_NK = torch.randn(shape.out_features, shape.in_features, generator=generator).to(dtype)
    x_TK = torch.randn(rows, shape.in_features, generator=generator).to(device)
    stored = StoredWeight(name, kind, weight_NK.to(device), None, shape.out_features, shape.in_features)
    prepared = linear.prepare(stored, "float32")
    expected_TN = linear.dense(x_TK, prepared)
    again_TN = linear.dense(x_TK, prepared)
    problems = [] if torch.equal(expected_TN, again_TN) else [f"{name} changes its bits from run to run"]
    return problems + [
        f"{name} changes its bits with {count} rows"
        for count in ROW_COUNTS
        if not torch.equal(linear.dense(x_TK[:count].contiguous(), prepared), expected_TN[:count])
    ]
