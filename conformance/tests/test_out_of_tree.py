"""A vendor's distribution from the template: built as a wheel, installed in an environment of its own, run to L1."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from deepinfer.errors import ArgumentError
from deepinfer_conformance.new_driver import write_template

# Both runs in one process: what it imports is most of their time. The driver itself runs in children.
RUN = """
import sys
from pathlib import Path
import deepinfer_acme.norm
from deepinfer_conformance.outcomes import Level
from deepinfer_conformance.suite import RunOptions, run_suite, write_package
folder, norm = Path(sys.argv[1]), Path(deepinfer_acme.norm.__file__)
write_package(run_suite(RunOptions("acme", level=Level.L1)), folder / "right")
source = norm.read_text()
norm.write_text(source.replace("+ eps", "+ 2 * eps + 1e-6"))
assert norm.read_text() != source
write_package(run_suite(RunOptions("acme", level=Level.L1, ops=("norm.*",))), folder / "wrong")
print(norm)
"""


def _run(*command: object, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    # An editable install is found by the parent's site; a checkout on PYTHONPATH has to be handed on.
    roots = [path for path in sys.path if (path and (Path(path) / "deepinfer").is_dir()) or "conformance" in path]
    environment |= {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.pathsep.join([*roots, os.environ["PYTHONPATH"]])
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that sees this one's packages, and whose own installs come first."""
    folder = tmp_path_factory.mktemp("vendor")
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    (site / "zz_parent.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return folder


def _install(environment: Path, source: Path, work: Path) -> None:
    wheel = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", work, source)
    _run(sys.executable, *wheel, cwd=work)
    (built,) = work.glob("*.whl")
    python = environment / "bin" / "python"
    install = ("-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--no-compile", built)
    _run(sys.executable, *install, cwd=work)


def test_the_template_reaches_l1_in_its_own_environment_and_a_wrong_op_is_caught(
    environment: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    files = write_template("acme", source)
    assert {"pyproject.toml", "README.md", "__init__.py", "norm.py", "test_conformance.py"} == {
        each.name for each in files
    }
    assert not any(re.search("@[a-z]+@", each.read_text()) for each in files)
    _install(environment, source, tmp_path)
    python = environment / "bin" / "python"
    done = _run(python, "-B", "-c", RUN, tmp_path, cwd=tmp_path)
    assert done.stdout.strip().startswith(str(environment))  # what was installed is what ran, and was spoilt
    document = json.loads((tmp_path / "right" / "report.json").read_text())
    assert document["level_reached"] == "L1"
    assert document["driver"]["distribution"] == "deepinfer-driver-acme"
    assert document["support"]["norm.rms"]["float32"] == "pass"
    assert document["support"]["attention.sparse"]["float32"] == "fallback"
    document = json.loads((tmp_path / "wrong" / "report.json").read_text())
    assert document["support"]["norm.rms"]["float32"] == "fail"
    assert document["level_reached"] == "none"


def test_a_name_that_cannot_be_used_and_a_full_folder_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError) as caught:
        write_template("Acme-1", tmp_path)
    assert len(caught.value.problems) == 2
    with pytest.raises(ArgumentError, match="installed already"):
        write_template("cpu_ref", tmp_path / "new")
