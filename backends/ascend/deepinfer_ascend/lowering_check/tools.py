"""The two programs that lower a kernel: one from the wheel of triton-ascend, one from that of ascendnpu-ir."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deepinfer.errors import DriverUnavailableError

ADAPTER: Final = "triton/backends/ascend/triton-adapter-opt"
COMPILER: Final = "ascendnpuir/bin/bishengir-compile-a5"
LIMIT_S: Final = 300.0
_TELLING: Final = re.compile(r"error|assert|unsupported|failed", re.IGNORECASE)
# The passes of triton-ascend 3.2.0's own compiler.py for a 950. They are run in this order.
_PASSES: Final = (
    "--discrete-mask-access-conversion=compile-on-910-95=True force-simt-template=False",
    "--triton-to-annotation",
    "--triton-to-unstructure=compile-on-910-95=True force-simt-template=False",
    "--triton-to-hivm",
    "--triton-to-hfusion",
    "--triton-to-llvm",
    "--bubble-up-operation",
    "--triton-to-linalg=global-kernel=false named-ops=True enable-nd2nz-on-vector=False enable-select-analysis=True "
    "compile-on-910-95=True",
)
# Stands where CANN's last step would be: says that it was reached, and makes the file that its caller looks for.
_LAST_STEP: Final = """#!/bin/sh
echo reached >> "{log}"
while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done
"""


class LoweringError(Exception):
    """A tool refused a kernel; the message is its reason."""


@dataclass(frozen=True, slots=True)
class Tools:
    """The unpacked tools."""

    adapter: Path
    compiler: Path

    @classmethod
    def found_in(cls, folder: Path) -> Tools:
        """Return the tools that were unpacked into ``folder``."""
        tools = cls(folder / ADAPTER, folder / COMPILER)
        missing = [str(path) for path in (tools.adapter, tools.compiler) if not path.is_file()]
        if missing:
            raise DriverUnavailableError(
                f"the lowering check needs {' and '.join(missing)}; run `.ci/ascend_tools {folder}`, which unpacks "
                f"triton-ascend 3.2.0 and ascendnpu-ir 1.2.0 there and installs nothing"
            )
        return tools

    def to_linalg(self, ttir: str) -> str:
        """Return the Linalg form of a kernel, or raise LoweringError."""
        with tempfile.TemporaryDirectory() as name:
            source, result = Path(name) / "kernel.ttir", Path(name) / "kernel.mlir"
            source.write_text(ttir)
            _run(str(self.adapter), str(source), *_PASSES, "-o", str(result))
            # The compiler decides by itself which cores a kernel is for, and does not know this attribute.
            return re.sub(r', mix_mode = "[^"]*"', "", result.read_text())

    def to_hivm(self, linalg: str, soc: str) -> None:
        """Lower a kernel for a chip up to the step that is CANN's, memory included, or raise LoweringError."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            source, log, last = folder / "kernel.mlir", folder / "log", folder / "bin" / "hivmc-a5"
            source.write_text(linalg)
            last.parent.mkdir()
            last.write_text(_LAST_STEP.format(log=log))
            last.chmod(0o700)
            said = _run(
                "env",
                f"PATH={last.parent}:/usr/bin:/bin",
                str(self.compiler),
                str(source),
                f"--target={soc}",
                "--enable-hfusion-compile=true",
                "--enable-triton-kernel-compile=true",
                "-o",
                str(folder / "kernel"),
            )
            reached = log.read_text().count("reached") if log.exists() else 0
            if reached != 1:
                raise LoweringError(f"the last step was reached {reached} times, not once: {_telling(said)}")


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise LoweringError(f"{Path(command[0]).name} was stopped after {LIMIT_S:g} s") from error
    said = done.stderr + done.stdout
    if done.returncode:
        names = [Path(word).name for word in command if word.startswith("/")]
        raise LoweringError(f"{names[0]} ended with status {done.returncode}: {_telling(said)}")
    return said


def _telling(text: str) -> str:
    """Return the lines that say what is wrong; the rest is a dump of the kernel."""
    lines = [line.strip() for line in text.splitlines() if _TELLING.search(line)]
    reasons = [re.sub(r"^.*?(/[^\s:]+/)?([^\s/:]+:\d+(:\d+)?: )", r"\2", line) for line in lines[:3]]
    return " | ".join(reason[:300] for reason in reasons) or "it gave no reason"
