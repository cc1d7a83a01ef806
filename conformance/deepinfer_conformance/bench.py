"""The bench: a driver under test, the reference beside it, and calls carried to both and back.

Legend: T rows.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from functools import cache
from typing import Final

import torch

from deepinfer.accelerator import OP_GROUPS, AcceleratorDriver, OpOptions
from deepinfer.accelerator.ops import OpGroup
from deepinfer.errors import OpRefusedError
from deepinfer_conformance.data.call import OpCall, Recipe, mapped, mapped_arguments, tensors
from deepinfer_conformance.data.layouts import converted, copied

Effects = Mapping[str, torch.Tensor]
"""What a call did, on the host: "result" or "result.FIELD", and "argument.NAME" for every tensor that it changed."""

MUTATED: Final[Mapping[str, tuple[str, ...]]] = {
    "codec.store_window": ("cache.bytes_ZRb",),
    "codec.store_entries": ("cache.bytes_NEb",),
    "codec.store_index_keys": ("cache.bytes_Nb",),
    "compression.pool_pairs": ("pending.rows_ZPW",),
    "sampling.adjust": ("logits_BV",),
    "moves.copy": ("pool_Nb",),
    "moves.zero": ("pool_Nb",),
    "moves.restore": ("pool_Nb",),
}
"""Arguments that an op writes in place; everything else is read only."""

_ON_HOST: Final = {"memory.gather_rows": ("table",), "moves.restore": ("data_nb",)}
_WIDENED_GROUPS: Final = frozenset(
    {"linear", "norm", "compression", "selection", "attention", "mixing", "memory", "experts"}
)
_WIDENED_OPS: Final = frozenset({"drafting.attend"})
"""Ops of other groups that compute with activations."""
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


class Bench:
    """Runs calls. The reference computes in float64 (yardstick) or as the driver is asked to (peer)."""

    def __init__(self, driver: AcceleratorDriver, reference: AcceleratorDriver) -> None:
        self.driver = driver
        self.reference = reference
        self._groups: dict[tuple[int, OpOptions], Mapping[str, OpGroup]] = {}

    def run(self, call: OpCall, options: OpOptions) -> Effects:
        """Run a call on the driver."""
        return self.run_on(self.driver, call, options)

    def yardstick(self, call: OpCall, options: OpOptions) -> Effects:
        """Run a call on the reference in float64, with the same inputs."""
        if not _is_widened(call.op):
            return self.peer(call, options)
        exact = dataclasses.replace(options, activation_dtype=torch.float64, batch_invariant=False)
        return self.run_on(self.reference, widened(call), exact)

    def peer(self, call: OpCall, options: OpOptions) -> Effects:
        """Run a call on the reference as the driver is asked to; in a dtype of its own the yardstick stands in."""
        asked = dataclasses.replace(options, batch_invariant=False)
        if self._reference_has(call.op, options):
            return self.run_on(self.reference, call, asked)
        if not _is_widened(call.op):  # their inputs have dtypes of their own
            return self.run_on(self.reference, call, dataclasses.replace(asked, activation_dtype=torch.float32))
        return {
            part: tensor.to(options.activation_dtype) if tensor.dtype == torch.float64 else tensor
            for part, tensor in self.yardstick(call, options).items()
        }

    def prepared(self, call: OpCall, options: OpOptions) -> OpCall:
        """Return the call with every recipe replaced by the driver's own prepared weight, for repeated runs."""
        groups = self.groups(self.driver, options)
        return OpCall(call.op, {name: _followed(value, groups) for name, value in call.arguments.items()})

    def run_on(self, driver: AcceleratorDriver, call: OpCall, options: OpOptions) -> Effects:
        """Run a call on a driver of one's choice and return what it did."""
        arguments = self.placed(driver, call, options)
        return effects(call.op, invoke(self.groups(driver, options), call.op, arguments, driver), arguments)

    def placed(self, driver: AcceleratorDriver, call: OpCall, options: OpOptions) -> dict[str, object]:
        """Return fresh copies of the arguments on the driver's device, strides kept, recipes followed."""
        on_host = _ON_HOST.get(call.op, ())
        groups = self.groups(driver, options)
        placed: dict[str, object] = {}
        for name, value in call.arguments.items():
            device = torch.device("cpu") if name in on_host else driver.device
            followed = _followed(value, groups)
            placed[name] = mapped(followed, lambda tensor, _, device=device: copied(tensor, device))  # type: ignore[misc]
        return placed

    def _reference_has(self, op: str, options: OpOptions) -> bool:
        claim = self.reference.capabilities().ops.get(op)
        return claim is not None and options.activation_dtype in claim.dtypes

    def groups(self, driver: AcceleratorDriver, options: OpOptions) -> Mapping[str, OpGroup]:
        """Return a driver's groups for these options, built once."""
        key = (id(driver), options)
        if key not in self._groups:
            self._groups[key] = driver.op_groups(options)
        return self._groups[key]


def invoke(
    groups: Mapping[str, OpGroup], op: str, arguments: Mapping[str, object], driver: AcceleratorDriver
) -> object:
    """Call an op as the engine does, by position in the contract's order, and wait for the device."""
    group, _, name = op.partition(".")
    if group not in groups:
        raise OpRefusedError(f"driver {driver.name!r} has no group {group!r} for op {op!r}")
    order = parameters_of(op)
    positional = [
        arguments[parameter] for parameter in order if parameter not in _keyword_only(op) and parameter in arguments
    ]
    keywords = {parameter: arguments[parameter] for parameter in _keyword_only(op) if parameter in arguments}
    with torch.inference_mode():
        result = getattr(groups[group], name)(*positional, **keywords)
    driver.synchronize()
    return result


def effects(op: str, result: object, arguments: Mapping[str, object]) -> Effects:
    """Return everything that a call did, on the host."""
    found = {f"result{name}": tensor.detach().cpu() for name, tensor in tensors(result)}
    placed = OpCall(op, arguments)
    for name in MUTATED.get(op, ()):
        found[f"argument.{name}"] = placed.tensor(name).detach().cpu()
    return found


def _is_widened(op: str) -> bool:
    return op.partition(".")[0] in _WIDENED_GROUPS or op in _WIDENED_OPS


def widened(call: OpCall) -> OpCall:
    """Return a call whose float inputs are float64; what an op writes, and stored weights, stay as they are."""
    kept = MUTATED.get(call.op, ())

    def widen(tensor: torch.Tensor, name: str) -> torch.Tensor:
        return converted(tensor, torch.float64) if tensor.dtype in _FLOATS and name not in kept else tensor

    wide = {name: value for name, value in call.arguments.items() if not isinstance(value, Recipe)}
    return OpCall(call.op, {**call.arguments, **mapped_arguments(wide, widen)})


@cache
def parameters_of(op: str) -> tuple[str, ...]:
    """Return the parameter names of an op in the contract's order."""
    return tuple(_signature(op).parameters)[1:]


@cache
def _keyword_only(op: str) -> tuple[str, ...]:
    return tuple(
        name
        for name, parameter in _signature(op).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    )


def _signature(op: str) -> inspect.Signature:
    group, _, name = op.partition(".")
    (contract,) = (each for each in OP_GROUPS if each.group == group)
    return inspect.signature(getattr(contract, name))


def _followed(value: object, groups: Mapping[str, OpGroup]) -> object:
    if not isinstance(value, Recipe):
        return value
    group, _, name = value.op.partition(".")
    if group not in groups:
        raise OpRefusedError(f"no group {group!r} to prepare a weight with {value.op!r}")
    return getattr(groups[group], name)(**value.arguments)
