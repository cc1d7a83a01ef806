"""Driver ``faulty``: another driver with faults, given as data, so that every check can be shown to fail."""

from deepinfer_conformance.drivers.faulty.driver import FaultyDriver
from deepinfer_conformance.drivers.faulty.faults import Calls, Fault, FaultKind, InjectedFaultError, Strike

__all__ = ["Calls", "Fault", "FaultKind", "FaultyDriver", "InjectedFaultError", "Strike"]
