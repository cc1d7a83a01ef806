"""The few facts of a model on which its oracle tokens depend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class OracleModel(Protocol):
    """What the oracle needs to know of a model; ``deepinfer.model.config.ModelConfig`` has it."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    def num_hidden_layers(self) -> int:
        """Text layers."""

    @property
    def compress_ratios(self) -> Sequence[int]:
        """Tokens per entry and layer, 0 for none."""

    @property
    def kv_source_layer_ids(self) -> Sequence[int]:
        """Layers that own entries."""

    @property
    def index_source_layer_ids(self) -> Sequence[int]:
        """Layers that pick entries."""

    @property
    def index_topk(self) -> int:
        """Entries per row."""

    @property
    def candidate_source_layer_id(self) -> int | None:
        """Layer that publishes candidate blocks."""

    @property
    def candidate_topk_blocks(self) -> int:
        """Candidate blocks per row."""

    @property
    def candidate_block_size(self) -> int:
        """Entries per candidate block."""

    @property
    def sliding_window(self) -> int:
        """Positions in a window, the row's own included."""

    @property
    def n_routed_experts(self) -> int:
        """Experts."""

    @property
    def num_experts_per_tok(self) -> int:
        """Experts per row."""

    @property
    def engram_layer_ids(self) -> Sequence[int]:
        """Layers with an n-gram table."""

    @property
    def engram_max_ngram_size(self) -> int:
        """Longest n-gram."""

    @property
    def engram_pad_token_id(self) -> int:
        """Token that stands for a place that cannot be read."""
