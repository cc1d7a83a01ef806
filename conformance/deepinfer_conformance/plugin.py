"""pytest plugin: ``pytest --pyargs deepinfer_conformance --accelerator NAME -k op`` runs every case as a test.

Registered in the group ``pytest11``, so every pytest run of an environment imports this module: nothing heavy at its
head. Without ``--accelerator`` it collects nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from deepinfer_conformance.case import Case
    from deepinfer_conformance.runner.tests import CaseRunner

_OPTION = "--accelerator"
_MODULE = "test_driver.py"
_PACKAGE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    group = parser.getgroup("deepinfer conformance")
    group.addoption(_OPTION, metavar="NAME", default=None, help="driver to run through the conformance suite")
    group.addoption("--conformance-profile", choices=("quick", "full"), default="quick", help="cases to run")
    group.addoption("--conformance-level", metavar="LEVEL", default=None, help="highest level to run, such as L2")
    group.addoption("--conformance-seed", type=int, default=0, help="seed of the inputs")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the suite's own test module out of every run that names no driver."""
    is_ours = collection_path == _PACKAGE / _MODULE
    return True if is_ours and config.getoption(_OPTION) is None else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test a case."""
    if "conformance_case" not in metafunc.fixturenames:
        return
    from deepinfer_conformance.catalogue import catalogue, chosen, parse_level, parse_profile

    config = metafunc.config
    level = config.getoption("--conformance-level")
    cases = chosen(
        catalogue(config.getoption("--conformance-seed"), parse_profile(config.getoption("--conformance-profile"))),
        level=parse_level(level) if level else None,
    )
    metafunc.parametrize("conformance_case", cases, ids=[case.id for case in cases])


@pytest.fixture(scope="session")
def conformance_runner(request: pytest.FixtureRequest) -> Iterator[CaseRunner]:
    """Return what runs cases in a child process, which is replaced when a case takes it down."""
    from deepinfer_conformance.runner.tests import CaseRunner

    config = request.config
    runner = CaseRunner(
        str(config.getoption(_OPTION)),
        config.getoption("--conformance-seed"),
        config.getoption("--conformance-profile"),
    )
    yield runner
    runner.close()


@pytest.fixture
def run_case(conformance_runner: CaseRunner) -> Callable[[Case], None]:
    """Return what runs a case: it fails where a claim does not hold and skips where nothing is claimed."""

    def run(case: Case) -> None:
        result = conformance_runner.run(case)
        if not result.outcome.is_good:
            pytest.fail(f"{result.outcome}: {result.detail}", pytrace=False)
        if result.outcome in ("not claimed", "waived"):
            pytest.skip(f"{result.outcome}: {result.detail}")

    return run
