"""Discovery never lies: what is installed now, each failure with its cause, each conflict with every name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer.accelerator import registry
from deepinfer.accelerator.interface import INTERFACE_VERSION
from deepinfer.errors import DriverLoadError, InterfaceVersionError

Install = Callable[..., Path]


def test_a_registered_driver_is_loaded(install: Install, driver_source: str) -> None:
    install("acme-dist", {"acme": "acme_module:Driver"}, {"acme_module": driver_source})
    assert registry.load("acme").name == "acme"
    assert "acme" in registry.installed_names()


def test_discovery_names_the_origin_and_imports_nothing(install: Install) -> None:
    install("acme-dist", {"acme": "acme_never_imported:Driver"}, {"acme_never_imported": "raise RuntimeError"})
    (point,) = [point for point in registry.installed() if point.name == "acme"]
    assert registry.origin(point) == "acme_never_imported:Driver from acme-dist 1.0"
    assert "acme_never_imported" not in sys.modules


def test_a_reinstall_is_seen_at_once(install: Install, driver_source: str) -> None:
    install("acme-dist", {"acme": "acme_module:Driver"}, {"acme_module": driver_source})
    assert "acme_two" not in registry.installed_names()
    install("acme-dist", {"acme_two": "acme_module:Driver"}, {})
    names = registry.installed_names()
    assert "acme_two" in names
    assert "acme" not in names


def test_an_absent_driver_is_refused_with_the_installed_ones(install: Install, driver_source: str) -> None:
    install("acme-dist", {"acme": "acme_module:Driver"}, {"acme_module": driver_source})
    with pytest.raises(
        DriverLoadError, match=r"no driver 'acmee' is installed; installed drivers: .*acme.* mean 'acme'"
    ):
        registry.load("acmee")


@pytest.mark.parametrize("second_value", ["acme_module:Driver", "acme_other:Driver"])
def test_a_name_claimed_twice_is_refused_with_every_claim_and_no_import(install: Install, second_value: str) -> None:
    install("acme-dist", {"acme": "acme_module:Driver"}, {"acme_module": "raise RuntimeError"})
    install("other-dist", {"acme": second_value}, {"acme_other": "raise RuntimeError"})
    with pytest.raises(DriverLoadError) as caught:
        registry.load("acme")
    text = str(caught.value)
    assert "registered 2 times" in text
    assert "acme_module:Driver from acme-dist 1.0" in text
    assert f"{second_value} from other-dist 1.0" in text
    assert "acme_module" not in sys.modules


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        ("import a_runtime_that_is_absent", ModuleNotFoundError),
        ("raise ValueError('broken')", ValueError),
        ("raise AssertionError('no chip')", AssertionError),
        ("raise SystemExit('no licence')", SystemExit),
    ],
)
def test_a_failure_on_import_is_a_load_error_with_the_original_traceback(
    install: Install, statement: str, kind: type[BaseException]
) -> None:
    folder = install("acme-dist", {"acme": "acme_broken:Driver"}, {"acme_broken": statement})
    with pytest.raises(DriverLoadError, match=f"{kind.__name__}") as caught:
        registry.load("acme")
    cause = caught.value.__cause__
    assert isinstance(cause, kind)
    traceback = cause.__traceback__
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    assert traceback.tb_frame.f_code.co_filename == str(folder / "acme_broken.py")


def test_an_interrupt_during_import_stays_an_interrupt(install: Install) -> None:
    install("acme-dist", {"acme": "acme_interrupted:Driver"}, {"acme_interrupted": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        registry.load("acme")


def test_a_missing_attribute_is_a_load_error(install: Install) -> None:
    install("acme-dist", {"acme": "acme_empty:Driver"}, {"acme_empty": ""})
    with pytest.raises(DriverLoadError, match="failed to load"):
        registry.load("acme")


@pytest.mark.parametrize(
    ("addition", "message"),
    [
        ("Driver = Driver()", "not a class"),
        ("Driver = dict", "not a subclass"),
        ("Driver.name = 'emca'", "calls itself 'emca'"),
        ("del Driver.name", "does not say its 'name'"),
        ("del Driver.interface_version", "does not say its 'interface_version'"),
    ],
)
def test_what_is_not_a_driver_is_refused(install: Install, driver_source: str, addition: str, message: str) -> None:
    install("acme-dist", {"acme": "acme_wrong:Driver"}, {"acme_wrong": driver_source + addition})
    with pytest.raises(DriverLoadError, match=message):
        registry.load("acme")


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (f"({INTERFACE_VERSION[0]}, {INTERFACE_VERSION[1] + 1})", "Upgrade deepinfer-multibackend"),
        (f"({INTERFACE_VERSION[0] + 1}, 0)", "Upgrade deepinfer-multibackend"),
        (f"({INTERFACE_VERSION[0] - 1}, 9)", "Upgrade the driver"),
        ("'1.0'", r"write \(major, minor\)"),
        ("(1, 0, 0)", r"write \(major, minor\)"),
    ],
)
def test_an_interface_that_the_core_does_not_speak_is_refused(
    install: Install, driver_source: str, declared: str, message: str
) -> None:
    source = f"{driver_source}\nDriver.interface_version = {declared}\n"
    install("acme-dist", {"acme": "acme_version:Driver"}, {"acme_version": source})
    with pytest.raises(InterfaceVersionError, match=message):
        registry.load("acme")


def test_an_older_minor_of_the_same_major_loads(
    install: Install, driver_source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "INTERFACE_VERSION", (1, 3))
    install("acme-dist", {"acme": "acme_older:Driver"}, {"acme_older": driver_source})
    assert registry.load("acme").interface_version == (1, 0)


def test_importing_the_drivers_of_this_project_imports_no_vendor_runtime() -> None:
    code = (
        "import sys; from deepinfer.accelerator import registry; "
        "[registry.load(name) for name in ('cpu_ref', 'nvidia', 'ascend')]; "
        "print([name for name in ('triton', 'torch_npu') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_driver_of_this_distribution_loads() -> None:
    ours = [point.name for point in registry.installed() if point.dist and point.dist.name == "deepinfer-multibackend"]
    assert ours == ["ascend", "cpu_ref", "faulty", "null", "nvidia", "oracle"]
    assert [registry.load(name).name for name in ours] == ours


@pytest.mark.parametrize("name", ["ascend", "nvidia"])
def test_a_driver_whose_chip_is_absent_says_why_and_what_to_do(name: str) -> None:
    availability = registry.load(name).availability()
    assert availability.available == bool(availability.device_name and availability.runtime)
    assert all(reason.problem and reason.remedy for reason in availability.reasons)
