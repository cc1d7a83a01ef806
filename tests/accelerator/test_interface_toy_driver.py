"""A driver written for interface 1.0 still loads, plans and computes; what the core cannot speak is refused."""

from __future__ import annotations

import dataclasses
import inspect
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from deepinfer.accelerator import (
    INTERFACE_VERSION,
    OP_GROUPS,
    AcceleratorDriver,
    OpOptions,
    RankPlace,
    all_op_names,
    batch,
    caches,
    capabilities,
    interface,
    make_plan,
    registry,
    selection,
    weights,
)
from deepinfer.accelerator import ops as ops_package
from deepinfer.errors import InterfaceVersionError, OpRefusedError, PlanError
from deepinfer.settings import Settings

TOY = Path(__file__).parent / "toy_driver_1_0"
OWN = {"norm.rms", "linear.embed", "mixing.collapse"}
NAME = "toy_1_0"


@pytest.fixture
def put_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    def put(folder: Path) -> None:
        monkeypatch.syspath_prepend(folder)

    yield put
    for module in [name for name in sys.modules if name.split(".")[0] == "acme_toy_1_0"]:
        del sys.modules[module]


@pytest.fixture
def toy(put_on_path) -> AcceleratorDriver:
    put_on_path(TOY)
    return registry.load(NAME)()


@pytest.fixture
def reference() -> AcceleratorDriver:
    return registry.load("cpu_ref")()


def frozen() -> dict[str, str]:
    lines = (TOY / "interface_1_0.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split(": ", 1) for line in lines)


def current() -> dict[str, str]:
    """Return every op with its parameters, and every field of the values that cross the contract, as text."""
    found = {
        f"{group.group}.{name}": str(inspect.signature(getattr(group, name)))
        for group in OP_GROUPS
        for name in group.op_names()
    }
    modules = [batch, caches, capabilities, interface, weights]
    modules += [member for member in vars(ops_package).values() if isinstance(member, types.ModuleType)]
    for module in modules:
        for name, member in sorted(vars(module).items()):
            if dataclasses.is_dataclass(member) and member.__module__ == module.__name__:
                for field in dataclasses.fields(member):
                    found[f"{name}.{field.name}"] = str(field.type)
    found["abstract"] = ", ".join(sorted(AcceleratorDriver.__abstractmethods__))
    return found


def test_it_is_discovered_selected_and_loaded_without_its_runtime(put_on_path) -> None:
    put_on_path(TOY)
    assert NAME in registry.installed_names()
    driver_class = registry.load(NAME)
    assert driver_class.interface_version == (1, 0)
    assert "acme_toy_1_0.runtime" not in sys.modules
    chosen = selection.select(NAME, Settings())
    assert chosen.driver is driver_class
    assert chosen.availability.device_name == "Acme Toy"


def test_every_past_minor_has_its_frozen_driver() -> None:
    assert [minor for minor in range(INTERFACE_VERSION[1]) if not (TOY.parent / f"toy_driver_1_{minor}").is_dir()] == []


def test_it_starts_and_joins_a_group_of_one_and_no_other(toy) -> None:
    assert type(toy).availability().available
    assert toy.allocate((2, 3), torch.float32).shape == (2, 3)
    assert toy.memory().total_bytes >= toy.memory().free_bytes > 0
    group = toy.join_group(RankPlace(0, 1, "nowhere:1"))
    assert (group.rank, group.world_size) == (0, 1)
    with pytest.raises(OpRefusedError, match=r"'toy_1_0' 1\.0 cannot join a group of 2 ranks.*interface 1\.1"):
        toy.join_group(RankPlace(1, 2, "nowhere:1"))


def test_its_plan_takes_its_three_ops_and_the_named_fallbacks(toy, reference) -> None:
    added_since = set(all_op_names()) - set(toy.capabilities().declared_fallbacks) - OWN
    plan = make_plan(toy, OpOptions(), allow_fallback=added_since, reference=reference)
    assert {row.op for row in plan.rows if row.driver == NAME} == OWN
    assert {row.provider for row in plan.rows if row.op in OWN} == {"acme"}
    assert set(plan.fallbacks) == set(all_op_names()) - OWN
    assert all(row.note for row in plan.rows if row.op not in OWN)


def test_its_ops_and_the_references_work_side_by_side(toy, reference) -> None:
    added_since = set(all_op_names()) - set(toy.capabilities().declared_fallbacks) - OWN
    mixed = make_plan(toy, OpOptions(), allow_fallback=added_since, reference=reference).ops
    pure = make_plan(reference, OpOptions()).ops
    generator = torch.Generator().manual_seed(0)
    x_TD, weight_D = torch.randn(3, 8, generator=generator), torch.rand(8, generator=generator)
    torch.testing.assert_close(mixed.norm.rms(x_TD, weight_D, 1e-6), pure.norm.rms(x_TD, weight_D, 1e-6))
    ids_T = torch.tensor([2, 0])
    assert torch.equal(mixed.linear.embed(ids_T, x_TD), pure.linear.embed(ids_T, x_TD))
    streams_TSD, pre_TS = x_TD.view(3, 2, 4), x_TD[:, :2]
    collapsed = mixed.mixing.collapse(streams_TSD, pre_TS)
    torch.testing.assert_close(collapsed, pure.mixing.collapse(streams_TSD, pre_TS))
    stored = weights.StoredWeight("w", "float32", x_TD, None, 3, 8)
    product = mixed.linear.dense(x_TD, mixed.linear.prepare(stored))
    torch.testing.assert_close(product, x_TD @ x_TD.T)


def test_a_mode_that_it_does_not_claim_falls_to_the_user_or_is_refused(toy, reference) -> None:
    options = OpOptions(numerics="served", activation_dtype=torch.bfloat16)
    added_since = set(all_op_names()) - set(toy.capabilities().declared_fallbacks) - OWN
    with pytest.raises(PlanError) as caught:
        make_plan(toy, options, allow_fallback=added_since, reference=reference)
    assert len(caught.value.problems) == len(OWN)
    for op in OWN:
        assert any(problem.startswith(f"{op}: driver 'toy_1_0' 1.0 lacks") for problem in caught.value.problems)
    plan = make_plan(toy, options, allow_fallback=added_since | OWN, reference=reference)
    assert len(plan.fallbacks) == len(all_op_names())


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ((INTERFACE_VERSION[0] + 1, 0), "Upgrade deepinfer-multibackend"),
        ((INTERFACE_VERSION[0], INTERFACE_VERSION[1] + 1), "Upgrade deepinfer-multibackend"),
        ((INTERFACE_VERSION[0] - 1, 0), "Upgrade the driver"),
    ],
)
def test_another_interface_is_refused_by_name(put_on_path, tmp_path, version, message) -> None:
    folder = tmp_path / "newer"
    shutil.copytree(TOY, folder, ignore=shutil.ignore_patterns("__pycache__"))
    source = folder / "acme_toy_1_0" / "driver.py"
    text = source.read_text(encoding="utf-8")
    assert "= (1, 0)" in text
    source.write_text(text.replace("= (1, 0)", f"= {version}"), encoding="utf-8")
    put_on_path(folder)
    with pytest.raises(InterfaceVersionError, match=message) as caught:
        selection.select(NAME, Settings())
    assert f"{version[0]}.{version[1]}" in str(caught.value)
    assert "acme-toy 1.0" in str(caught.value)


def test_interface_1_0_is_kept_to_the_letter() -> None:
    """Minors only add: an op of 1.0 keeps its parameters, a value its fields, a driver its duties."""
    now = current()
    broken = {name: (text, now.get(name)) for name, text in frozen().items() if now.get(name) != text}
    assert not broken


def test_the_frozen_text_covers_every_op_of_1_0(toy) -> None:
    assert set(toy.capabilities().declared_fallbacks) | OWN <= set(frozen())
