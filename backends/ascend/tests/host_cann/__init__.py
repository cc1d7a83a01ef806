"""A CANN on the host, for tests: the real torch_npu runs on it. README.md says what that proves and what not."""

from __future__ import annotations

import os
import sys

# Without CANN, torch's own loading of torch_npu would end the import of torch; load() does it, with CANN in place.
if "torch" not in sys.modules:
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

from host_cann.descriptors import ScalarArgument, TensorArgument
from host_cann.errors import HostCannError, KernelError
from host_cann.loading import Emulator, load
from host_cann.recording import Recording

__all__ = ["Emulator", "HostCannError", "KernelError", "Recording", "ScalarArgument", "TensorArgument", "load"]
