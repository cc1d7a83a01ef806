"""Random weights with the statistics of a trained model.

Plain fan-in initialisation makes tiny models fragile: picks sit on near-ties and rounding flips them. The values below
were measured on the released checkpoint where a source exists (embeddings, norms, attention and expert projections);
the others are chosen so that every part has an effect of ordinary size:

* final norms 1, output head, compressor, indexer, Engram and draft projections one times fan_in^-0.5;
* Engram tables as wide as the embeddings, their per-channel weights 1 with a spread of 0.1; the draft's bigram
  table 0.5;
* hyper-connections: mixes of unit size scaled by 0.5, biases with a spread of 0.5; sinks 0.5; router biases 0.1;
* vision: one times fan_in^-0.5, norms 1, biases 0.02.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import torch

from deepinfer.model.inventory import Parameter

_NORM_SPREAD = 0.1


class _Rule(NamedTuple):
    """Names that end so are normal with this mean; the spread is absolute or a multiple of fan_in^-0.5."""

    ending: str
    mean: float = 0.0
    spread: float = 0.0
    per_fan_in: float = 0.0


def _norm(ending: str, mean: float) -> _Rule:
    return _Rule(ending, mean=mean, spread=_NORM_SPREAD * mean)


# The first ending that fits decides, so longer endings stand before shorter ones.
_RULES: tuple[_Rule, ...] = (
    _Rule("markov_head.embed.weight", spread=0.5),
    _Rule("embed.weight", spread=0.12),
    _norm("attn_norm.weight", 0.025),
    _norm("ffn_norm.weight", 0.2),
    _norm("q_norm.weight", 0.97),
    _norm("kv_norm.weight", 0.4),
    _norm("compressor.norm.weight", 0.6),
    _norm("k_norm.weight", 0.5),
    _norm("norm.weight", 1.0),
    _norm("norm1.weight", 1.0),
    _norm("norm2.weight", 1.0),
    _norm("q_weight", 1.0),
    _norm("k_weight", 1.0),
    _Rule("attn_sink", spread=0.5),
    _Rule("gate.bias", spread=0.1),
    _Rule("gate.bias_vl", spread=0.1),
    _Rule("_base", spread=0.5),
    _norm("_scale", 0.5),
    _Rule("_fn", per_fan_in=1.0),
    _Rule("compressor.wkv.weight", per_fan_in=1.0),
    _Rule("engram.wkv.weight", per_fan_in=1.0),
    _Rule("attn.wq_a.weight", per_fan_in=1.6),
    _Rule("wq_b.weight", per_fan_in=0.95),
    _Rule("attn.wkv.weight", per_fan_in=1.8),
    _Rule("attn.wo_a.weight", per_fan_in=1.6),
    _Rule("attn.wo_b.weight", per_fan_in=1.9),
    _Rule("ffn.gate.weight", per_fan_in=2.9),
    _Rule(".bias", spread=0.02),
    _Rule("image_start", spread=0.12),
    _Rule("image_end", spread=0.12),
    _Rule("image_newline", spread=0.12),
)
_EXPERT_RULES = {"w1": 1.5, "w2": 1.05, "w3": 1.5}
_DEFAULT = _Rule("", per_fan_in=1.0)


def random_values(parameter: Parameter, seed: int) -> torch.Tensor:
    """Give the unquantised float32 values of one parameter.

    They depend on the seed, the name and the shape only: not on which other parameters are made, nor in what order.
    """
    rule = _rule_for(parameter.name)
    spread = rule.spread + rule.per_fan_in * float(parameter.shape[-1]) ** -0.5
    digest = hashlib.sha256(f"{seed}/{parameter.name}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    values = generator.standard_normal(parameter.shape, dtype=np.float32)
    values *= np.float32(spread)
    values += np.float32(rule.mean)
    return torch.from_numpy(values)


def _rule_for(name: str) -> _Rule:
    if ".ffn." in name:
        matrix = name.removesuffix(".weight").rpartition(".")[2]
        if matrix in _EXPERT_RULES:
            return _Rule(name, per_fan_in=_EXPERT_RULES[matrix])
    return next((rule for rule in _RULES if name.endswith(rule.ending)), _DEFAULT)
