"""Cases of copies within and out of byte pools.

Legend: N items of a pool, b bytes of one, n moved items.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepinfer.accelerator import OpOptions
from deepinfer_conformance.case import Specimen
from deepinfer_conformance.cases.axes import ONCE, Specimens
from deepinfer_conformance.data.call import OpCall
from deepinfer_conformance.data.draws import Draws

ITEMS, BYTES = 11, 356


def specimens(seed: int) -> Iterator[Specimen]:
    """Yield the specimens of group ``moves``."""
    for op in ("moves.copy", "moves.zero", "moves.save", "moves.restore"):
        found = Specimens(op, seed, ONCE)
        for moved in (0, 1, 4):
            for pitch in (False, True):

                def build(draws: Draws, _: OpOptions, op: str = op, moved: int = moved, pitch: bool = pitch) -> OpCall:  # noqa: FBT001
                    return _call(draws, op, moved, pitch=pitch)

                found.add(f"{moved}_items{'_of_a_pitched_pool' if pitch else ''}", build)
        yield from found


def _call(draws: Draws, op: str, moved: int, *, pitch: bool) -> OpCall:
    pool_Nb = draws.bytes("pool", ITEMS, BYTES + 64)
    pool_Nb = pool_Nb[:, 32:-32] if pitch else pool_Nb[:, 32:-32].contiguous()
    order = draws.permutation("items", ITEMS)
    source_n, target_n = order[:moved], order[moved : 2 * moved]
    match op:
        case "moves.copy":
            return OpCall(op, {"pool_Nb": pool_Nb, "source_n": source_n, "target_n": target_n})
        case "moves.save":
            return OpCall(op, {"pool_Nb": pool_Nb, "source_n": source_n})
        case "moves.zero":
            return OpCall(op, {"pool_Nb": pool_Nb, "target_n": target_n})
        case _:
            data_nb: torch.Tensor = draws.bytes("data", moved, BYTES)
            return OpCall(op, {"pool_Nb": pool_Nb, "target_n": target_n, "data_nb": data_nb})
