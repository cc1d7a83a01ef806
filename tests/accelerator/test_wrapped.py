"""A wrapped driver does everything as the driver inside, whatever the interface holds."""

from __future__ import annotations

from collections.abc import Callable

from deepinfer.accelerator import AcceleratorDriver, OpOptions
from deepinfer.accelerator.wrapped import WrappedDriver
from deepinfer_cpu_ref import Driver as ReferenceDriver

# Asked of classes, and of the reference alone.
NOT_PASSED_ON = {"availability", "serving"}


def test_every_part_of_the_interface_is_passed_on() -> None:
    parts = {name for name in vars(AcceleratorDriver) if not name.startswith("_")}
    parts -= {"name", "interface_version", "version"}
    assert parts - NOT_PASSED_ON <= set(vars(WrappedDriver))


def test_the_same_ops_are_there_and_each_is_put_around_once() -> None:
    seen = []

    class Noting(WrappedDriver):
        def around(self, identifier: str, function: Callable[..., object], options: OpOptions) -> Callable[..., object]:
            seen.append(identifier)
            return super().around(identifier, function, options)

    inner = ReferenceDriver()
    options = OpOptions()
    groups, wrapped = inner.op_groups(options), Noting(inner).op_groups(options)
    ops = [f"{name}.{op}" for name, group in groups.items() for op in type(group).implemented()]
    assert sorted(seen) == sorted(ops)
    assert {name: type(group).implemented() for name, group in wrapped.items()} == {
        name: type(group).implemented() for name, group in groups.items()
    }
