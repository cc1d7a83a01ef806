"""The configuration of a model: Hugging Face ``config.json`` in, one frozen checked value out."""

from deepinfer.model.config.base import ModelConfig, QuantizationConfig, RopeScaling, VisionConfig

__all__ = ["ModelConfig", "QuantizationConfig", "RopeScaling", "VisionConfig"]
