"""The one test module of the suite; see `deepinfer_conformance.plugin`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer_conformance.case import Case


def test_claim_holds(conformance_case: Case, run_case: Callable[[Case], None]) -> None:
    """Every claim of the driver holds in this case."""
    run_case(conformance_case)
