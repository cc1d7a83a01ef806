"""Importing the package is cheap: no Triton, no kernel."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_package_imports_no_triton() -> None:
    code = "import sys, deepinfer_triton; print([name for name in sys.modules if name.split('.')[0] == 'triton'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
