"""Driver discovery: entry points in, one driver class out, or an error that names every cause.

stevedore answers from a cache on disk that is keyed by modification times in steps of 128 seconds and drops the
distribution. The manager here is given the one entry point that the installed metadata holds at this moment
(3 ms to read), so an answer is never stale, and a name that two distributions claim is found without importing
either of them.
"""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, NoReturn

from stevedore import DriverManager
from stevedore.extension import error_on_conflict

from deepinfer.accelerator.interface import INTERFACE_VERSION, AcceleratorDriver
from deepinfer.errors import DriverLoadError, InterfaceVersionError, UnknownDriverError

GROUP: Final = "deepinfer.accelerators"


def origin(entry_point: EntryPoint) -> str:
    """Return "module:attribute from distribution version" of an entry point."""
    distribution = entry_point.dist
    if distribution is None:
        return entry_point.value
    return f"{entry_point.value} from {distribution.name} {distribution.version}"


def installed() -> tuple[EntryPoint, ...]:
    """Return every entry point of the group, sorted by name, without importing any."""
    return tuple(sorted(entry_points(group=GROUP), key=lambda point: (point.name, origin(point))))


def installed_names() -> tuple[str, ...]:
    """Return the distinct names under which drivers are registered, sorted."""
    return tuple(sorted({point.name for point in installed()}))


def load(name: str) -> type[AcceleratorDriver]:
    """Import and check the driver class registered as ``name``.

    Raises UnknownDriverError when the name is absent; DriverLoadError when it is claimed twice, fails while it is
    imported (the original error is its cause), or is not a driver; InterfaceVersionError when it was written for
    another contract.
    """
    points = [point for point in installed() if point.name == name]
    if not points:
        raise UnknownDriverError(_absent(name))
    if len(points) > 1:
        places = "; ".join(origin(point) for point in points)
        raise DriverLoadError(f"driver {name!r} is registered {len(points)} times: {places}. Uninstall all but one.")
    (point,) = points
    return require_driver(_import(point), name, origin(point))


def require_driver(driver: object, name: str, place: str) -> type[AcceleratorDriver]:
    """Return ``driver``, found at ``place``; DriverLoadError unless it is the class of a driver called ``name``."""
    what = f"driver {name!r} ({place})"
    if not isinstance(driver, type):
        raise DriverLoadError(f"{what} is {driver!r}, not a class; register a subclass of AcceleratorDriver")
    if not issubclass(driver, AcceleratorDriver):
        raise DriverLoadError(f"{what} is {driver.__qualname__}, which is not a subclass of AcceleratorDriver")
    for attribute in ("name", "interface_version"):
        if not hasattr(driver, attribute):
            raise DriverLoadError(f"{what} does not say its {attribute!r}; declare it as a class attribute")
    if driver.name != name:
        raise DriverLoadError(f"{what} calls itself {driver.name!r}; the entry point and `name` must agree")
    check_interface_version(driver, place)
    return driver


def check_interface_version(driver: type[AcceleratorDriver], place: str) -> None:
    """Raise InterfaceVersionError unless the driver's major is the core's and its minor is not above the core's."""
    declared: object = driver.interface_version
    core = f"this core speaks {_dotted(INTERFACE_VERSION)}"
    what = f"driver {driver.name!r} ({place})"
    match declared:
        case (int(major), int(minor)):
            pass
        case _:
            raise InterfaceVersionError(f"{what} declares interface_version {declared!r}; write (major, minor); {core}")
    if major != INTERFACE_VERSION[0]:
        side = "the driver" if major < INTERFACE_VERSION[0] else "deepinfer-multibackend"
        raise InterfaceVersionError(f"{what} was written for interface {major}.{minor}; {core}. Upgrade {side}.")
    if minor > INTERFACE_VERSION[1]:
        raise InterfaceVersionError(
            f"{what} was written for interface {major}.{minor}; {core}. Upgrade deepinfer-multibackend."
        )


class _OneEntryPoint(DriverManager[Any]):
    """A stevedore manager that knows exactly one entry point and no cache."""

    def __init__(self, entry_point: EntryPoint) -> None:
        self._entry_point = entry_point
        super().__init__(
            GROUP,
            entry_point.name,
            on_load_failure_callback=_raise_on_failure,
            on_missing_entrypoints_callback=None,
            conflict_resolver=error_on_conflict,
        )

    def list_entry_points(self) -> list[EntryPoint]:
        return [self._entry_point]


def _import(point: EntryPoint) -> object:
    try:
        imported: object = _OneEntryPoint(point).driver
    except (AssertionError, SystemExit) as error:  # stevedore hands these past the failure callback
        raise DriverLoadError(_failure(point, error)) from error
    return imported


def _raise_on_failure(_manager: object, point: EntryPoint, error: BaseException) -> NoReturn:
    raise DriverLoadError(_failure(point, error)) from error


def _failure(point: EntryPoint, error: BaseException) -> str:
    return (
        f"driver {point.name!r} ({origin(point)}) failed to load: {type(error).__name__}: {error}. "
        f"Repair or uninstall its distribution."
    )


def _absent(name: str) -> str:
    names = installed_names()
    close = difflib.get_close_matches(name, names, n=1)
    advice = f" Did you mean {close[0]!r}?" if close else " Install its distribution or choose one of these."
    return f"no driver {name!r} is installed; installed drivers: {', '.join(names) or 'none'}.{advice}"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
