"""Versions that a report carries, so that a result can be traced to what produced it."""

from __future__ import annotations

from typing import Final

SUITE_VERSION: Final = "1.0.0"
"""Cases, checks and tolerances; any change of a result's meaning raises it."""

SCHEMA_VERSION: Final = 1
"""Layout of ``report.json``."""
