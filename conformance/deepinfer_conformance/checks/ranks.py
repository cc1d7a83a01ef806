from collections.abc import Mapping
from deepinfer_conformance.case import Law
LAWS: Mapping[str, Law] = {}
