"""The engine that is asked: the ordinary one, on a driver that is watched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from deepinfer.accelerator.selection import select
from deepinfer.engine.build import build_engine_on
from deepinfer.engine.options import EngineOptions
from deepinfer.eval.watching import WatchingDriver
from deepinfer.llm import LLM
from deepinfer.model.checkpoint import Checkpoint, packaged_model_path
from deepinfer.settings import Settings


def watched_llm(
    model: Path | None, accelerator: str | None, options: EngineOptions, *, drafts: int | None, long_range: bool = True
) -> tuple[LLM, WatchingDriver]:
    """Build an engine on a watched driver.

    Args:
        model: checkpoint directory; None means the packaged model.
        accelerator: driver name; None means the environment's, or the first available one.
        options: of the engine; graphs and drafts are set here.
        drafts: per step; None means as many as the model drafts in one go.
        long_range: False takes the selected compressed entries away from attention.
    """
    settings = Settings.from_environment()
    watching = WatchingDriver(select(accelerator, settings).driver(), long_range=long_range)
    if drafts is None:
        config = Checkpoint.open(packaged_model_path() if model is None else model).config
        drafts = config.dspark_block_size if config.num_nextn_predict_layers else 0
    options = replace(options, num_speculative_tokens=drafts, decode_graphs=False)
    llm = LLM.from_engine(build_engine_on(watching, model, options, settings))
    watching.forget()
    return llm, watching
