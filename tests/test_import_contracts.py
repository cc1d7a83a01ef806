"""The import contracts of pyproject.toml catch every arrow that must never be: each is drawn once, in a stub tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = (
    "deepinfer/__init__.py",
    "deepinfer/__main__.py",
    "deepinfer/errors.py",
    "deepinfer/numerics/__init__.py",
    "deepinfer/settings.py",
    "deepinfer/tokenizer/__init__.py",
    "deepinfer/accelerator/__init__.py",
    "deepinfer/accelerator/registry.py",
    "deepinfer/model/__init__.py",
    "deepinfer/model/config/__init__.py",
    "deepinfer/model/transformer.py",
    "deepinfer/sampling/__init__.py",
    "deepinfer/sampling/params.py",
    "deepinfer/sampling/filters.py",
    "deepinfer/parallel/__init__.py",
    "deepinfer/cache/__init__.py",
    "deepinfer/scheduling/__init__.py",
    "deepinfer/scheduling/scheduler.py",
    "deepinfer/engine/__init__.py",
    "deepinfer/llm.py",
    "deepinfer/sim/__init__.py",
    "deepinfer/cli/__init__.py",
    "deepinfer_cpu_ref/__init__.py",
    "deepinfer_triton/__init__.py",
    "deepinfer_nvidia/__init__.py",
    "deepinfer_nvidia/interpreting.py",
    "deepinfer_ascend/__init__.py",
    "deepinfer_conformance/__init__.py",
    "deepinfer_conformance/triton_cpu/__init__.py",
)
PARAGRAPH = re.compile(r"\n(?=[^\n]+\n---+\n)")
ROOMS = "rooms of the engine"
CONTRACT = "the contract imports torch, numpy, stevedore and the standard library"
DRIVERS = "drivers know only the contract"
KERNELS = "the shared kernels know the contract"
SUITE = "the suite knows only the contract"
SCHEDULING = "scheduling asks the model only"

FORBIDDEN = [
    ("deepinfer/errors.py", "import deepinfer.numerics", ROOMS),
    ("deepinfer/numerics/__init__.py", "import deepinfer.settings", ROOMS),
    ("deepinfer/settings.py", "import deepinfer.tokenizer", ROOMS),
    ("deepinfer/accelerator/registry.py", "import deepinfer.cache", ROOMS),
    ("deepinfer/accelerator/registry.py", "import deepinfer.engine", ROOMS),
    ("deepinfer/accelerator/registry.py", "import deepinfer.tokenizer", CONTRACT),
    ("deepinfer/accelerator/registry.py", "import tqdm", CONTRACT),
    ("deepinfer/sampling/params.py", "import deepinfer.model.config", ROOMS),
    ("deepinfer/parallel/__init__.py", "import deepinfer.sampling", ROOMS),
    ("deepinfer/model/transformer.py", "import deepinfer.cache", ROOMS),
    ("deepinfer/cache/__init__.py", "import deepinfer.scheduling", ROOMS),
    ("deepinfer/scheduling/scheduler.py", "import deepinfer.engine", ROOMS),
    ("deepinfer/scheduling/scheduler.py", "import deepinfer.model.transformer", SCHEDULING),
    ("deepinfer/scheduling/scheduler.py", "import deepinfer.sampling.filters", SCHEDULING),
    ("deepinfer/engine/__init__.py", "import deepinfer.llm", ROOMS),
    ("deepinfer/engine/__init__.py", "import deepinfer_cpu_ref", "the engine imports no driver"),
    ("deepinfer/engine/__init__.py", "import deepinfer_conformance", "only the cli imports the suite"),
    ("deepinfer/engine/__init__.py", "def late():\n    import triton", "no vendor runtime outside its driver"),
    ("deepinfer/llm.py", "import deepinfer.sim", ROOMS),
    ("deepinfer/new_room/__init__.py", "", ROOMS),
    ("deepinfer_cpu_ref/__init__.py", "import deepinfer.cache", DRIVERS),
    ("deepinfer_cpu_ref/__init__.py", "import deepinfer.settings", DRIVERS),
    ("deepinfer_cpu_ref/__init__.py", "import deepinfer_conformance", DRIVERS),
    ("deepinfer_cpu_ref/__init__.py", "import torch_npu", "no vendor runtime outside its driver"),
    ("deepinfer_triton/__init__.py", "import deepinfer.settings", KERNELS),
    ("deepinfer_triton/__init__.py", "import deepinfer_conformance", KERNELS),
    ("deepinfer_triton/__init__.py", "import deepinfer_nvidia", KERNELS),
    ("deepinfer_triton/__init__.py", "import torch_npu", KERNELS),
    ("deepinfer/engine/__init__.py", "import deepinfer_triton", "the engine imports no driver"),
    ("deepinfer_nvidia/__init__.py", "import deepinfer.settings", DRIVERS),
    ("deepinfer_nvidia/__init__.py", "import deepinfer_ascend", "drivers do not know each other"),
    ("deepinfer_nvidia/__init__.py", "import torch_npu", "no Ascend runtime in the NVIDIA driver"),
    ("deepinfer_conformance/__init__.py", "import deepinfer_conformance.triton_cpu", "the Triton kit is imported only"),
    ("deepinfer_conformance/__init__.py", "import deepinfer.llm", SUITE),
    ("deepinfer_conformance/__init__.py", "import deepinfer_cpu_ref", SUITE),
    ("deepinfer_conformance/__init__.py", "import deepinfer_triton", SUITE),
]
ALLOWED = {
    "deepinfer/cli/__init__.py": "import deepinfer.llm, deepinfer.engine, deepinfer.settings, deepinfer_conformance",
    "deepinfer/llm.py": "import deepinfer.engine",
    "deepinfer/engine/__init__.py": "import deepinfer.scheduling, deepinfer.model.transformer, deepinfer.settings",
    "deepinfer/scheduling/scheduler.py": "import deepinfer.cache, deepinfer.model.config, deepinfer.sampling.params",
    "deepinfer/accelerator/registry.py": "import deepinfer.settings, deepinfer.numerics, stevedore, torch",
    "deepinfer_cpu_ref/__init__.py": "import deepinfer.accelerator.registry, deepinfer.numerics, deepinfer.errors",
    "deepinfer_triton/__init__.py": "import deepinfer.accelerator, deepinfer.numerics, deepinfer.errors, torch, triton",
    "deepinfer_nvidia/__init__.py": "import deepinfer.accelerator, deepinfer_triton, triton",
    "deepinfer_nvidia/interpreting.py": "import deepinfer.settings",
    "deepinfer_conformance/__init__.py": "import deepinfer.accelerator, deepinfer.numerics, deepinfer.errors",
}


def make_tree(root: Path) -> None:
    """Write a stub of every room, with all the arrows that may be."""
    for module in MODULES:
        path = root / module
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ALLOWED.get(module, ""))
    shutil.copy(ROOT / "pyproject.toml", root)


def lint(root: Path) -> str:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"
    environ = {**os.environ, "PYTHONPATH": str(root), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environ, capture_output=True, text=True, check=False
    )
    return done.stdout


def name_of(module: str) -> str:
    return module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the contracts say about a tree with every arrow that must not be."""
    root = tmp_path_factory.mktemp("broken")
    make_tree(root)
    for module, statement, _ in FORBIDDEN:
        path = root / module
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{path.read_text() if path.exists() else ''}\n{statement}\n")
    return lint(root)


def test_the_arrows_that_may_be_are_kept(tmp_path: Path) -> None:
    make_tree(tmp_path)
    assert " 0 broken" in lint(tmp_path)


@pytest.mark.parametrize(("module", "statement", "contract"), FORBIDDEN)
def test_an_arrow_that_must_not_be_is_caught(complaints: str, module: str, statement: str, contract: str) -> None:
    # Each broken contract has a paragraph: its name, a rule of dashes, the arrows.
    (paragraph,) = [part for part in PARAGRAPH.split(complaints)[1:] if part.startswith(contract)]
    arrow = f"{name_of(module)} -> {statement.rpartition('import ')[2]} (l." if statement else "deepinfer.new_room\n"
    assert arrow in paragraph
