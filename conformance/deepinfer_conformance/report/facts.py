"""What a report says of the driver, the suite and the machine, beside the results."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import deepinfer_conformance
from deepinfer.accelerator import INTERFACE_VERSION, AcceleratorDriver, registry
from deepinfer_conformance.version import SUITE_VERSION

_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "DEEPINFER_BATCH_INVARIANT",
    "DEEPINFER_ALLOW_FALLBACK",
    "CUDA_VISIBLE_DEVICES",
)
_UNKNOWN = "unknown"


def driver_facts(driver: AcceleratorDriver) -> dict[str, object]:
    """Return what identifies a driver, its claims, and the environment of its process."""
    availability = type(driver).availability()
    distribution = _distribution_of(driver.name)
    return {
        "driver": {
            "name": driver.name,
            "version": driver.version,
            "interface_version": list(driver.interface_version),
            "distribution": distribution.name if distribution is not None else _UNKNOWN,
            "distribution_version": distribution.version if distribution is not None else _UNKNOWN,
            "digest": _package_digest(type(driver)),
            "device": availability.device_name,
            "device_type": str(driver.device.type),
            "runtime": availability.runtime,
        },
        "claims": driver.capabilities().as_json(),
        "environment": environment(),
    }


def environment() -> dict[str, object]:
    """Return the machine and the libraries of this process."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processors": os.cpu_count() or 0,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "core_interface": list(INTERFACE_VERSION),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def suite_facts() -> dict[str, object]:
    """Return the suite's version and the state of the tree that it ran from."""
    return {"version": SUITE_VERSION, "tree": tree_state(Path(deepinfer_conformance.__file__).parent)}


def tree_state(package: Path) -> dict[str, object]:
    """Return where the suite comes from and whether it is unchanged: a clean commit, or the installed wheel's files."""
    digest = _folder_digest(package)
    git = shutil.which("git")
    if git is not None:
        top = _git(git, package, "rev-parse", "--show-toplevel")
        if top:
            changed = _git(git, package, "status", "--porcelain")
            commit = _git(git, package, "rev-parse", "HEAD")
            return {"source": "checkout", "commit": commit, "clean": not changed, "digest": digest}
    changed_files = _files_unlike_their_record(package)
    return {"source": "wheel", "commit": "", "clean": changed_files == [], "digest": digest}


def now() -> str:
    """Return the time of day in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _git(git: str, folder: Path, *arguments: str) -> str:
    done = subprocess.run([git, "-C", str(folder), *arguments], capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip() if done.returncode == 0 else ""


def _files_unlike_their_record(package: Path) -> list[str]:
    """Return files of the package whose digest is not the one that the installer recorded; ["?"] without a record."""
    owners = importlib.metadata.packages_distributions().get(package.name, [])
    for owner in dict.fromkeys(owners):
        for file in importlib.metadata.files(owner) or []:
            path = Path(str(file.locate()))
            if package not in path.parents or file.hash is None:
                continue
            if not path.exists() or _record_hash(path) != file.hash.value:
                return [str(file)]
        return []
    return ["?"]


def _record_hash(path: Path) -> str:
    import base64

    return base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()


def _distribution_of(driver: str) -> importlib.metadata.Distribution | None:
    for point in registry.installed():
        if point.name == driver:
            return point.dist
    return None


def _package_digest(driver: type[AcceleratorDriver]) -> str:
    module = sys.modules.get(driver.__module__.partition(".")[0])
    file = getattr(module, "__file__", None)
    return _folder_digest(Path(file).parent) if file else _UNKNOWN


def _folder_digest(folder: Path) -> str:
    """Return the SHA-256 of all source files under a folder, names included."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(str(path.relative_to(folder)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def identity_of(facts: Mapping[str, Any]) -> str:
    """Return "name version on device" for headings."""
    driver = facts["driver"]
    return f"{driver['name']} {driver['version']} on {driver['device']}"
