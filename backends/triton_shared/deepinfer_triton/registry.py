"""Every configuration of every kernel that can be selected at run time, for checks that need no device.

A check compiles or lowers each of them::

    for configuration in configurations():
        source = ASTSource(
            fn=configuration.kernel,
            signature=configuration.full_signature(),
            constexprs=dict(configuration.constants),
            attrs=configuration.attributes(),
        )
        triton.compile(source, target=target, options=dict(configuration.options))

Widths come from `sizes.MODELS`. A new kernel adds its module to ``MODULES``; the tests see to it that what was launched
under those widths is listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from deepinfer_triton import (
    compression,
    engram_gate,
    item_moves,
    mixes,
    ngram_hash,
    plumbing,
    product_sizes,
    record_reading,
    record_writing,
    rms_norm,
    rotary,
    router,
    selection,
    slot_sum,
    sparse_attention,
    streams,
    table_rows,
)
from deepinfer_triton.configuration import Configuration
from deepinfer_triton.sizes import MODELS, ModelSizes

MODULES: Mapping[str, Callable[[ModelSizes], Iterator[Configuration]]] = MappingProxyType(
    {
        "norm.rms": rms_norm.configurations,
        "norm.rotary": rotary.configurations,
        "codec.encode, codec.store_entries, codec.store_index_keys": record_writing.configurations,
        "codec.gather_window, codec.gather_entries, codec.gather_index_keys": record_reading.configurations,
        "codec.store_window, moves": item_moves.configurations,
        "compression.pool_pairs": compression.configurations,
        "mixing.mixes": mixes.configurations,
        "mixing.collapse, mixing.post": streams.configurations,
        "memory.ngram_rows": ngram_hash.configurations,
        "memory.gather_rows": table_rows.configurations,
        "memory.gate": engram_gate.configurations,
        "plumbing": plumbing.configurations,
        "experts.route": router.configurations,
        "experts.combine": slot_sum.configurations,
        "linear": product_sizes.linear_configurations,
        "experts.routed, experts.shared, experts.local": product_sizes.expert_configurations,
        "sampling": product_sizes.sampling_configurations,
        "drafting.propose, drafting.guess, drafting.verify, drafting.match": product_sizes.drafting_configurations,
        "attention.sparse, drafting.attend": sparse_attention.configurations,
        "selection.top_entries": selection.configurations,
    }
)
"""The functions that list configurations, by the ops that they serve."""


def configurations(models: Sequence[ModelSizes] = MODELS) -> tuple[Configuration, ...]:
    """Return the distinct configurations for these models, in the order of ``MODULES``."""
    found: dict[tuple[str, str], Configuration] = {}
    for module in MODULES.values():
        for sizes in models:
            for configuration in module(sizes):
                found.setdefault((configuration.name, configuration.label), configuration)
    return tuple(found.values())
