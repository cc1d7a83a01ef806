"""The report over every entry point: one row each, whatever became of it, and nothing that stops it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer.accelerator.survey import DriverReport, as_json, survey

Install = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def reports(install: Install, driver_source: str) -> dict[str, DriverReport]:
    """One distribution per way in which a driver can be."""
    install("good-dist", {"acme": "driver_good:Driver"}, {"driver_good": driver_source})
    refuses = driver_source.replace("Availability((),", "Availability((Reason('no chip', 'buy one'),),")
    install("refuses-dist", {"refuses": "driver_refuses:Driver"}, {"driver_refuses": rename(refuses, "refuses")})
    for kind in ("AssertionError", "SystemExit", "ImportError"):
        install(f"{kind}-dist", {kind: f"driver_{kind}:Driver"}, {f"driver_{kind}": f"raise {kind}('why')"})
    raises = driver_source.replace("return Availability(", "raise RuntimeError('asked') #")
    install("raises-dist", {"raises": "driver_raises:Driver"}, {"driver_raises": rename(raises, "raises")})
    stops = driver_source.replace("return Capabilities(", "raise RuntimeError('started') #")
    install("stops-dist", {"stops": "driver_stops:Driver"}, {"driver_stops": rename(stops, "stops")})
    for number in (1, 2):
        install(f"twice{number}-dist", {"twice": "driver_good:Driver"}, {})
    found = survey()
    assert [report.name for report in found] == sorted(report.name for report in found)
    return {f"{report.name} {report.origin.split()[-2]}": report for report in found}


def rename(source: str, name: str) -> str:
    return source.replace('"acme"', repr(name))


def test_an_available_driver_shows_version_interface_device_and_claims(reports: dict[str, DriverReport]) -> None:
    report = reports["acme good-dist"]
    assert (report.state, report.version, report.interface_version) == ("available", "7", "1.0")
    assert (report.device, report.runtime) == ("Acme One", "acme 1")
    assert report.capabilities is not None
    assert report.capabilities.graphs


def test_an_unavailable_driver_shows_its_reasons_and_no_claims(reports: dict[str, DriverReport]) -> None:
    report = reports["refuses refuses-dist"]
    assert report.state == "unavailable"
    assert [(reason.problem, reason.remedy) for reason in report.reasons] == [("no chip", "buy one")]
    assert report.capabilities is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("AssertionError", "AssertionError: why"),
        ("SystemExit", "SystemExit: why"),
        ("ImportError", "ImportError: why"),
        ("raises", "asked"),
        ("stops", "started"),
    ],
)
def test_a_failed_driver_shows_why(reports: dict[str, DriverReport], name: str, words: str) -> None:
    report = reports[f"{name} {name}-dist"]
    assert report.state == "failed"
    assert words in report.reasons[0].problem


def test_a_conflict_shows_on_every_claimant(reports: dict[str, DriverReport]) -> None:
    for number in (1, 2):
        report = reports[f"twice twice{number}-dist"]
        assert report.state == "failed"
        assert "registered 2 times" in report.reasons[0].problem


def test_every_report_can_be_written_as_json(reports: dict[str, DriverReport]) -> None:
    for report in reports.values():
        written = json.loads(json.dumps(as_json(report)))
        assert written["state"] == report.state
        assert (written["capabilities"] is None) == (report.capabilities is None)
