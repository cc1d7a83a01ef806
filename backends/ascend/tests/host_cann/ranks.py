"""Starts ranks as processes of their own and collects what each has to say."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RankResult:
    """What became of one rank."""

    returncode: int
    stdout: str
    stderr: str


def run_ranks(script: Path, ranks: int = 2, *, timeout_s: float = 240.0) -> tuple[RankResult, ...]:
    """Run ``script RANK RANKS STORE`` once per rank and wait for all; whoever is late is killed.

    STORE is a file for torch.distributed's ``file://`` rendezvous.
    """
    folder = str(Path(__file__).parent.parent)
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        processes = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), str(ranks), f"{scratch}/store"],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        results = []
        for process in processes:
            try:
                stdout, stderr = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                stdout, stderr = process.communicate()
                stderr += f"\nkilled after {timeout_s} s"
            results.append(RankResult(process.returncode, stdout, stderr))
    return tuple(results)
