"""The child: loads the driver, says who it is, then runs one case per line of its standard input.

It answers on a pipe of its own, so that whatever a driver prints is only a log. If the driver takes the process down,
the parent knows which case it was.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import TextIO

import torch

from deepinfer.accelerator import registry
from deepinfer.accelerator.plan import REFERENCE
from deepinfer.accelerator.selection import availability_of
from deepinfer.errors import DeepInferError, DriverUnavailableError
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.case import Case
from deepinfer_conformance.catalogue import captured_case, catalogue, parse_profile
from deepinfer_conformance.report.facts import driver_facts
from deepinfer_conformance.report.plain import result_as_json
from deepinfer_conformance.runner.attempt import attempt
from deepinfer_conformance.waivers import Waiver, parse_waivers


def main() -> int:
    """Serve cases until standard input ends."""
    order = json.loads(sys.stdin.readline())
    answers = os.fdopen(int(order["answers"]), "w", buffering=1)
    torch.set_num_threads(int(order["threads"]))
    warnings.simplefilter("ignore")  # a driver's warnings are for its log, not for the outcome of a case
    try:
        bench = start(str(order["driver"]))
        waivers = parse_waivers(str(order["waivers"]), "waivers")
        cases = {case.id: case for case in catalogue(int(order["seed"]), parse_profile(str(order["profile"])))}
        facts = driver_facts(bench.driver)
    except DeepInferError as error:
        _say(answers, {"fatal": f"{error}", "kind": type(error).__name__})
        return 1
    except BaseException as error:  # noqa: BLE001 - whatever a driver does while it starts ends the run with a message
        message = f"driver {order['driver']!r} failed to start: {type(error).__name__}: {error}"
        _say(answers, {"fatal": message, "kind": type(error).__name__})
        return 1
    _say(answers, {"ready": facts})
    _serve(bench, cases, waivers, answers)
    return 0


def start(name: str) -> Bench:
    """Return the bench of an installed driver, or raise its typed error."""
    driver = registry.load(name)
    availability = availability_of(driver)
    if not availability.available:
        reasons = "; ".join(f"{reason.problem} (to do: {reason.remedy})" for reason in availability.reasons)
        raise DriverUnavailableError(f"driver {name!r} cannot run here: {reasons}")
    return Bench(driver(), registry.load(REFERENCE)())


def _serve(bench: Bench, cases: dict[str, Case], waivers: tuple[Waiver, ...], answers: TextIO) -> None:
    for line in sys.stdin:
        name = json.loads(line)["case"]
        case = cases[name] if name in cases else captured_case(Path(name))
        _say(answers, {"result": result_as_json(attempt(case, bench, waivers))})


def _say(answers: TextIO, message: dict[str, object]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
