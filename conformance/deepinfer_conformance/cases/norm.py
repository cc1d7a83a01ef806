"""Cases of RMSNorm and rotary positions.

Legend: T rows, D width, H heads, C head width, P positions, R rotary pairs, S streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from deepinfer.accelerator import OpOptions
from deepinfer.accelerator.ops.norm import RotaryTable
from deepinfer_conformance.case import Specimen
from deepinfer_conformance.cases.axes import PLAIN, Specimens
from deepinfer_conformance.data.call import OpCall
from deepinfer_conformance.data.draws import Draws
from deepinfer_conformance.data.layouts import pitched, turned

NAN = float("nan")
POSITIONS = 40


def specimens(seed: int) -> Iterator[Specimen]:
    """Yield the specimens of group ``norm``."""
    yield from _rms(seed)
    yield from _rotary(seed)


def _rms(seed: int) -> Iterator[Specimen]:
    found = Specimens("norm.rms", seed, PLAIN)

    def norm(
        name: str,
        shape: tuple[int, ...],
        *,
        eps: float = 1e-20,
        change: Callable[[torch.Tensor], torch.Tensor] | None = None,
        by_rows: bool = False,
        full: bool = False,
    ) -> None:
        def build(draws: Draws, options: OpOptions) -> OpCall:
            x = draws.normal("x", *shape, dtype=options.activation_dtype)
            weight_D = 1 + draws.normal("weight", shape[-1], scale=0.2)
            return OpCall(found.op, {"x_TD": x if change is None else change(x), "weight_D": weight_D, "eps": eps})

        found.add(name, build, by_rows=by_rows, full=full)

    norm("17_rows", (17, 64), by_rows=True)
    norm("odd_width", (5, 7), by_rows=True)
    norm("one_row", (1, 512))
    norm("no_rows", (0, 64))
    norm("eps_1e_6", (4, 96), eps=1e-6)
    norm("heads_in_front", (3, 4, 32), by_rows=True)
    norm("wide", (2, 5120), full=True)
    norm("wider_than_a_sum", (2, 20_000), full=True)
    norm("zero_row_gives_zeros", (3, 64), change=lambda x: x * torch.tensor([[1.0], [0.0], [1.0]], dtype=x.dtype))
    norm("nan_stays_in_its_row", (4, 64), change=lambda x: x.index_fill(0, torch.tensor([2]), NAN))
    norm("pitched_input", (4, 64), change=lambda x: pitched(x, NAN))
    norm("column_major_input", (4, 64), change=turned)
    norm("small_values", (4, 64), change=lambda x: x * 2.0**-40)
    norm("large_values", (4, 64), change=lambda x: x * 2.0**50)
    return iter(found)


def rotary_table(draws: Draws, pairs: int) -> RotaryTable:
    """Return a table of points on the unit circle, exactly the same everywhere."""
    half_PR = draws.uniform("turn", POSITIONS, pairs) * 2 - 1
    # The rational parametrisation: no library function whose last bit could differ.
    cos_PR, sin_PR = (1 - half_PR**2) / (1 + half_PR**2), 2 * half_PR / (1 + half_PR**2)
    cos_PR[0], sin_PR[0] = 1.0, 0.0
    return RotaryTable(cos_PR.to(torch.float32), sin_PR.to(torch.float32))


def _rotary(seed: int) -> Iterator[Specimen]:
    found = Specimens("norm.rotary", seed, PLAIN)

    def rotation(
        name: str,
        shape: tuple[int, ...],
        pairs: int,
        *,
        inverse: bool = False,
        pitch: bool = False,
        by_rows: bool = False,
    ) -> None:
        def build(draws: Draws, options: OpOptions) -> OpCall:
            x = draws.normal("x", *shape, dtype=options.activation_dtype)
            position_T = draws.integers("position", 0, POSITIONS, shape[0])
            if shape[0] > 1:
                position_T[0], position_T[-1] = 0, POSITIONS - 1
            arguments = {"x": pitched(x, NAN) if pitch else x, "table": rotary_table(draws, pairs)}
            return OpCall(found.op, {**arguments, "position_T": position_T, "inverse": inverse})

        found.add(name, build, by_rows=by_rows)

    rotation("flat", (9, 32), 8, by_rows=True)
    rotation("heads", (7, 4, 48), 8, by_rows=True)
    rotation("all_channels", (5, 16), 8)
    rotation("inverse", (6, 2, 32), 4, inverse=True, by_rows=True)
    rotation("no_rows", (0, 2, 32), 4)
    rotation("one_row", (1, 2, 32), 4)
    rotation("pitched_input", (6, 2, 32), 4, pitch=True)
    return iter(found)
