"""Memory of the host: what the kernel reports, bounded by the control group of the process."""

from __future__ import annotations

import os
from pathlib import Path

from deepinfer.accelerator.interface import MemoryInfo

KIBIBYTE = 1024


def host_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> MemoryInfo:
    """Return total and free bytes of host memory, as far as this process may use it.

    Args:
        proc: where the kernel's process file system is mounted.
        cgroup: where control groups are mounted (version 2, or version 1 with its memory controller).
    """
    total_bytes, free_bytes = _machine(proc)
    limit = _first_number(cgroup / "memory.max", cgroup / "memory" / "memory.limit_in_bytes")
    used = _first_number(cgroup / "memory.current", cgroup / "memory" / "memory.usage_in_bytes")
    if limit is not None and limit < total_bytes:
        total_bytes = limit
        free_bytes = min(free_bytes, max(0, limit - (used or 0)))
    return MemoryInfo(total_bytes=total_bytes, free_bytes=free_bytes)


def _machine(proc: Path) -> tuple[int, int]:
    meminfo = proc / "meminfo"
    if not meminfo.exists():
        page = os.sysconf("SC_PAGE_SIZE")
        total_bytes = os.sysconf("SC_PHYS_PAGES") * page
        available = "SC_AVPHYS_PAGES" in os.sysconf_names
        return total_bytes, os.sysconf("SC_AVPHYS_PAGES") * page if available else total_bytes
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    kibibytes = {name: int(value.split()[0]) for name, value in fields.items() if name in ("MemTotal", "MemAvailable")}
    return kibibytes["MemTotal"] * KIBIBYTE, kibibytes.get("MemAvailable", kibibytes["MemTotal"]) * KIBIBYTE


def _first_number(*files: Path) -> int | None:
    for file in files:
        if file.exists() and (text := file.read_text().strip()).isdigit():
            return int(text)
    return None
