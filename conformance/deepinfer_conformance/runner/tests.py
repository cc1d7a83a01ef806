"""Cases for pytest: one child process that outlives the tests and is replaced when a case takes it down."""

from __future__ import annotations

from deepinfer_conformance.case import Case
from deepinfer_conformance.outcomes import CaseResult
from deepinfer_conformance.report.plain import result_from_json
from deepinfer_conformance.runner.pool import lost
from deepinfer_conformance.runner.process import Child, ChildDiedError, ChildHungError, Order
from deepinfer_conformance.suite import waivers_as_toml
from deepinfer_conformance.waivers import packaged_waivers


class CaseRunner:
    """Runs cases of one driver, one after the other."""

    def __init__(self, driver: str, seed: int, profile: str) -> None:
        self._order = Order(driver, seed, profile, waivers_as_toml(packaged_waivers()))
        self._child: Child | None = None

    def run(self, case: Case) -> CaseResult:
        """Return the result of a case; a crash or a hang is one."""
        if self._child is None:
            self._child = Child(self._order)
        try:
            return result_from_json(self._child.run(case.id, case.timeout_s))
        except (ChildDiedError, ChildHungError) as error:
            self.close()
            return lost(case, error, 0.0)

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.close()
            self._child = None
