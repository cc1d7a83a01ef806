"""How far a result may lie from the float64 one: a function with a derivation, owned by the suite.

Notation: ``u(t)`` is the unit roundoff of dtype t, the largest relative error of one rounding to nearest
(2^-24 for float32, 2^-8 for bfloat16). A driver cannot change anything here; what it cannot meet is a waiver.

**Sums.** A sum of n products, each rounded once, added in any order in a format with roundoff u, satisfies
``|computed - exact| <= gamma_n * sum |terms|`` with ``gamma_n = n u / (1 - n u)`` (Higham, *Accuracy and Stability of
Numerical Algorithms*, section 3.1). That worst case needs every rounding to go the same way. If roundings are
independent with mean zero, the same holds with ``lambda * sqrt(n) * u`` and probability ``1 - 2 exp(-lambda^2 / 2)``
(Higham and Mary, 2019). With ``lambda = 6`` that is one in 3 * 10^7 per element; we allow the smaller of both:

    growth(n, t) = min(n + 1, 6 * sqrt(n + 1)) * u(t)

One more than n, for the rounding of the products. Fewer partial sums (tiles, trees, wider registers) only lower the
error, so the bound holds for every tiling, split or tree of the same format. The function takes the *terms'* absolute
sum from the caller, so cancellation is accounted for exactly where it happens.

**Elementary functions.** exp, log1p, rsqrt, sqrt and division are taken to be within 2 ulp = 4 u of their argument's
exact value; an op's chain of them is counted in ``ELEMENTARY``.

**Output.** One rounding to the activation dtype: ``u(dtype) * |result|``. Where the contract has more rounding points
(served numerics, activations between two products) the family's own bound in ``deepinfer_conformance.bounds`` adds them
and says so.

**Underflow.** Devices may flush denormals: 2^-126 absolute, per result.

**Where the reference rounds differently.** The yardstick is cpu_ref in float64, whose own error (2^-53 scale) is
neglected against all of the above.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

UNIT_ROUNDOFF: Final = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float8_e4m3fn: 2.0**-4,
}
CONFIDENCE: Final = 6.0
FLUSH: Final = 2.0**-126

ELEMENTARY: Final = {
    "linear.dense": 0,
    "linear.grouped": 0,
    "norm.rms": 8,  # division by D, + eps, rsqrt (4), two products
    "norm.rotary": 3,  # two products and a sum
    "compression.pool_pairs": 14,  # difference, two exponentials (4 each), sum, division (4)
    "selection.top_entries": 1,
    "attention.sparse": 14,  # scale, exponential (4) of a difference, division (4), two products, sink's exponential
    "drafting.attend": 14,
    "mixing.mixes": 20,  # statistic (8), scale, base, exponential (4), + 1, division (4), + eps
    "mixing.collapse": 1,
    "mixing.post": 1,
    "memory.gate": 20,  # two statistics, root, sigmoid
    "experts.route": 20,  # exponential, log1p, root (4 each), normalisation (6)
    "experts.routed": 10,  # silu (9), product
    "experts.shared": 10,
    "experts.combine": 0,
    "experts.local": 10,
}
"""Roundings of an op besides its sums, in units of the accumulator's roundoff."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Factors of one op.

    Attributes:
        terms: times the sum of the absolute terms of a reduction.
        result: times the absolute result.
        elementary: times whatever passes through the op's elementary functions.
        floor: absolute.
    """

    terms: float
    result: float
    elementary: float
    floor: float


def growth(length: int, accumulator: torch.dtype) -> float:
    """Return the factor of the absolute sum of ``length`` terms."""
    return min(length + 1, CONFIDENCE * math.sqrt(length + 1)) * UNIT_ROUNDOFF[accumulator]


def accumulator_of(dtype: torch.dtype) -> torch.dtype:
    """Return the least accumulator that the contract asks for: float32, or float64 with float64 activations."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tol(op: str, dtype: torch.dtype, length: int, accumulator: torch.dtype | None = None) -> Tolerance:
    """Return the tolerance of one op.

    Args:
        op: "group.op".
        dtype: of the result.
        length: of the longest reduction; 1 where there is none.
        accumulator: of the reduction; None for the least that the contract allows.
    """
    accumulator = accumulator or accumulator_of(dtype)
    elementary = ELEMENTARY[op] * UNIT_ROUNDOFF[accumulator]
    # A float64 yardstick is no better than a float64 driver: the yardstick's error is granted to the driver.
    double = 2.0 if accumulator == torch.float64 else 1.0
    return Tolerance(
        terms=double * growth(length, accumulator),
        result=UNIT_ROUNDOFF[dtype] + double * elementary,
        elementary=double * elementary,
        floor=FLUSH,
    )


def independent(errors: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a bound on the sum of independent rounding errors: the smaller of their sum and 6 times their norm.

    The second holds with the probability above (Hoeffding's inequality for errors of mean zero within ``errors``).
    """
    return torch.minimum(errors.sum(dim), CONFIDENCE * errors.square().sum(dim).sqrt())
