"""The model: configuration, layer roles, checkpoints, and the transformer written in contract ops."""

from deepinfer.model.config import ModelConfig, QuantizationConfig, RopeScaling, VisionConfig
from deepinfer.model.roles import LayerRole, derive_roles

__all__ = ["LayerRole", "ModelConfig", "QuantizationConfig", "RopeScaling", "VisionConfig", "derive_roles"]
