"""One driver is chosen: a named one or an error, or the first of the preference list that can run, said in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer.accelerator import selection
from deepinfer.errors import DriverLoadError, DriverUnavailableError, InterfaceVersionError
from deepinfer.settings import Settings

Install = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("alone")

AVAILABLE = "return Availability((), device_name='Acme One', runtime='acme 1')"


def unavailable(*problems: str) -> str:
    reasons = ", ".join(f"Reason({problem!r}, 'mend {problem}')" for problem in problems)
    return f"return Availability(({reasons},))"


def put(install: Install, source: str, name: str, answer: str = AVAILABLE) -> None:
    """Install a driver `name` whose availability() answers with the statement `answer`."""
    given = AVAILABLE.replace("'", '"')
    assert given in source
    text = source.replace('"acme"', repr(name)).replace(given, answer)
    install(f"{name}-dist", {name: f"driver_{name}:Driver"}, {f"driver_{name}": text})


def test_an_argument_beats_the_environment(install: Install, driver_source: str) -> None:
    put(install, driver_source, "one")
    put(install, driver_source, "two")
    chosen = selection.select("one", Settings(accelerator="two"))
    assert (chosen.driver.name, chosen.chosen_by) == ("one", "argument")


def test_the_environment_beats_the_preference(install: Install, driver_source: str) -> None:
    put(install, driver_source, "cpu_ref")
    put(install, driver_source, "two")
    chosen = selection.select(None, Settings(accelerator="two"))
    assert (chosen.driver.name, chosen.chosen_by) == ("two", "DEEPINFER_ACCELERATOR")


def test_a_named_driver_that_cannot_run_is_an_error_with_every_reason_and_remedy(
    install: Install, driver_source: str
) -> None:
    put(install, driver_source, "one", unavailable("no chip", "no runtime"))
    put(install, driver_source, "two")
    with pytest.raises(DriverUnavailableError) as caught:
        selection.select("one", Settings())
    text = str(caught.value)
    assert "'one' was asked for by argument" in text
    for problem in ("no chip", "no runtime"):
        assert f"one: {problem}. To do: mend {problem}." in text
    assert "Installed drivers: " in text
    assert "two" in text.rpartition("Installed drivers: ")[2]


def test_a_named_driver_that_is_absent_is_an_error_with_the_installed_ones(
    install: Install, driver_source: str
) -> None:
    put(install, driver_source, "one")
    with pytest.raises(
        DriverLoadError, match=r"'three' was asked for by DEEPINFER_ACCELERATOR: .*installed drivers: .*one"
    ):
        selection.select(None, Settings(accelerator="three"))


def test_a_named_driver_that_fails_to_load_keeps_its_cause(install: Install) -> None:
    install("one-dist", {"one": "driver_one:Driver"}, {"driver_one": "raise OSError('libacme.so')"})
    with pytest.raises(DriverLoadError, match=r"libacme\.so") as caught:
        selection.select("one", Settings())
    first = caught.value.__cause__
    assert first is not None
    assert isinstance(first.__cause__, OSError)


def test_a_named_driver_of_another_interface_is_an_interface_error(install: Install, driver_source: str) -> None:
    put(install, f"{driver_source}\nDriver.interface_version = (9, 0)\n", "one")
    with pytest.raises(InterfaceVersionError, match=r"asked for by argument.*interface 9\.0"):
        selection.select("one", Settings())


@pytest.mark.parametrize("name", ["ascend", None])
def test_a_driver_that_raises_when_asked_is_an_error(install: Install, driver_source: str, name: str | None) -> None:
    put(install, driver_source, "ascend", "raise RuntimeError('chip lost')")
    put(install, driver_source, "cpu_ref")
    with pytest.raises(DriverLoadError, match="chip lost"):
        selection.select(name, Settings())


def test_the_first_available_of_the_preference_is_taken_and_the_log_says_why(
    install: Install, driver_source: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(install, driver_source, "cpu_ref")
    put(install, driver_source, "nvidia", unavailable("no chip"))
    with caplog.at_level(logging.INFO):
        chosen = selection.select(None, Settings())
    assert (chosen.driver.name, chosen.chosen_by) == ("cpu_ref", "preference")
    assert [passed.name for passed in chosen.passed_over] == ["ascend", "nvidia"]
    assert "driver ascend passed over: not installed" in caplog.text
    assert "driver nvidia passed over: no chip" in caplog.text
    assert "accelerator: cpu_ref on Acme One (chosen by preference)" in caplog.text


def test_the_preference_is_ascend_then_nvidia_then_cpu_ref(install: Install, driver_source: str) -> None:
    order = []
    for name in ("cpu_ref", "nvidia", "ascend"):
        put(install, driver_source, name)
        order.append(selection.select(None, Settings()).driver.name)
    assert order == ["cpu_ref", "nvidia", "ascend"]


def test_a_driver_outside_the_preference_is_never_taken_unasked(install: Install, driver_source: str) -> None:
    put(install, driver_source, "acme")
    put(install, driver_source, "cpu_ref", unavailable("no memory"))
    with pytest.raises(DriverUnavailableError) as caught:
        selection.select(None, Settings())
    text = str(caught.value)
    assert "none of ascend, nvidia, cpu_ref can run here" in text
    assert "ascend: not installed" in text
    assert "nvidia: not installed" in text
    assert "cpu_ref: no memory. To do: mend no memory." in text
    assert text.endswith("Installed drivers: acme, cpu_ref.")


def test_a_broken_preferred_driver_never_ends_as_a_run_on_the_cpu(install: Install, driver_source: str) -> None:
    install("nvidia-dist", {"nvidia": "driver_nvidia:Driver"}, {"driver_nvidia": "raise ImportError('libcuda.so')"})
    put(install, driver_source, "cpu_ref")
    with pytest.raises(
        DriverLoadError, match=r"(?s)preferred driver is broken.*libcuda\.so.*DEEPINFER_ACCELERATOR=cpu_ref"
    ):
        selection.select(None, Settings())
    assert selection.select("cpu_ref", Settings()).driver.name == "cpu_ref"
