"""Loads of experts to balance: skewed, scattered by chance, and drifting from window to window.

Legend: T steps, L layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import ArgumentError
from deepinfer.parallel.loads import LoadWindow

DEFAULT_LOADS: Final = ("zipf-0.5", "zipf-0.8", "zipf-1.0", "zipf-1.2", "lognormal")
_ZIPF = "zipf-"
_NOISELESS_PAIRS = 64  # steps' worth of pairs in the noiseless step, so that whole numbers follow the weights closely


def zipf_exponent(load: str) -> float | None:
    """Return the exponent of ``zipf-EXPONENT``, None for ``lognormal``; raises ArgumentError for anything else."""
    if load == "lognormal":
        return None
    try:
        exponent = float(load.removeprefix(_ZIPF)) if load.startswith(_ZIPF) else float("nan")
    except ValueError:
        exponent = float("nan")
    if not 0 <= exponent < 10:
        raise ArgumentError("load", [f"{load!r}: write zipf-EXPONENT, as in zipf-0.8, or lognormal"])
    return exponent


@dataclass(frozen=True, slots=True)
class LoadShape:
    """Sizes of a load.

    Attributes:
        layers: layers, each with weights of its own order.
        experts: experts of a layer.
        pairs_per_step: pairs of a token and an expert in one step of one layer.
        steps: steps of a window.
    """

    layers: int = 40
    experts: int = 384
    pairs_per_step: int = 98_304
    steps: int = 10


class LoadStream:
    """Windows of one load, one after the other; a stream and its continuations are functions of seed and sizes."""

    def __init__(self, load: str, shape: LoadShape, seed: int, *, continuation: int = 0) -> None:
        """Give every layer its weights: zipf or exp(normal), permuted by Philox keyed with seed and layer."""
        exponent = zipf_exponent(load)
        self._shape = shape
        self._weights_LE = np.empty((shape.layers, shape.experts))
        self._generators = []
        for layer in range(shape.layers):
            generator = np.random.Generator(np.random.Philox(key=[seed, layer]))
            if exponent is None:
                weights_E = np.exp(generator.standard_normal(shape.experts))
            else:
                weights_E = np.arange(1, shape.experts + 1) ** -exponent
            weights_E = weights_E[generator.permutation(shape.experts)]
            self._weights_LE[layer] = weights_E / weights_E.sum()
            self._generators.append(_jumped(seed, layer, continuation))

    def continued(self, seed: int, continuation: int) -> LoadStream:
        """Return a stream that goes on from here by other chances; continuation 0 is the first stream's own."""
        other = object.__new__(LoadStream)
        other._shape = self._shape
        other._weights_LE = self._weights_LE.copy()
        other._generators = [_jumped(seed, layer, continuation) for layer in range(self._shape.layers)]
        return other

    def window(self) -> LoadWindow:
        """Draw the next window: a multinomial of the pairs for every step and layer."""
        counts_LTE = np.stack(
            [
                generator.multinomial(self._shape.pairs_per_step, weights_E, size=self._shape.steps)
                for generator, weights_E in zip(self._generators, self._weights_LE, strict=True)
            ]
        )
        return LoadWindow(np.ascontiguousarray(counts_LTE.transpose(1, 0, 2)).astype(np.int64))

    def drift(self, share: float) -> None:
        """Let a share of the experts, chosen at random in every layer, swap weights among each other."""
        for generator, weights_E in zip(self._generators, self._weights_LE, strict=True):
            chosen = generator.choice(weights_E.size, round(share * weights_E.size), replace=False)
            weights_E[chosen] = weights_E[generator.permutation(chosen)]

    def noiseless_step(self) -> LoadWindow:
        """Return one step without chance: whole numbers in proportion to the weights."""
        counts_LE: NDArray[np.int64] = np.rint(
            self._weights_LE * (_NOISELESS_PAIRS * self._shape.pairs_per_step)
        ).astype(np.int64)
        return LoadWindow(counts_LE[None])


def _jumped(seed: int, layer: int, continuation: int) -> np.random.Generator:
    # The first jump belongs to the drawing of weights, so that no window repeats its numbers.
    return np.random.Generator(np.random.Philox(key=[seed, layer]).jumped(1 + continuation))
