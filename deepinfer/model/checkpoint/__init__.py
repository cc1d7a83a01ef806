"""Checkpoints: opened and checked, described, and made."""

from deepinfer.model.checkpoint.inspect import CheckpointSummary, KindSummary, ShardSummary, inspect_checkpoint
from deepinfer.model.checkpoint.make import make_checkpoint, write_checkpoint
from deepinfer.model.checkpoint.packaged import packaged_model_path
from deepinfer.model.checkpoint.progress import Progress, ProgressCallback
from deepinfer.model.checkpoint.reader import Checkpoint, StoredTensor, WeightFormat

__all__ = [
    "Checkpoint",
    "CheckpointSummary",
    "KindSummary",
    "Progress",
    "ProgressCallback",
    "ShardSummary",
    "StoredTensor",
    "WeightFormat",
    "inspect_checkpoint",
    "make_checkpoint",
    "packaged_model_path",
    "write_checkpoint",
]
