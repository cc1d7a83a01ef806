"""What `deepinfer bench throughput` and `latency` print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepinfer.cli import show

if TYPE_CHECKING:
    from deepinfer.bench.serving import LatencyResult, ThroughputResult


def throughput_table(results: Sequence[ThroughputResult]) -> str:
    """Return the table of rates."""
    header = ("batch", "prefill tok/s", "decode tok/s", "decode step ms", "output tok/s", "requests/s")
    rows = [
        (
            str(result.batch_size),
            f"{result.prefill_tokens_per_s:,.1f}",
            f"{result.decode_tokens_per_s:,.1f}",
            f"{result.decode_step_ms:,.2f}",
            f"{result.output_tokens_per_s:,.1f}",
            f"{result.requests_per_s:,.2f}",
        )
        for result in results
    ]
    return show.table(header, rows)


def latency_table(results: Sequence[LatencyResult]) -> str:
    """Return the table of waiting times."""
    header = (
        *("batch", "first p50", "first p99", "token p50", "token p90", "token p99", "request p50", "request p99"),
        *("step host", "step device", "step bubble"),
    )
    rows = [
        (
            str(result.batch_size),
            f"{result.first_token_ms_p50:,.1f}",
            f"{result.first_token_ms_p99:,.1f}",
            f"{result.token_ms_p50:,.2f}",
            f"{result.token_ms_p90:,.2f}",
            f"{result.token_ms_p99:,.2f}",
            f"{result.request_ms_p50:,.1f}",
            f"{result.request_ms_p99:,.1f}",
            f"{result.step_host_ms:,.2f}",
            *("-" if part is None else f"{part:,.2f}" for part in (result.step_device_ms, result.step_bubble_ms)),
        )
        for result in results
    ]
    return show.table(header, rows)
