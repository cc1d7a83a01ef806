"""Three drivers that are part of the product: ``null``, ``oracle`` and ``faulty`` (conformance/README.md)."""

from deepinfer_conformance.drivers.faulty import (
    Calls,
    Fault,
    FaultKind,
    FaultyDriver,
    InjectedFaultError,
    Strike,
)
from deepinfer_conformance.drivers.null import NullDriver
from deepinfer_conformance.drivers.oracle import OracleDriver, OracleHistory, OracleModel, oracle_tokens

__all__ = [
    "Calls",
    "Fault",
    "FaultKind",
    "FaultyDriver",
    "InjectedFaultError",
    "NullDriver",
    "OracleDriver",
    "OracleHistory",
    "OracleModel",
    "Strike",
    "oracle_tokens",
]
