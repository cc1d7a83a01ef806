"""L1: an expert that has moved to another slot is the expert that was prepared there, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer.accelerator import PreparedWeight
from deepinfer.errors import OpRefusedError
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.case import Case
from deepinfer_conformance.checks.comparison import bit_finding
from deepinfer_conformance.data.call import OpCall, Recipe
from deepinfer_conformance.outcomes import Finding


def moved(bench: Bench, case: Case) -> Sequence[Finding]:
    """Experts are prepared, turned round slot by slot, and compared with those that were prepared the other way round.

    A driver whose prepared experts cannot be moved says so, and is asked nothing more.
    """
    call = case.inputs()
    recipe = call.arguments["experts"]
    if not isinstance(recipe, Recipe):
        raise TypeError(f"{case.op} is given no experts to prepare")
    listed = recipe.arguments["experts"]
    if not isinstance(listed, list):
        raise TypeError(f"{case.op} is given no list of experts")
    prepare = bench.groups(bench.driver, case.options)["experts"].prepare  # type: ignore[attr-defined]

    def run(weight: PreparedWeight) -> dict[str, torch.Tensor]:
        return dict(bench.run(OpCall(call.op, {**call.arguments, "experts": weight}), case.options))

    limit = recipe.arguments["limit"]
    here: PreparedWeight = prepare(listed, limit)
    wanted = run(prepare(listed[::-1], limit))
    run(here)  # a driver may place its weights at their first use
    try:
        slots = here.expert_slots()
    except OpRefusedError as error:
        return [Finding("moved experts", 0.0, 0.0, str(error))]
    if len(slots) != len(listed):
        return [Finding("slots", float(len(slots)), float(len(listed)), f"{len(listed)} experts were prepared")]
    with torch.inference_mode():
        kept = [[tensor.clone() for tensor in slot.tensors] for slot in slots]
        for slot, parts in zip(slots, reversed(kept), strict=True):
            for tensor, part in zip(slot.tensors, parts, strict=True):
                # As a transport writes: flat bytes, which a tensor that is not contiguous does not have.
                tensor.view(-1).view(torch.uint8).copy_(part.view(-1).view(torch.uint8))
    got = run(here)
    return [bit_finding(part, got[part], wanted[part], "after the move ") for part in wanted]
