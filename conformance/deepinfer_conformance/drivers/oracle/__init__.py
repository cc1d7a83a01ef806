"""Driver ``oracle``: the next token is a hash of the history as it was read through the paged memory."""

from deepinfer_conformance.drivers.oracle.driver import OracleDriver
from deepinfer_conformance.drivers.oracle.history import OracleHistory, oracle_tokens
from deepinfer_conformance.drivers.oracle.model import OracleModel

__all__ = ["OracleDriver", "OracleHistory", "OracleModel", "oracle_tokens"]
