"""Makes the emulated device importable and available to every test of this folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from host_cann.fixtures import host_cann_machine

__all__ = ["host_cann_machine"]
