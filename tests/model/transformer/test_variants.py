"""Other shapes of model than the golden's: prefill and decode still agree bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.plan import make_plan
from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.pools import CachePools
from deepinfer.model import ModelConfig, derive_roles
from deepinfer.model.checkpoint import Checkpoint, make_checkpoint
from deepinfer.model.rotary import rotary_tables
from deepinfer.model.transformer import Transformer
from deepinfer.model.weights import load_model
from deepinfer_cpu_ref import Driver

NO_ENGRAM: dict[str, Any] = {"engram_layer_ids": (), "engram_num_embeddings": ()}
NO_DRAFT: dict[str, Any] = {"num_nextn_predict_layers": 0, "dspark_target_layer_ids": ()}
VARIANTS: dict[str, dict[str, Any]] = {
    "no memory, no drafts": {**NO_ENGRAM, **NO_DRAFT, "compress_ratios": (0, 0, 2, 2, 1, 1, 1, 1)},
    "window only": {
        **NO_DRAFT,
        "compress_ratios": (0,) * 8,
        "kv_source_layer_ids": (),
        "index_source_layer_ids": (),
        "candidate_source_layer_id": None,
    },
    "pairs only": {
        **NO_DRAFT,
        "compress_ratios": (2,) * 8,
        "kv_source_layer_ids": (0, 5),
        "index_source_layer_ids": (0, 3, 5),
        "candidate_source_layer_id": None,
    },
    "one expert, one head group, two streams": {"num_experts_per_tok": 1, "o_groups": 1, "hc_mult": 2},
    "window of one": {"sliding_window": 1},
}


@pytest.mark.parametrize(("name", "form"), [*zip(VARIANTS, ("released", "float32") * 3, strict=False)])
def test_chunks_and_decode_agree_bit_for_bit(
    bench_of: Callable[..., Any], tiny8: ModelConfig, tmp_path: Path, name: str, form: str
) -> None:
    config = replace(tiny8, **VARIANTS[name])
    options = OpOptions(batch_invariant=True, numerics="served" if form == "released" else "portable")
    driver = Driver()
    ops = make_plan(driver, options).ops
    directory = make_checkpoint(config, 5, tmp_path / "model", form)
    weights = load_model(config, Checkpoint.open(directory), ops, driver.device)
    layout = CacheLayout.from_config(config, derive_roles(config), block_size=4, backtrack=2)
    bench = bench_of()
    bench = replace(
        bench,
        model=Transformer(config, weights, ops, rotary_tables(config, 64)),
        pools=CachePools.allocate(layout, driver, num_blocks=40, num_slots=8),
    )
    ids = [(37 * place + 11) % 500 for place in range(13)]
    decoded = bench.decode(bench.admit(ids), 13)
    assert torch.isfinite(decoded).all()
    assert decoded.std() > 0.1
    chunks = [(13,), (6, 7), (1, 4, 2, 6)]
    for logits in bench.prefill_together([bench.admit(ids) for _ in chunks], chunks):
        assert torch.equal(logits, decoded)
