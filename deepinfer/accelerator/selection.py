"""The choice of one driver: named by the caller or the environment, or the first that is available.

A driver that was named is used or refused; nothing is ever put in its place. Without a name, a driver of the
preference list that is absent or unavailable is passed over and the log says why. One that is installed but broken
is an error even then: a fault in a vendor's package must not end as an unnoticed run on the CPU.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from deepinfer.accelerator import registry
from deepinfer.accelerator.interface import AcceleratorDriver, Availability, Reason
from deepinfer.errors import DriverLoadError, DriverUnavailableError
from deepinfer.settings import ACCELERATOR, Settings

PREFERENCE: Final = ("ascend", "nvidia", "cpu_ref")

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A driver of the preference list that was not taken, with the reasons."""

    name: str
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """The driver that was chosen.

    Attributes:
        driver: the class; it has not been constructed.
        availability: what it said about this machine.
        chosen_by: "argument", the environment variable's name, or "preference".
        passed_over: the preferred drivers that came before it, empty when a name was given.
    """

    driver: type[AcceleratorDriver]
    availability: Availability
    chosen_by: str
    passed_over: tuple[PassedOver, ...] = ()


def select(name: str | None, settings: Settings) -> Selection:
    """Return the driver to use: ``name``, else the environment's, else the first available of PREFERENCE.

    Raises DriverLoadError or DriverUnavailableError with every refusal, each with its remedy, and the installed
    drivers.
    """
    if name is not None:
        selection = _named(name, "argument")
    elif settings.accelerator is not None:
        selection = _named(settings.accelerator, ACCELERATOR.name)
    else:
        selection = _preferred()
    for passed in selection.passed_over:
        _LOG.info("driver %s passed over: %s", passed.name, "; ".join(reason.problem for reason in passed.reasons))
    device = selection.availability.device_name or "unnamed device"
    _LOG.info("accelerator: %s on %s (chosen by %s)", selection.driver.name, device, selection.chosen_by)
    return selection


def availability_of(driver: type[AcceleratorDriver]) -> Availability:
    """Ask a driver whether it can run here; DriverLoadError when it raises instead of answering."""
    try:
        return driver.availability()
    except Exception as error:
        raise DriverLoadError(
            f"driver {driver.name!r} failed when asked whether it is available: {type(error).__name__}: {error}. "
            f"An absent runtime must be a reason, not an exception; repair or uninstall the driver."
        ) from error


def _named(name: str, chosen_by: str) -> Selection:
    try:
        driver = registry.load(name)
        availability = availability_of(driver)
    except DriverLoadError as error:
        # The error of an absent driver lists the installed ones already.
        listing = f"\n{_installed()}" if name in registry.installed_names() else ""
        # The same class (InterfaceVersionError included), so that a caller can still tell the causes apart.
        raise type(error)(f"{_asked(name, chosen_by)}: {error}{listing}") from error
    if not availability.available:
        listed = _listed(PassedOver(name, availability.reasons))
        raise DriverUnavailableError(f"{_asked(name, chosen_by)}, and it cannot run here:\n{listed}\n{_installed()}")
    return Selection(driver, availability, chosen_by)


def _preferred() -> Selection:
    passed_over: list[PassedOver] = []
    present = registry.installed_names()
    for name in PREFERENCE:
        if name not in present:
            reason = Reason("not installed", f"install a distribution that registers {name!r} in {registry.GROUP!r}")
            passed_over.append(PassedOver(name, (reason,)))
            continue
        try:
            driver = registry.load(name)
            availability = availability_of(driver)
        except DriverLoadError as error:
            raise type(error)(
                f"no accelerator was named, and a preferred driver is broken: {error}\n"
                f"To run without it, name another: {ACCELERATOR.name}=cpu_ref.\n{_installed()}"
            ) from error
        if availability.available:
            return Selection(driver, availability, "preference", tuple(passed_over))
        passed_over.append(PassedOver(name, availability.reasons))
    listed = "\n".join(_listed(passed) for passed in passed_over)
    raise DriverUnavailableError(
        f"no accelerator was named, and none of {', '.join(PREFERENCE)} can run here:\n{listed}\n{_installed()}"
    )


def _asked(name: str, chosen_by: str) -> str:
    return f"accelerator {name!r} was asked for by {chosen_by}"


def _listed(passed: PassedOver) -> str:
    return "\n".join(f"  - {passed.name}: {reason.problem}. To do: {reason.remedy}." for reason in passed.reasons)


def _installed() -> str:
    return f"Installed drivers: {', '.join(registry.installed_names()) or 'none'}."
