"""`deepinfer devices`: one paragraph or JSON object for every installed driver."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from deepinfer.accelerator import Capabilities, OpCapability, Reason, Repeatability, survey
from deepinfer.accelerator.survey import DriverReport

Run = Callable[..., object]

REPORTS = (
    DriverReport(
        "acme",
        "acme_driver:Driver from acme 2.0",
        "available",
        version="7",
        interface_version="1.0",
        device="Acme One",
        runtime="acme 1",
        capabilities=Capabilities(
            ops={
                "linear.dense": OpCapability(
                    dtypes=frozenset({torch.bfloat16}), repeatability=Repeatability.BATCH_INVARIANT
                )
            },
            declared_fallbacks=("norm.rms",),
        ),
    ),
    DriverReport("gone", "gone:Driver from gone 1.0", "failed", reasons=(Reason("OSError: libgone.so", "repair it"),)),
    DriverReport(
        "idle",
        "idle:Driver from idle 1.0",
        "unavailable",
        version="1",
        interface_version="1.0",
        reasons=(Reason("no chip", "plug one in"), Reason("no runtime", "install it")),
    ),
)


@pytest.fixture(autouse=True)
def _three_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "survey", lambda: REPORTS)


def test_every_driver_shows_state_version_device_claims_and_reasons(run: Run) -> None:
    ran = run("devices")
    assert ran.status == 0
    acme, gone, idle = ran.out.split("\n\n")
    assert acme.startswith("acme: available\n")
    for words in ("acme_driver:Driver from acme 2.0", "7, interface 1.0", "Acme One", "bfloat16", "R2", "norm.rms"):
        assert words in acme
    assert gone.startswith("gone: failed\n")
    assert "OSError: libgone.so" in gone
    assert "repair it" in gone
    assert idle.startswith("idle: unavailable\n")
    for words in ("no chip", "plug one in", "no runtime", "install it"):
        assert words in idle


def test_json_has_every_driver_with_every_op(run: Run) -> None:
    found = {entry["name"]: entry for entry in json.loads(run("devices", "--json").out)}
    assert {name: entry["state"] for name, entry in found.items()} == {
        "acme": "available",
        "gone": "failed",
        "idle": "unavailable",
    }
    assert found["acme"]["capabilities"]["ops"]["linear.dense"] == {
        "dtypes": ["bfloat16"],
        "numerics": ["portable"],
        "kv_formats": ["released"],
        "largest": {},
        "graph_safe": False,
        "repeatability": "R2",
        "provider": "native",
    }
    assert found["idle"]["capabilities"] is None
    assert len(found["idle"]["reasons"]) == 2
