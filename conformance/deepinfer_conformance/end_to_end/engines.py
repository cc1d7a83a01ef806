"""Engines of the small model on the driver and on the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from deepinfer.accelerator import AcceleratorDriver, OpOptions, Repeatability
from deepinfer.engine.build import build_engine_on
from deepinfer.engine.engine import Engine
from deepinfer.engine.options import EngineOptions
from deepinfer.engine.outputs import RequestOutput
from deepinfer.errors import DeepInferError
from deepinfer.sampling.params import SamplingParams
from deepinfer.settings import Settings

DtypeName = Literal["float32", "bfloat16", "float64"]
NAN_BYTE = 0xFF
_NAMES: dict[torch.dtype, DtypeName] = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float64: "float64"}


class UnfinishedError(DeepInferError):
    """An engine did not come to an end within the steps that it was given."""


def make_engine(
    driver: AcceleratorDriver,
    options: OpOptions,
    *,
    batch_invariant: bool = False,
    num_blocks: int = 48,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_model_len: int = 160,
) -> Engine:
    """Return an engine of the packaged model whose pools are full of NaN."""
    engine = build_engine_on(
        driver,
        None,
        EngineOptions(
            dtype=_NAMES[options.activation_dtype],
            numerics=options.numerics,
            kv_cache_dtype=options.kv_cache_dtype,
            batch_invariant=batch_invariant,
            block_size=8,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            num_state_slots=max_num_seqs + 2,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        ),
        Settings(),
    )
    pools = engine.worker.pools
    pools.block_bytes_Nb.fill_(NAN_BYTE)
    pools.slot_bytes_Zb.fill_(NAN_BYTE)
    return engine


def can_be_invariant(driver: AcceleratorDriver) -> bool:
    """Return True if every op claims R2, so that a request's tokens may not depend on its company."""
    claims = driver.capabilities().ops.values()
    return all(claim.repeatability >= Repeatability.BATCH_INVARIANT for claim in claims)


def greedy(max_tokens: int) -> SamplingParams:
    """Return settings of an answer of exactly so many best tokens."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def drain(engine: Engine, *, most_steps: int = 2000) -> dict[str, RequestOutput]:
    """Run until nothing is unfinished; return the terminal record of each request that ended."""
    ended: dict[str, RequestOutput] = {}
    for _ in range(most_steps):
        if not engine.has_unfinished_requests():
            return ended
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    raise UnfinishedError(f"the engine still has unfinished requests after {most_steps} steps")


def answers(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[tuple[int, ...]]:
    """Return the greedy tokens of each prompt, one prompt after the other."""
    tokens = []
    for number, prompt in enumerate(prompts):
        engine.add_request(f"alone/{number}", prompt, greedy(max_tokens))
        (output,) = drain(engine).values()
        tokens.append(output.outputs[0].token_ids)
    return tokens
