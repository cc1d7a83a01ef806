"""Cases of hyper-connection mixing.

Legend: T rows, S streams, D hidden size, M mixing outputs, K = S * D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from deepinfer.accelerator import OpOptions
from deepinfer.accelerator.ops.mixing import Mix, MixWeights
from deepinfer_conformance.case import Specimen
from deepinfer_conformance.cases.axes import PLAIN, Specimens
from deepinfer_conformance.data.call import OpCall
from deepinfer_conformance.data.draws import Draws
from deepinfer_conformance.data.layouts import pitched

NAN = float("nan")
SHAPES = (("17_rows", (17, 4, 32)), ("one_row", (1, 4, 64)), ("no_rows", (0, 4, 32)), ("two_streams", (5, 2, 48)))


def specimens(seed: int) -> Iterator[Specimen]:
    """Yield the specimens of group ``mixing``."""
    yield from _mixes(seed)
    yield from _collapse(seed)
    yield from _post(seed)


def _streams(draws: Draws, options: OpOptions, shape: tuple[int, int, int]) -> torch.Tensor:
    return draws.normal("streams", *shape, dtype=options.activation_dtype)


def _mixes(seed: int) -> Iterator[Specimen]:
    found = Specimens("mixing.mixes", seed, PLAIN)

    def mixes(
        name: str,
        shape: tuple[int, int, int],
        *,
        iterations: int = 4,
        change: Callable[[torch.Tensor], torch.Tensor] | None = None,
        by_rows: bool = False,
        full: bool = False,
    ) -> None:
        def build(draws: Draws, options: OpOptions) -> OpCall:
            streams, width = shape[1], shape[1] * shape[2]
            outputs = (2 + streams) * streams
            weights = MixWeights(
                fn_MK=draws.normal("fn", outputs, width, scale=width**-0.5),
                base_M=draws.normal("base", outputs),
                scale_3=1 + draws.normal("scale", 3, scale=0.3),
            )
            x = _streams(draws, options, shape)
            return OpCall(
                found.op,
                {
                    "streams_TSD": x if change is None else change(x),
                    "weights": weights,
                    "iterations": iterations,
                    "mix_eps": 1e-6,
                    "norm_eps": 1e-20,
                },
            )

        found.add(name, build, by_rows=by_rows, full=full)

    for name, shape in SHAPES:
        mixes(name, shape, by_rows=shape[0] > 1)
    mixes("one_iteration", (3, 4, 32), iterations=1)
    mixes("twenty_iterations", (3, 4, 32), iterations=20)
    mixes("pitched_input", (3, 4, 32), change=lambda x: pitched(x, NAN))
    mixes("nan_stays_in_its_row", (4, 4, 32), change=lambda x: x.index_fill(0, torch.tensor([1]), NAN))
    mixes("wide", (5, 4, 1280), full=True, by_rows=True)
    return iter(found)


def _collapse(seed: int) -> Iterator[Specimen]:
    found = Specimens("mixing.collapse", seed, PLAIN)
    for name, shape in SHAPES:

        def build(draws: Draws, options: OpOptions, shape: tuple[int, int, int] = shape) -> OpCall:
            pre_TS = draws.uniform("pre", *shape[:2]).to(_wide(options))
            return OpCall(found.op, {"streams_TSD": _streams(draws, options, shape), "pre_TS": pre_TS})

        found.add(name, build, by_rows=shape[0] > 1)
    found.add("pitched_input", lambda draws, options: _pitched_collapse(draws, options, found.op))
    return iter(found)


def _pitched_collapse(draws: Draws, options: OpOptions, op: str) -> OpCall:
    streams_TSD = pitched(_streams(draws, options, (6, 4, 32)), NAN)
    return OpCall(op, {"streams_TSD": streams_TSD, "pre_TS": draws.uniform("pre", 6, 4).to(_wide(options))})


def _post(seed: int) -> Iterator[Specimen]:
    found = Specimens("mixing.post", seed, PLAIN)
    for name, shape in SHAPES:

        def build(draws: Draws, options: OpOptions, shape: tuple[int, int, int] = shape) -> OpCall:
            rows, streams, width = shape
            mix = Mix(
                pre_TS=draws.uniform("pre", rows, streams).to(_wide(options)),
                post_TS=(2 * draws.uniform("post", rows, streams)).to(_wide(options)),
                comb_TSS=draws.uniform("comb", rows, streams, streams).to(_wide(options)),
            )
            output_TD = draws.normal("output", rows, width, dtype=options.activation_dtype)
            return OpCall(
                found.op, {"output_TD": output_TD, "streams_TSD": _streams(draws, options, shape), "mix": mix}
            )

        found.add(name, build, by_rows=shape[0] > 1)
    return iter(found)


def _wide(options: OpOptions) -> torch.dtype:
    return torch.float64 if options.activation_dtype == torch.float64 else torch.float32
