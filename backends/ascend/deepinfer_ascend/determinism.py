"""Repeatability levels: what each needs of the stack, what is missing, and a trial on the device.

R1 needs deterministic kernels and a fixed order of reductions between ranks. R2 also needs kernels that never choose an
algorithm by the batch, which newer CANN calls level 3, and claims of every op. R3 also needs an exchange of expert rows
with a fixed order of sums. What a level needs and this stack lacks is refused by name, everything at once.

Legend: T rows, N out features, K in features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from deepinfer.accelerator.capabilities import OpCapability, Repeatability
from deepinfer.accelerator.interface import LinearShape
from deepinfer.errors import DeterminismError
from deepinfer_ascend import environment, runtime

VENDOR_LEVELS: Final = {Repeatability.RUN_TO_RUN: 1, Repeatability.BATCH_INVARIANT: 3}
"""torch.npu.set_deterministic_level: 1 deterministic, 2 strong consistency, 3 batch consistency."""

ROW_COUNTS: Final = (1, 2, 7, 8, 17, 33)
MOST_FEATURES: Final = 4096
"""A wider weight is tried with this many out features: the choice of an algorithm shows on fewer."""

Product = Callable[[Tensor, Tensor], Tensor]
SetLevel = Callable[[int], None]


def set_vendor_level(level: int) -> None:
    """Ask torch-npu for a deterministic level; DeterminismError when this stack has no such switch or refuses it."""
    if not hasattr(runtime.npu(), "set_deterministic_level"):
        if level > 1:
            raise DeterminismError("torch-npu has no set_deterministic_level; use torch-npu 2.13 or later")
        torch.use_deterministic_algorithms(mode=True)
        return
    try:
        runtime.npu().set_deterministic_level(level)
    except (RuntimeError, ValueError) as error:
        raise DeterminismError(f"CANN refuses deterministic level {level}: {error}; upgrade CANN") from error


def missing_for(
    level: Repeatability, claims: Mapping[str, OpCapability], environ: Mapping[str, str] | None = None
) -> list[str]:
    """Return what ``level`` needs and the driver or the environment lacks, one sentence each."""
    found = environment.problems(level, environ)
    weaker = sorted(op for op, claim in claims.items() if claim.repeatability < min(level, 2))
    if weaker and level >= Repeatability.BATCH_INVARIANT:
        found.append(f"R2 is not proved on this chip for {', '.join(weaker)}")
    if level >= Repeatability.PLACEMENT_INVARIANT:
        found.append("R3 needs an exchange of expert rows with a fixed order of sums, which no operator here promises")
    if level >= Repeatability.SPECULATION_INVARIANT:
        found.append("R4 is beyond this driver")
    return found


def prove(
    level: Repeatability,
    shapes: Sequence[LinearShape],
    claims: Mapping[str, OpCapability],
    device: torch.device,
    *,
    set_level: SetLevel = set_vendor_level,
    product: Product = torch.nn.functional.linear,
) -> None:
    """Set the stack to ``level`` and try it with every shape, or raise DeterminismError with every reason.

    Args:
        level: the level that is demanded; NONE does nothing.
        shapes: every matrix product of the model.
        claims: the driver's claims.
        device: where the products are tried.
        set_level: sets the vendor's deterministic level.
        product: the product to try.
    """
    if level <= Repeatability.NONE:
        return
    missing = missing_for(level, claims)
    if missing:
        raise DeterminismError(
            f"driver 'ascend' cannot keep R{int(level)}: {'; '.join(missing)}. Unset DEEPINFER_BATCH_INVARIANT or "
            f"choose a driver that claims it."
        )
    environment.apply(level)
    set_level(VENDOR_LEVELS[level])
    counts = ROW_COUNTS if level >= Repeatability.BATCH_INVARIANT else ROW_COUNTS[-1:]
    failures = [failure for shape in shapes for failure in _differing(shape, counts, device, product)]
    if failures:
        raise DeterminismError(f"driver 'ascend' cannot keep R{int(level)} on this device: {'; '.join(failures)}.")


def _differing(shape: LinearShape, counts: Sequence[int], device: torch.device, product: Product) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    rows = max(ROW_COUNTS)
    width = min(shape.out_features, MOST_FEATURES)
    weight_NK = torch.randn(width, shape.in_features, generator=generator).to(shape.dtype).to(device)
    x_TK = torch.randn(rows, shape.in_features, generator=generator).to(shape.dtype).to(device)
    expected_TN = product(x_TK, weight_NK).cpu()
    name = f"product {shape.in_features} x {shape.out_features} {shape.dtype}"
    return [
        f"{name} changes its bits with {count} rows"
        for count in counts
        if not torch.equal(product(x_TK[:count].contiguous(), weight_NK).cpu(), expected_TN[:count])
    ]
