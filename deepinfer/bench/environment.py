"""What a figure depends on beside the code: software, processor, threads, and how busy the machine was."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

_CPU_FACTS = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Environment:
    """Facts of the process and the machine at one moment.

    Attributes:
        deepinfer, python, torch, numpy: versions.
        system: operating system and architecture.
        cpu_model: the processor's own name.
        logical_cpus: processors that the system has.
        cpu_capability: the vector instructions that torch uses.
        threads: threads that torch computes with.
        load_average_1m: processes that wanted to run in the last minute, this one included; None where unknown.
    """

    deepinfer: str
    python: str
    torch: str
    numpy: str
    system: str
    cpu_model: str
    logical_cpus: int
    cpu_capability: str
    threads: int
    load_average_1m: float | None


def describe_environment() -> Environment:
    """Return the facts as they are now."""
    return Environment(
        deepinfer=version("deepinfer-multibackend"),
        python=platform.python_version(),
        torch=torch.__version__,
        numpy=np.__version__,
        system=f"{platform.system()} {platform.machine()}",
        cpu_model=cpu_model(_CPU_FACTS.read_text() if _CPU_FACTS.exists() else ""),
        logical_cpus=os.cpu_count() or 1,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        load_average_1m=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    )


def cpu_model(facts: str) -> str:
    """Return the processor's name from the text of /proc/cpuinfo, or what Python knows where that tells none."""
    for line in facts.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown"


@contextmanager
def computing_threads(count: int | None) -> Iterator[None]:
    """Let torch compute with ``count`` threads inside the block; None leaves their number alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
