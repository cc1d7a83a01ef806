"""What every installed driver says about itself and this machine: the report behind ``deepinfer devices``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Final, Literal

from deepinfer.accelerator import registry
from deepinfer.accelerator.capabilities import Capabilities
from deepinfer.accelerator.interface import AcceleratorDriver, Reason
from deepinfer.accelerator.selection import availability_of
from deepinfer.errors import DriverLoadError

State = Literal["available", "unavailable", "failed"]

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DriverReport:
    """One entry point of the group, whatever became of it.

    Attributes:
        name: the name of the entry point.
        origin: "module:attribute from distribution version".
        state: available, unavailable (loaded, cannot run here) or failed (could not be loaded or asked).
        version: the driver's own version; empty when it failed to load.
        interface_version: "major.minor" it was written for; empty when it failed to load.
        device: name of the device; empty when there is none.
        runtime: versions of what it stands on.
        reasons: why it is not available, each with the remedy.
        capabilities: its claims; None unless it is available.
    """

    name: str
    origin: str
    state: State
    version: str = ""
    interface_version: str = ""
    device: str = ""
    runtime: str = ""
    reasons: tuple[Reason, ...] = ()
    capabilities: Capabilities | None = None


def survey() -> tuple[DriverReport, ...]:
    """Import and ask every installed driver; return one report an entry point, sorted by name. Never raises."""
    return tuple(_report(point) for point in registry.installed())


def _report(point: EntryPoint) -> DriverReport:
    place = registry.origin(point)
    try:
        driver = registry.load(point.name)
    except DriverLoadError as error:
        return DriverReport(point.name, place, "failed", reasons=(_fault(error),))
    version = driver.version
    interface = "{}.{}".format(*driver.interface_version)
    try:
        availability = availability_of(driver)
    except DriverLoadError as error:
        return DriverReport(point.name, place, "failed", version, interface, reasons=(_fault(error),))
    capabilities: Capabilities | None = None
    reasons = availability.reasons
    state: State = "available" if availability.available else "unavailable"
    if availability.available:
        try:
            capabilities = _capabilities(driver)
        except DriverLoadError as error:
            state, reasons = "failed", (_fault(error),)
    return DriverReport(
        name=point.name,
        origin=place,
        state=state,
        version=version,
        interface_version=interface,
        device=availability.device_name,
        runtime=availability.runtime,
        reasons=reasons,
        capabilities=capabilities,
    )


def _capabilities(driver: type[AcceleratorDriver]) -> Capabilities:
    try:
        return driver().capabilities()
    except Exception as error:
        raise DriverLoadError(
            f"driver {driver.name!r} says it is available and then fails to start: {type(error).__name__}: {error}"
        ) from error


def _fault(error: DriverLoadError) -> Reason:
    _LOG.debug("a driver failed", exc_info=error)  # the traceback of the vendor's own error
    return Reason(str(error), "look at the traceback: deepinfer --debug devices")


def as_json(report: DriverReport) -> Mapping[str, object]:
    """Return a report as plain values that json can write."""
    claims = report.capabilities
    return {
        "name": report.name,
        "origin": report.origin,
        "state": report.state,
        "version": report.version,
        "interface_version": report.interface_version,
        "device": report.device,
        "runtime": report.runtime,
        "reasons": [{"problem": reason.problem, "remedy": reason.remedy} for reason in report.reasons],
        "capabilities": None if claims is None else claims.as_json(),
    }
