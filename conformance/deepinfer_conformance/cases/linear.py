"""Cases of embedding, dense and grouped projections.

Legend: T rows, K in features, N out features, G groups, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from deepinfer.accelerator import OpOptions
from deepinfer.accelerator.weights import Precision, StoredFormat
from deepinfer_conformance.case import Specimen
from deepinfer_conformance.cases.axes import F32, NUMERIC, PLAIN, Specimens
from deepinfer_conformance.data.call import OpCall, Recipe
from deepinfer_conformance.data.draws import Draws
from deepinfer_conformance.data.layouts import pitched, turned
from deepinfer_conformance.data.weights import store, stored_weight

NAN = float("nan")
Change = Callable[[torch.Tensor], torch.Tensor]


def specimens(seed: int) -> Iterator[Specimen]:
    """Yield the specimens of group ``linear``."""
    yield from _embed(seed)
    yield from _prepare(seed)
    yield from _dense(seed)
    yield from _grouped(seed)


def _embed(seed: int) -> Iterator[Specimen]:
    found = Specimens("linear.embed", seed, PLAIN)
    for rows in (0, 1, 7, 64):
        for table_dtype in (torch.float32, torch.bfloat16):

            def build(draws: Draws, _: OpOptions, rows: int = rows, dtype: torch.dtype = table_dtype) -> OpCall:
                ids_T = draws.integers("ids", 0, 97, rows)
                return OpCall(found.op, {"ids_T": ids_T, "table_VD": draws.normal("table", 97, 24, dtype=dtype)})

            label = str(table_dtype).removeprefix("torch.")
            found.add(f"{rows}_rows_of_{label}", build, by_rows=rows == 7, full=rows == 64)

    def ends(draws: Draws, _: OpOptions) -> OpCall:
        ids_T = torch.tensor([0, 96, 96, 0, 1])
        return OpCall(found.op, {"ids_T": ids_T, "table_VD": pitched(draws.normal("table", 97, 24), NAN)})

    found.add("first_and_last_id_of_pitched_table", ends)
    return iter(found)


def _prepare(seed: int) -> Iterator[Specimen]:
    for op in ("linear.prepare", "linear.prepare_grouped"):
        found = Specimens(op, seed, NUMERIC)
        for stored_format in ("float32", "bfloat16", "fp8_block32", "mxfp4"):

            def build(draws: Draws, _: OpOptions, op: str = op, stored_format: StoredFormat = stored_format) -> OpCall:
                arguments: dict[str, object] = {"stored": stored_weight(draws, "layers.0.w", stored_format, 64, 96)}
                if op == "linear.prepare_grouped":
                    arguments["groups"] = 2
                return OpCall(op, arguments)

            found.add(stored_format, build)
        yield from found


def dense_call(
    draws: Draws,
    options: OpOptions,
    stored_format: StoredFormat,
    shape: tuple[int, int, int],
    precision: Precision = "activation",
) -> OpCall:
    """Return a product of x [T, K] and a weight [N, K]; ``shape`` is (T, N, K)."""
    rows, out_features, in_features = shape
    stored = stored_weight(draws, "layers.0.w", stored_format, out_features, in_features)
    x_TK = draws.normal("x", rows, in_features, dtype=options.activation_dtype)
    recipe = Recipe("linear.prepare", {"stored": stored, "precision": precision})
    return OpCall("linear.dense", {"x_TK": x_TK, "weight": recipe})


def _dense(seed: int) -> Iterator[Specimen]:
    found = Specimens("linear.dense", seed, NUMERIC)

    def product(
        name: str,
        stored_format: StoredFormat,
        shape: tuple[int, int, int],
        *,
        precision: Precision = "activation",
        change: Change | None = None,
        by_rows: bool = False,
        full: bool = False,
    ) -> None:
        def build(draws: Draws, options: OpOptions) -> OpCall:
            call = dense_call(draws, options, stored_format, shape, precision)
            return call if change is None else call.replacing(x_TK=change(call.tensor("x_TK")))

        found.add(name, build, by_rows=by_rows, full=full)

    product("fp8", "fp8_block32", (17, 96, 64), by_rows=True)
    product("fp8_ragged_blocks", "fp8_block32", (5, 70, 100), by_rows=True)
    product("fp8_one_row", "fp8_block32", (1, 32, 32))
    product("fp8_no_rows", "fp8_block32", (0, 64, 64))
    product("mxfp4", "mxfp4", (9, 48, 64), by_rows=True)
    product("float32", "float32", (33, 24, 80), by_rows=True)
    product("bfloat16", "bfloat16", (8, 129, 72), by_rows=True)
    product("exact_precision_of_bfloat16", "bfloat16", (6, 40, 64), precision="float32", by_rows=True)
    product("exact_precision_of_float32", "float32", (6, 101, 96), precision="float32", by_rows=True)
    product("exact_precision_of_fp8", "fp8_block32", (6, 40, 64), precision="float32")
    product("long_reduction", "fp8_block32", (3, 40, 2048))
    product("longer_reduction", "bfloat16", (4, 24, 20480), full=True)
    product("wide", "fp8_block32", (16, 1024, 512), full=True, by_rows=True)
    product("narrow", "float32", (65, 24, 512), by_rows=True)
    product("pitched_input", "fp8_block32", (6, 64, 64), change=lambda x: pitched(x, NAN))
    product("column_major_input", "float32", (6, 40, 64), change=turned)
    product("one_row_repeated", "fp8_block32", (1, 64, 64), change=lambda x: x.expand(5, 64))
    product("nan_stays_in_its_row", "fp8_block32", (6, 64, 64), change=_spoilt(2, NAN))
    product("infinity_stays_in_its_row", "float32", (6, 64, 64), change=_spoilt(1, float("inf")))
    product("denormal_inputs", "float32", (4, 32, 32), change=lambda x: x * 2.0**-128)
    product("amax_floor", "fp8_block32", (4, 32, 64), change=lambda x: x * 2.0**-20)

    def cancelling(draws: Draws, options: OpOptions) -> OpCall:
        half_NK = draws.normal("w", 32, 64)
        weight = store("layers.0.w", "float32", torch.cat([half_NK, -half_NK], 1))
        x = draws.normal("x", 5, 64, dtype=options.activation_dtype)
        recipe = Recipe("linear.prepare", {"stored": weight, "precision": "activation"})
        return OpCall(found.op, {"x_TK": torch.cat([x, x], 1), "weight": recipe})

    found.add("cancelling_terms", cancelling, options=(F32,))
    return iter(found)


def _spoilt(row: int, value: float) -> Change:
    def change(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[row, 3] = value
        return x

    return change


def _grouped(seed: int) -> Iterator[Specimen]:
    found = Specimens("linear.grouped", seed, NUMERIC)
    grouped: tuple[tuple[str, StoredFormat, tuple[int, int, int, int]], ...] = (
        ("fp8", "fp8_block32", (9, 2, 32, 64)),
        ("four_groups", "fp8_block32", (3, 4, 32, 96)),
        ("bfloat16", "bfloat16", (5, 3, 20, 40)),
        ("no_rows", "fp8_block32", (0, 2, 32, 64)),
        ("one_row", "fp8_block32", (1, 2, 32, 64)),
    )
    for name, stored_format, sizes in grouped:

        def build(
            draws: Draws,
            options: OpOptions,
            stored_format: StoredFormat = stored_format,
            sizes: tuple[int, int, int, int] = sizes,
        ) -> OpCall:
            rows, groups, out_features, in_features = sizes
            stored = stored_weight(draws, "layers.0.wo_a", stored_format, groups * out_features, in_features)
            x_TGK = draws.normal("x", rows, groups, in_features, dtype=options.activation_dtype)
            recipe = Recipe("linear.prepare_grouped", {"stored": stored, "groups": groups})
            return OpCall("linear.grouped", {"x_TGK": x_TGK, "weight": recipe})

        found.add(name, build, by_rows=sizes[0] > 1)
    return iter(found)
