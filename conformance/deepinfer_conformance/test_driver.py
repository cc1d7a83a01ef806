"""The one test module of the suite; see `deepinfer_conformance.plugin`."""

from __future__ import annotations

import pytest


@pytest.mark.usefixtures("run_case")
def test_claim_holds(conformance_case: object) -> None:
    """Every claim of the driver holds in this case; the fixture has run it."""
    del conformance_case
