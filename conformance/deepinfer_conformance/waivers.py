"""Waivers: failures that are known, owned and short-lived, as data."""

from __future__ import annotations

import datetime
import fnmatch
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from deepinfer.errors import ArgumentError

_FIELDS = ("driver", "version", "device", "case", "reason", "link", "expires")


@dataclass(frozen=True, slots=True)
class Waiver:
    """One waiver; ``version``, ``device`` and ``case`` are globs."""

    driver: str
    version: str
    device: str
    case: str
    reason: str
    link: str
    expires: datetime.date

    def covers(self, driver: str, version: str, device: str, case_id: str) -> bool:
        """Return True if it speaks of this case of this driver here, expired or not."""
        return (
            self.driver == driver
            and fnmatch.fnmatchcase(version, self.version)
            and fnmatch.fnmatchcase(device, self.device)
            and fnmatch.fnmatchcase(case_id, self.case)
        )

    def expired(self, today: datetime.date) -> bool:
        """Return True after its last day."""
        return today > self.expires

    def as_json(self) -> dict[str, str]:
        """Return plain values."""
        return {name: str(getattr(self, name)) for name in _FIELDS}


def packaged_waivers() -> tuple[Waiver, ...]:
    """Return the waivers that come with the suite."""
    return parse_waivers(resources.files("deepinfer_conformance").joinpath("waivers.toml").read_text(), "waivers.toml")


def read_waivers(path: Path) -> tuple[Waiver, ...]:
    """Return the waivers of a file; ArgumentError with every problem in it."""
    return parse_waivers(path.read_text(), str(path))


def parse_waivers(text: str, what: str) -> tuple[Waiver, ...]:
    """Return the waivers of a TOML text; ArgumentError with every problem in it."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError(what, [f"not TOML: {error}"]) from error
    problems = [f"unknown key {key!r}; only [[waiver]] tables are read" for key in data if key != "waiver"]
    entries: list[Mapping[str, object]] = data.get("waiver", [])
    found = []
    for number, entry in enumerate(entries):
        wrong = [f"waiver {number}: {name!r} is missing" for name in _FIELDS if name not in entry]
        wrong += [f"waiver {number}: unknown field {name!r}" for name in entry if name not in _FIELDS]
        expires = entry.get("expires")
        if "expires" in entry and (not isinstance(expires, datetime.date) or isinstance(expires, datetime.datetime)):
            wrong.append(f"waiver {number}: expires is {expires!r}; write a date such as 2027-03-01, without quotes")
        wrong += [
            f"waiver {number}: {name!r} is empty"
            for name in _FIELDS
            if isinstance(entry.get(name), str) and not entry[name]
        ]
        problems += wrong
        if not wrong and isinstance(expires, datetime.date):
            texts = {name: str(entry[name]) for name in _FIELDS if name != "expires"}
            found.append(Waiver(**texts, expires=expires))
    if problems:
        raise ArgumentError(what, problems)
    return tuple(found)


def refuse_expired(waivers: Iterable[Waiver], driver: str, today: datetime.date) -> None:
    """Raise ArgumentError naming every expired waiver of a driver: repair the driver or renew the waiver by review."""
    expired = [waiver for waiver in waivers if waiver.driver == driver and waiver.expired(today)]
    if expired:
        problems = [
            f"the waiver of {waiver.case!r} expired on {waiver.expires} ({waiver.reason}; {waiver.link}); "
            f"repair it or renew the waiver"
            for waiver in expired
        ]
        raise ArgumentError(f"waivers of driver {driver!r}", problems)
