"""Driver ``null``: right shapes and dtypes, no arithmetic."""

from deepinfer_conformance.drivers.null.driver import NullDriver

__all__ = ["NullDriver"]
