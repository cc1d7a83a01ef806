"""`deepinfer bench`: tables of figures, and the same as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from deepinfer.cli import bench_balance, bench_parts, bench_serving

COMMANDS: Final[tuple[tuple[str, Callable[..., None]], ...]] = (
    ("core", bench_parts.core),
    ("sampler", bench_parts.sampler),
    ("throughput", bench_serving.throughput),
    ("latency", bench_serving.latency),
    ("balance", bench_balance.balance),
    ("ranks", bench_parts.ranks),
)
"""Names and functions, in the order of the help."""
