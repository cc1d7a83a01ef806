"""The options under which ops are run: every claimable combination that can change a result.

float64 is the yardstick; a driver that claims it is held to it in the full profile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch

from deepinfer.accelerator import OpOptions
from deepinfer_conformance.case import Specimen
from deepinfer_conformance.data.call import OpCall
from deepinfer_conformance.data.draws import Draws

F32: Final = OpOptions()
BF16: Final = OpOptions(activation_dtype=torch.bfloat16)
F64: Final = OpOptions(activation_dtype=torch.float64)
SERVED: Final = OpOptions(activation_dtype=torch.bfloat16, numerics="served")

PLAIN: Final = (F32, BF16)
"""Ops that neither numerics nor the cache format touch."""
NUMERIC: Final = (F32, BF16, SERVED)
KV: Final = (
    F32,
    BF16,
    OpOptions(kv_cache_dtype="float32"),
    OpOptions(activation_dtype=torch.bfloat16, kv_cache_dtype="float32"),
)
KV_NUMERIC: Final = (*KV, SERVED)
ONCE: Final = (F32,)
"""Ops whose inputs have dtypes of their own: sampling, plumbing, moves, codecs of bytes."""

_BYTES_OF_FLOAT32: Final = ("codec.gather_window", "codec.gather_entries", "codec.gather_index_keys")
"""Ops whose results are float32 by contract, whatever the activations are."""


class Specimens:
    """Collects the specimens of one op."""

    def __init__(self, op: str, seed: int, options: tuple[OpOptions, ...]) -> None:
        self.op = op
        self._seed = seed
        self._options = options
        self._made: list[Specimen] = []

    def add(
        self,
        name: str,
        build: Callable[[Draws, OpOptions], OpCall],
        *,
        options: tuple[OpOptions, ...] | None = None,
        full: bool = False,
        exact: bool = False,
        by_rows: bool = False,
        **extents: int,
    ) -> None:
        """Add one; ``build`` gets draws that belong to this specimen alone."""
        op, seed = self.op, self._seed
        chosen = self._options if options is None else options
        # The yardstick's own dtype: only for drivers that claim it, and only in the full profile.
        double = (F64,) if chosen[0] == F32 and chosen is not ONCE and op not in _BYTES_OF_FLOAT32 else ()
        for each, in_full in ((chosen, full), (double, True)):
            if each:
                self._made.append(
                    Specimen(
                        op=op,
                        name=name,
                        build=lambda opts: build(Draws(seed, f"{op}/{name}"), opts),
                        options=each,
                        extents=extents,
                        full=in_full,
                        exact=exact,
                        by_rows=by_rows,
                    )
                )

    def __iter__(self) -> Iterator[Specimen]:
        return iter(self._made)
