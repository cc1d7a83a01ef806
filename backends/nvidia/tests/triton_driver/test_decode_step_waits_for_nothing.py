"""Ops that may be recorded never wait for the device: they are given tensors without data on a GPU that is not there.

Fake tensors raise where a value is asked for; the guard also refuses operators whose size depends on values, and
copies between host and device.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from deepinfer.accelerator import PreparedWeight
from deepinfer_conformance.bench import Bench, invoke
from deepinfer_conformance.catalogue import catalogue
from deepinfer_conformance.data.call import mapped, tensors
from deepinfer_conformance.outcomes import Level
from deepinfer_nvidia import Driver, assembly

GPU = torch.device("cuda", 0)
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "bincount", "is_nonzero", "equal")
CLAIMS = assembly.Claims(assembly.TRITON, graphs=True, collectives=()).capabilities({}).ops
RECORDED = tuple(op for op, claim in CLAIMS.items() if claim.graph_safe)


class WaitError(AssertionError):
    """An op waits, or moves data between host and device."""


class Guard(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in WAITS:
            raise WaitError(f"{name} waits for the device")
        if name.startswith("index") and any(_is_bool(index) for index in _indices(args)):
            raise WaitError(f"{name} with a mask waits for the device")
        out = func(*args, **(kwargs or {}))
        kinds = {each.device.type for each in (*args, out) if isinstance(each, torch.Tensor) and each.dim()}
        if len(kinds) > 1:
            raise WaitError(f"{name} moves data between host and device")
        return out


def _indices(args):
    return args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()


def _is_bool(index):
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


class Indexing(TorchFunctionMode):
    """Python's indexing asks for a CUDA build of torch even where no tensor has data: here it is operators."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            return part(*args)
        if func is torch.Tensor.__setitem__:
            target, index, value = args
            return part(target, index).copy_(torch.as_tensor(value, device=target.device))
        return func(*args, **(kwargs or {}))


def part(x, index):
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in [each for each in index if not isinstance(each, torch.Tensor)]:
        place = next(place for place, each in enumerate(index) if each is Ellipsis)
        filled = sum(each is not None for each in index) - 1
        index = (*index[:place], *[slice(None)] * (x.dim() - filled), *index[place + 1 :])
    axis, chosen = 0, []
    for each in index:
        if each is None:
            x = x.unsqueeze(axis)
        elif isinstance(each, int):
            x = x.select(axis, each)
            continue
        elif isinstance(each, slice):
            x = torch.ops.aten.slice.Tensor(x, axis, each.start, each.stop, each.step or 1)
        else:
            chosen += [None] * (axis - len(chosen)) + [each]
        axis += 1
    return torch.ops.aten.index.Tensor(x, chosen) if chosen else x


class HostDriver(Driver):
    """Makes inputs and prepares weights on the host."""

    @property
    def device(self):
        return torch.device("cpu")

    def op_groups(self, options):
        return assembly.groups(options)


def first_call_of(op):
    """Inputs of which no tensor is empty, in served numerics where a case has them."""
    found = []
    for case in catalogue(0, "quick"):
        if case.op == op and case.level is Level.L1 and case.build:
            call = case.inputs()
            parts = [tensor for _, tensor in tensors(call.arguments)]
            if all(tensor.numel() for tensor in parts):
                found.append((len(parts), case.options.numerics == "served", -len(found), call, case.options))
    *_, call, options = max(found, key=lambda each: each[:3])
    return call, options


@pytest.fixture
def launched(monkeypatch):
    """The kernels that were launched; none of them runs."""
    names = []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **named: names.append(kernel.__name__))
    return names


def on_gpu(mode, value):
    def move(tensor, _=""):
        return mode.from_tensor(tensor).to(GPU)

    if isinstance(value, PreparedWeight):
        for owner in (value, *vars(value).values()):
            for name, held in list(getattr(owner, "__dict__", {}).items()):
                if isinstance(held, torch.Tensor):
                    setattr(owner, name, move(held))
        return value
    return mapped(value, move)


@pytest.mark.parametrize("op", RECORDED)
def test_an_op_that_may_be_recorded_waits_for_nothing(op, launched):
    call, options = first_call_of(op)
    driver = HostDriver(interpreted=False, libraries=())
    bench = Bench(driver, driver)
    placed = bench.placed(driver, call, options)
    groups = bench.groups(driver, options)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, Indexing():
        arguments = {name: on_gpu(mode, value) for name, value in placed.items()}
        with Guard():
            invoke(groups, op, arguments, QuietDriver)
    assert launched, f"{op} launched no kernel"


class QuietDriver:
    name = "nvidia"

    @staticmethod
    def synchronize():
        return None


def test_the_guard_finds_what_waits():
    with FakeTensorMode(), Indexing(), Guard():
        x_T = torch.ones(3, device=GPU)
        for act in (lambda: x_T[x_T > 0], lambda: x_T.nonzero(), lambda: x_T.cpu(), lambda: x_T.sum().item()):
            with pytest.raises((WaitError, DataDependentOutputException, RuntimeError)):
                act()


def test_what_moves_data_is_not_claimed_for_graphs():
    assert set(CLAIMS) - set(RECORDED) == assembly.NOT_RECORDED & set(CLAIMS)
