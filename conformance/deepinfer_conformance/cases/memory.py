"""Cases of the n-gram memory: hash, look-up, gate.

Legend: T rows, G n-gram length, F hash columns, W row width, S streams, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from deepinfer.accelerator import OpOptions
from deepinfer.accelerator.ops.memory import NgramHash, NgramTable
from deepinfer.numerics import quantise_engram_table
from deepinfer_conformance.case import Specimen
from deepinfer_conformance.cases.axes import NUMERIC, ONCE, PLAIN, Specimens
from deepinfer_conformance.data.call import OpCall
from deepinfer_conformance.data.draws import Draws
from deepinfer_conformance.data.layouts import pitched

NAN = float("nan")
LENGTH, HEADS, TABLE_ROWS, WIDTH = 3, 2, 211, 64


def specimens(seed: int) -> Iterator[Specimen]:
    """Yield the specimens of group ``memory``."""
    yield from _ngram_rows(seed)
    yield from _gather_rows(seed)
    yield from _gate(seed)


def _constants(draws: Draws) -> NgramHash:
    primes = torch.tensor([[53, 59], [61, 67]])
    # Odd multipliers near 2^40 make the products wrap around int64, as the released ones do.
    multipliers_G = draws.integers("multipliers", 2**29, 2**30, LENGTH) * 2**33 + 1
    offsets_F = torch.cat([torch.zeros(1, dtype=torch.int64), primes.flatten().cumsum(0)[:-1]])
    return NgramHash(multipliers_G, primes, offsets_F, pad_id=2)


def _ngram_rows(seed: int) -> Iterator[Specimen]:
    found = Specimens("memory.ngram_rows", seed, ONCE)

    def hashed(
        name: str, rows: int, change: Callable[[torch.Tensor], None] | None = None, *, by_rows: bool = False
    ) -> None:
        def build(draws: Draws, _: OpOptions) -> OpCall:
            tokens_TG = draws.integers("tokens", 0, 2**20, rows, LENGTH)
            if change is not None:
                change(tokens_TG)
            return OpCall(found.op, {"tokens_TG": tokens_TG, "constants": _constants(draws)})

        found.add(name, build, by_rows=by_rows)

    hashed("17_rows", 17, by_rows=True)
    hashed("no_rows", 0)
    hashed("one_row", 1)

    def history_begins(tokens_TG: torch.Tensor) -> None:
        tokens_TG[0, 1:] = -1
        tokens_TG[1, 2] = -1
        tokens_TG[2, 1] = -1  # blocks what lies further back as well
        tokens_TG[3, 0] = -1

    hashed("history_begins_or_is_blocked", 6, history_begins, by_rows=True)
    return iter(found)


def _gather_rows(seed: int) -> Iterator[Specimen]:
    found = Specimens("memory.gather_rows", seed, NUMERIC)
    for table_format in ("engram_fp8", "float32", "bfloat16"):
        for rows in (0, 1, 9):

            def build(draws: Draws, _: OpOptions, table_format: str = table_format, rows: int = rows) -> OpCall:
                values = draws.normal("table", TABLE_ROWS, WIDTH)
                table = NgramTable("layers.1.engram", values, None)
                if table_format == "engram_fp8":
                    quantised = quantise_engram_table(values)
                    table = NgramTable("layers.1.engram", quantised.weight, quantised.scale)
                elif table_format == "bfloat16":
                    table = NgramTable("layers.1.engram", values.to(torch.bfloat16), None)
                rows_TF = draws.integers("rows", 0, TABLE_ROWS, rows, 4)
                if rows > 2:
                    rows_TF[1] = -1
                    rows_TF[2, 0], rows_TF[2, 1] = TABLE_ROWS - 1, 0
                return OpCall(found.op, {"table": table, "rows_TF": rows_TF})

            found.add(f"{table_format}_{rows}_rows", build, by_rows=rows > 2)

    def virtual(draws: Draws, _: OpOptions) -> OpCall:
        """Rows times width exceed 2^31 and the memory is one row."""
        values = draws.normal("table", 1, WIDTH).expand(2**30, -1)
        rows_TF = torch.tensor([[0, 2**30 - 1], [2**27 + 1, -1]])
        return OpCall(found.op, {"table": NgramTable("layers.1.engram", values, None), "rows_TF": rows_TF})

    found.add("rows_past_2_31_elements_by_virtual_strides", virtual, options=ONCE)
    return iter(found)


def _gate(seed: int) -> Iterator[Specimen]:
    found = Specimens("memory.gate", seed, PLAIN)

    def gate(
        name: str,
        shape: tuple[int, int, int],
        change: Callable[[dict[str, torch.Tensor]], None] | None = None,
        *,
        by_rows: bool = False,
    ) -> None:
        def build(draws: Draws, options: OpOptions) -> OpCall:
            rows, streams, width = shape
            dtype = options.activation_dtype
            arguments = {
                "streams_TSD": draws.normal("streams", rows, streams, width, dtype=dtype),
                "key_TSD": draws.normal("key", rows, streams, width, dtype=dtype),
                "value_TD": draws.normal("value", rows, width, dtype=dtype),
                "query_weight_SD": 1 + draws.normal("query weight", streams, width, scale=0.2),
                "key_weight_SD": 1 + draws.normal("key weight", streams, width, scale=0.2),
                "alive_T": draws.uniform("alive", rows) < 0.7,
            }
            if change is not None:
                change(arguments)
            return OpCall(found.op, {**arguments, "norm_eps": 1e-20})

        found.add(name, build, by_rows=by_rows)

    gate("17_rows", (17, 4, 32), by_rows=True)
    gate("one_row", (1, 4, 64))
    gate("no_rows", (0, 4, 32))
    gate("all_alive", (5, 2, 48), lambda arguments: arguments.update(alive_T=torch.ones(5, dtype=torch.bool)))
    gate("none_alive", (5, 2, 48), lambda arguments: arguments.update(alive_T=torch.zeros(5, dtype=torch.bool)))
    gate(
        "pitched_input",
        (5, 4, 32),
        lambda arguments: arguments.update(streams_TSD=pitched(arguments["streams_TSD"], NAN)),
    )

    def nan_rows(arguments: dict[str, torch.Tensor]) -> None:
        """A NaN key must show in the row's streams, not become the clamp's constant; dead rows keep their bits."""
        arguments["alive_T"] = torch.tensor([True, True, False, True])
        arguments["key_TSD"][1, 0, 3] = NAN
        arguments["key_TSD"][2, 0, 3] = NAN

    gate("nan_is_not_laundered", (4, 2, 32), nan_rows)

    def orthogonal(arguments: dict[str, torch.Tensor]) -> None:
        """A product of exactly zero is clamped to 1e-6 and keeps its sign."""
        arguments["key_TSD"].zero_()
        arguments["alive_T"] = torch.ones(3, dtype=torch.bool)

    gate("zero_product", (3, 2, 32), orthogonal)
    return iter(found)
