"""Cases of router, experts and combine.

Legend: T rows, D hidden size, E experts, k experts per token, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from deepinfer.accelerator import OpOptions
from deepinfer.accelerator.ops.experts import RouterWeights, Routing
from deepinfer.accelerator.weights import StoredFormat
from deepinfer_conformance.case import Specimen
from deepinfer_conformance.cases.axes import NUMERIC, PLAIN, Specimens
from deepinfer_conformance.data.call import OpCall, Recipe
from deepinfer_conformance.data.draws import Draws
from deepinfer_conformance.data.layouts import pitched
from deepinfer_conformance.data.weights import stored_expert

NAN = float("nan")
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LIMIT = 64, 32, 8, 3, 1.0


def specimens(seed: int) -> Iterator[Specimen]:
    """Yield the specimens of group ``experts``."""
    yield from _route(seed)
    yield from _prepare(seed)
    yield from _routed(seed)
    yield from _shared(seed)
    yield from _combine(seed)


def _route(seed: int) -> Iterator[Specimen]:
    found = Specimens("experts.route", seed, PLAIN)

    def route(
        name: str,
        rows: int,
        *,
        top_k: int = TOP_K,
        whole_numbers: bool = False,
        change: Callable[[dict[str, torch.Tensor]], None] | None = None,
        by_rows: bool = False,
    ) -> None:
        def build(draws: Draws, options: OpOptions) -> OpCall:
            dtype = options.activation_dtype
            tensors = {
                "x": draws.normal("x", rows, HIDDEN, dtype=dtype),
                "gate": draws.normal("gate", 2 * EXPERTS, HIDDEN, scale=HIDDEN**-0.5, dtype=torch.bfloat16),
                "bias": draws.normal("bias", 2 * EXPERTS, scale=0.1),
                "image_bias": draws.normal("image bias", 2 * EXPERTS),
                "image": draws.uniform("image", rows) < 0.3,
                "valid": torch.ones(rows, dtype=torch.bool),
            }
            if whole_numbers:
                tensors["x"] = draws.integers("x", -1, 2, rows, HIDDEN).to(dtype)
                # Experts 0 and 8, 1 and 9, ... are twins: every row ties.
                half = draws.integers("gate", -1, 2, EXPERTS, HIDDEN).to(torch.bfloat16)
                tensors["gate"] = torch.cat([half, half])
                tensors["bias"] = torch.zeros(2 * EXPERTS)
                tensors["image_bias"] = torch.zeros(2 * EXPERTS)
            if change is not None:
                change(tensors)
            router = RouterWeights(tensors["gate"], tensors["bias"], tensors["image_bias"])
            arguments = {
                "x_TD": tensors["x"],
                "router": router,
                "image_T": tensors["image"],
                "valid_T": tensors["valid"],
            }
            return OpCall(found.op, {**arguments, "top_k": top_k, "scale": 1.5})

        found.add(name, build, exact=whole_numbers, by_rows=by_rows, top_k=top_k)

    route("17_rows", 17, by_rows=True)
    route("one_row", 1)
    route("no_rows", 0)
    route("top_1_is_not_normalised", 5, top_k=1)
    route("all_experts", 4, top_k=2 * EXPERTS)
    route("ties", 9, whole_numbers=True, by_rows=True)
    route(
        "padding_rows",
        6,
        change=lambda tensors: tensors.update(valid=torch.tensor([True, False, True, False, True, False])),
    )
    route("all_image_rows", 4, change=lambda tensors: tensors.update(image=torch.ones(4, dtype=torch.bool)))
    route("pitched_input", 5, change=lambda tensors: tensors.update(x=pitched(tensors["x"], NAN)))
    route("large_logits", 4, change=lambda tensors: tensors.update(x=tensors["x"] * 60))
    return iter(found)


def _expert_recipe(draws: Draws, stored_format: StoredFormat) -> Recipe:
    experts = [
        stored_expert(draws, f"layers.0.experts.{n}", stored_format, HIDDEN, INTERMEDIATE) for n in range(EXPERTS)
    ]
    return Recipe("experts.prepare", {"experts": experts, "limit": LIMIT})


def _shared_recipe(draws: Draws, stored_format: StoredFormat) -> Recipe:
    expert = stored_expert(draws, "layers.0.shared", stored_format, HIDDEN, INTERMEDIATE)
    return Recipe("experts.prepare_shared", {"expert": expert, "limit": LIMIT})


def _routing(draws: Draws, rows: int, options: OpOptions, kind: str = "spread") -> Routing:
    wide = torch.float64 if options.activation_dtype == torch.float64 else torch.float32
    chosen = [draws.permutation(f"experts/{row}", EXPERTS)[:TOP_K] for row in range(rows)]
    experts_Tk = torch.stack(chosen) if chosen else torch.zeros((0, TOP_K), dtype=torch.int64)
    weights_Tk = draws.uniform("weights", rows, TOP_K).to(wide)
    if kind == "one expert":
        experts_Tk[:, 0], experts_Tk[:, 1:] = 2, torch.tensor([5, 7])
    if kind == "padding":
        experts_Tk[1::2], weights_Tk[1::2] = -1, 0.0
        experts_Tk[0, 2], weights_Tk[0, 2] = -1, 0.0
    return Routing(experts_Tk, weights_Tk)


def _prepare(seed: int) -> Iterator[Specimen]:
    for op in ("experts.prepare", "experts.prepare_shared"):
        found = Specimens(op, seed, NUMERIC)
        for stored_format in ("mxfp4", "fp8_block32", "bfloat16"):

            def build(draws: Draws, _: OpOptions, op: str = op, stored_format: StoredFormat = stored_format) -> OpCall:
                recipe = _expert_recipe if op == "experts.prepare" else _shared_recipe
                return OpCall(op, recipe(draws, stored_format).arguments)

            found.add(stored_format, build)
        yield from found


_ROUTED: tuple[tuple[str, int, str, StoredFormat], ...] = (
    ("mxfp4", 9, "spread", "mxfp4"),
    ("fp8", 6, "spread", "fp8_block32"),
    ("bfloat16", 6, "spread", "bfloat16"),
    ("one_row", 1, "spread", "mxfp4"),
    ("no_rows", 0, "spread", "mxfp4"),
    ("every_row_to_the_same_experts", 17, "one expert", "mxfp4"),
    ("slots_without_expert", 7, "padding", "mxfp4"),
)


def _routed(seed: int) -> Iterator[Specimen]:
    for op in ("experts.routed", "experts.local"):
        found = Specimens(op, seed, NUMERIC)
        for name, rows, kind, stored_format in _ROUTED:

            def build(
                draws: Draws,
                options: OpOptions,
                op: str = op,
                rows: int = rows,
                kind: str = kind,
                stored_format: StoredFormat = stored_format,
            ) -> OpCall:
                arguments: dict[str, object] = {
                    "x_TD": draws.normal("x", rows, HIDDEN, dtype=options.activation_dtype),
                    "routing": _routing(draws, rows, options, kind),
                    "experts": _expert_recipe(draws, stored_format),
                }
                if op == "experts.local":
                    arguments["shared"] = _shared_recipe(draws, "fp8_block32")
                return OpCall(op, arguments)

            found.add(name, build, by_rows=rows > 1)
        yield from found


def _shared(seed: int) -> Iterator[Specimen]:
    found = Specimens("experts.shared", seed, NUMERIC)
    for name, rows, scale in (("9_rows", 9, 1.0), ("one_row", 1, 1.0), ("no_rows", 0, 1.0), ("clamped", 5, 8.0)):

        def build(draws: Draws, options: OpOptions, rows: int = rows, scale: float = scale) -> OpCall:
            x_TD = draws.normal("x", rows, HIDDEN, scale=scale, dtype=options.activation_dtype)
            return OpCall(found.op, {"x_TD": x_TD, "expert": _shared_recipe(draws, "fp8_block32")})

        found.add(name, build, by_rows=rows > 1)

    def spoilt(draws: Draws, options: OpOptions) -> OpCall:
        """A clamp that returned its limit for NaN would hide a broken row."""
        x_TD = draws.normal("x", 4, HIDDEN, dtype=options.activation_dtype)
        x_TD[2, 5] = NAN
        return OpCall(found.op, {"x_TD": x_TD, "expert": _shared_recipe(draws, "fp8_block32")})

    found.add("nan_stays_in_its_row", spoilt)
    return iter(found)


def _combine(seed: int) -> Iterator[Specimen]:
    found = Specimens("experts.combine", seed, PLAIN)
    for name, rows, slots in (("9_rows", 9, 3), ("one_row", 1, 6), ("no_rows", 0, 3), ("one_slot", 4, 1)):

        def build(draws: Draws, options: OpOptions, rows: int = rows, slots: int = slots) -> OpCall:
            wide = torch.float64 if options.activation_dtype == torch.float64 else torch.float32
            return OpCall(
                found.op,
                {
                    "shared_TD": draws.normal("shared", rows, HIDDEN).to(wide),
                    "slots_TkD": draws.normal("slots", rows, slots, HIDDEN).to(wide),
                },
            )

        found.add(name, build, by_rows=rows > 1)
    return iter(found)
