"""THE CONTRACT between the engine and the hardware: the only door, and the whole of what a vendor implements."""

from deepinfer.accelerator.batch import StepKind, StepLayout
from deepinfer.accelerator.caches import EntryCache, IndexCache, PendingCache, WindowCache
from deepinfer.accelerator.capabilities import Capabilities, KvCacheDtype, Numerics, OpCapability, Repeatability
from deepinfer.accelerator.collectives import Collectives, LostRanksError, RankPlace, SoloCollectives
from deepinfer.accelerator.interface import (
    INTERFACE_VERSION,
    AcceleratorDriver,
    Availability,
    Event,
    Graph,
    ImmediateStream,
    LinearShape,
    MemoryInfo,
    OpOptions,
    Reason,
    Stream,
)
from deepinfer.accelerator.ops import OP_GROUPS, Feature, Ops, all_op_names, needed_op_names
from deepinfer.accelerator.plan import Plan, PlanRow, make_plan
from deepinfer.accelerator.weights import ExpertSlot, PreparedWeight, StoredExpert, StoredWeight

__all__ = [
    "INTERFACE_VERSION",
    "OP_GROUPS",
    "AcceleratorDriver",
    "Availability",
    "Capabilities",
    "Collectives",
    "EntryCache",
    "Event",
    "ExpertSlot",
    "Feature",
    "Graph",
    "ImmediateStream",
    "IndexCache",
    "KvCacheDtype",
    "LinearShape",
    "LostRanksError",
    "MemoryInfo",
    "Numerics",
    "OpCapability",
    "OpOptions",
    "Ops",
    "PendingCache",
    "Plan",
    "PlanRow",
    "PreparedWeight",
    "RankPlace",
    "Reason",
    "Repeatability",
    "SoloCollectives",
    "StepKind",
    "StepLayout",
    "StoredExpert",
    "StoredWeight",
    "Stream",
    "WindowCache",
    "all_op_names",
    "make_plan",
    "needed_op_names",
]
