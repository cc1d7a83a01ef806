"""Driver ``oracle``: the next token is a hash of the history as it was read through the paged memory."""

from deepinfer_conformance.drivers.oracle.driver import OracleDriver
from deepinfer_conformance.drivers.oracle.history import OracleHistory, OracleModel, oracle_tokens

__all__ = ["OracleDriver", "OracleHistory", "OracleModel", "oracle_tokens"]
