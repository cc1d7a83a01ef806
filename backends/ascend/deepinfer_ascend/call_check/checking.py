"""Runs the trials of one chip on one device and says what came of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer.accelerator.interface import OpOptions
from deepinfer.errors import DeepInferError
from deepinfer_ascend.arithmetic import Arithmetic
from deepinfer_ascend.call_check.op_trials import TRIALS, Bench
from deepinfer_ascend.call_check.report import Entry, How
from deepinfer_ascend.call_check.sites import SITES, Maker, Outcome, methods
from deepinfer_ascend.call_check.sizes import PRODUCTION, SMALL, Sizes
from deepinfer_ascend.capabilities import NATIVE
from deepinfer_ascend.driver import native_groups
from deepinfer_ascend.operators import Operators
from deepinfer_ascend.soc import Soc

META = torch.device("meta")
EMULATED_EXPERTS = 4
"""Experts of the production shapes on an emulated device, whose memory is the host's."""

Context = Callable[[], AbstractContextManager[Any]]
_FAILURES = (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError, IndexError, DeepInferError)


class OperatorNames(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it untyped
    """Notes the torch-npu operators that are called, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the operator, and keep its name when it is one of torch-npu's."""
        if func.namespace == "npu":
            self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


def uncovered() -> list[str]:
    """Return the call sites and native ops that no trial would reach."""
    tried = {site.method for site in SITES}
    missing = [f"call site {name!r} has no trial" for name in methods() if name not in tried]
    missing += [f"trial {name!r} is for no call site" for name in sorted(tried - set(methods()))]
    graph_safe = [op for op, native in NATIVE.items() if native.graph_safe]
    missing += [f"op {op!r} is claimed safe for graphs and has no trial" for op in graph_safe if op not in TRIALS]
    return missing


def check(
    chip: Soc,
    how: How,
    device: torch.device = META,
    context: Context = nullcontext,
    shapes: Sequence[Sizes] = (PRODUCTION, SMALL),
) -> Iterator[Entry]:
    """Try every call site and every native op of ``chip`` on ``device``.

    Args:
        chip: what the calls are made for.
        how: "meta", or "emulated" with an emulated device.
        device: where tensors live.
        context: entered around every trial.
        shapes: the sets of shapes to try.
    """
    for sizes in shapes:
        fitting = sizes if how == "meta" else sizes.with_experts(min(sizes.experts, EMULATED_EXPERTS))
        yield from _sites(chip, how, device, context, fitting)
        yield from _ops(chip, how, device, context, fitting)


def _sites(chip: Soc, how: How, device: torch.device, context: Context, sizes: Sizes) -> Iterator[Entry]:
    operators, make = Operators(), Maker(device)
    for site in SITES:
        if not site.made_on(chip):
            continue
        problem, _ = _tried(partial(site.trial, operators, make, sizes), context, device)
        yield Entry(
            site.op, chip.name, how, "failed" if problem else "ok", "operator", (site.operator,), sizes.name, problem
        )


def _ops(chip: Soc, how: How, device: torch.device, context: Context, sizes: Sizes) -> Iterator[Entry]:
    production = sizes.name == PRODUCTION.name
    if production and how == "emulated":
        return  # weights of production size would have to be made on the host
    for served in (True, False):
        if (served and not chip.has_mx) or (production and not served):
            continue
        options = OpOptions(activation_dtype=torch.bfloat16, numerics="served" if served else "portable")
        arithmetic = Arithmetic.of(options, chip, device)
        store = Maker(META if production else torch.device("cpu"))
        bench = Bench(native_groups(arithmetic, Operators()), Maker(device), store, sizes, options.activation_dtype)
        for op, trial in TRIALS.items():
            problem, called = _tried(partial(trial, bench), context, device)
            lacking = [name for name in NATIVE[op].operators if name not in called]
            if not problem and served and lacking:
                problem = f"the op is listed with {', '.join(lacking)} and did not call it"
            shapes = f"{sizes.name} {options.numerics}"
            yield Entry(op, chip.name, how, "failed" if problem else "ok", "op", called, shapes, problem)


def _tried(trial: Callable[[], Outcome], context: Context, device: torch.device) -> tuple[str, tuple[str, ...]]:
    seen = OperatorNames()
    try:
        with context(), torch.inference_mode(), seen:
            outcome = trial()
    except _FAILURES as error:
        return f"{type(error).__name__}: {_first_lines(error)}", tuple(seen.names)
    problems = []
    for found, (shape, dtype) in outcome:
        if (tuple(found.shape), found.dtype, found.device.type) != (shape, dtype, device.type):
            problems.append(f"expected {dtype} {shape} on {device.type}, got {found.dtype} {tuple(found.shape)}")
    return "; ".join(problems), tuple(seen.names)


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " | ".join(lines[:3])[:400]
