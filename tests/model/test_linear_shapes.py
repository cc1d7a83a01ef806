"""The determinism self-check sees every product that the model runs."""

from collections import Counter

import torch

from deepinfer.accelerator.interface import LinearShape, OpOptions
from deepinfer.model.inventory import parameters
from deepinfer.model.linear_shapes import linear_shapes
from deepinfer.model.presets import preset


def test_every_matrix_of_the_text_model_is_listed() -> None:
    config = preset("v41-flash")
    listed = {(shape.in_features, shape.out_features) for shape in linear_shapes(config, OpOptions())}
    tables = ("embed.weight", "q_weight", "k_weight")
    for parameter in parameters(config, ("text",)):
        if len(parameter.shape) == 2 and not parameter.name.endswith(tables):
            rows, columns = parameter.shape
            if parameter.name.endswith("wo_a.weight"):
                rows //= config.o_groups
            assert (columns, rows) in listed, parameter.name


def test_no_shape_is_listed_twice_and_float64_reaches_promoted_products() -> None:
    config = preset("tiny8")
    for dtype, promoted in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2):
        shapes = linear_shapes(config, OpOptions(activation_dtype=dtype))
        assert max(Counter(shapes).values()) == 1
        assert LinearShape(config.hidden_size, config.vocab_size, promoted) in shapes
        assert LinearShape(config.hidden_size, config.q_lora_rank, dtype) in shapes
        assert LinearShape(config.hidden_size, config.head_dim, promoted) in shapes  # ratio-2 compression
        assert LinearShape(config.hc_mult * config.hidden_size, 24, promoted) in shapes
