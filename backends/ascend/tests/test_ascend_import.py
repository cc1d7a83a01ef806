"""Importing DeepInfer never imports torch_npu, whatever is installed; the driver refuses with reasons."""

from __future__ import annotations

import os
import subprocess
import sys

VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def run(code: str, **extra: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environ | extra, capture_output=True, text=True, check=False)


def test_torch_can_be_imported_after_it_with_and_without_torch_npu():
    done = run("import sys, deepinfer_ascend, torch; print('torch_npu' in sys.modules)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


def test_the_variable_is_set_unless_torch_is_there_or_the_user_has_set_it():
    show = f"import os, deepinfer; print(os.environ.get({VARIABLE!r}))"
    assert run(show).stdout.strip() == "0"
    assert run(show, **{VARIABLE: "1"}).stdout.strip() == "1"
    fake = "import sys, types; sys.modules['torch'] = types.ModuleType('torch'); "
    assert run(fake + show).stdout.strip() == "None"


def test_the_driver_that_was_asked_for_refuses_with_reasons_and_remedies():
    code = (
        "from deepinfer.accelerator.selection import select\n"
        "from deepinfer.settings import Settings\n"
        "select(None, Settings.from_environment())"
    )
    done = run(code, DEEPINFER_ACCELERATOR="ascend")
    assert done.returncode == 1
    for text in ("DriverUnavailableError", "CANN libraries are not found: libascendcl.so", "To do:", "set_env.sh"):
        assert text in done.stderr
