"""How far a truncated prefill moves the answer: the drift of ``compact`` against ``off``, and ``mask`` beside it.

``python benchmarks/truncation.py [--model DIRECTORY] [--prompts N] [--seed S]`` prints the table of
docs/truncated-prefill.md. Prompts are random token ids. Of each prompt the logits of its last position are compared,
from which the first token is drawn, and greedy answers.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer import LLM, SamplingParams
from deepinfer.accelerator.selection import select
from deepinfer.engine.build import build_engine_on
from deepinfer.engine.options import EngineOptions
from deepinfer.engine.worker import Forwarded, Worker
from deepinfer.model.truncation import TruncationMode
from deepinfer.scheduling.step import ScheduledStep
from deepinfer.settings import Settings

PROMPT_TOKENS = (96, 192)
KEEPS = (33, 40, 64, 128)
ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Answers:
    """What an engine made of prompts.

    Attributes:
        logits_NV: float32, of the last position of each prompt.
        tokens: the greedy answers.
    """

    logits_NV: torch.Tensor
    tokens: tuple[tuple[int, ...], ...]


class WatchedWorker(Worker):
    """Keeps the logits of whole prompts."""

    def __init__(self, *parts: Any) -> None:
        """Take what every worker takes."""
        super().__init__(*parts)
        self.kept: list[torch.Tensor] = []

    def _logits(self, step: ScheduledStep, forwarded: Forwarded) -> torch.Tensor:
        logits_BV = super()._logits(step, forwarded)
        if step.kind == "prefill":
            self.kept += list(logits_BV[torch.from_numpy(~step.is_partial_R)].clone())
        return logits_BV


def answers(model: str | None, mode: TruncationMode, keep: int, prompts: Sequence[Sequence[int]]) -> Answers:
    """Answer prompts one after the other, each prefilled in one step."""
    options = EngineOptions(
        truncated_prefill=mode,
        truncated_prefill_keep_tokens=keep,
        batch_invariant=True,
        max_num_seqs=1,
        max_num_batched_tokens=max(map(len, prompts)),
        max_model_len=max(map(len, prompts)) + ANSWER_TOKENS,
        block_size=16,
    )
    settings = Settings()
    engine = build_engine_on(select(None, settings).driver(), model, options, settings, worker_type=WatchedWorker)
    llm = LLM.from_engine(engine)
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    records = [llm.generate([list(prompt)], params, use_tqdm=False)[0] for prompt in prompts]
    worker = engine.worker
    kept = worker.kept if isinstance(worker, WatchedWorker) else []
    engine.close()
    return Answers(torch.stack(kept), tuple(tuple(record.outputs[0].token_ids) for record in records))


def drift(exact: Answers, found: Answers) -> tuple[float, float, float, float]:
    """Return the mean divergence (nats), the largest step of a logit over their spread, and shares of equal tokens."""
    p_NV, q_NV = exact.logits_NV.log_softmax(-1).double(), found.logits_NV.log_softmax(-1).double()
    divergence = float((p_NV.exp() * (p_NV - q_NV)).sum(-1).mean())
    step = float(((exact.logits_NV - found.logits_NV).abs().amax(-1) / exact.logits_NV.std(-1)).max())
    first = [one[0] == other[0] for one, other in zip(exact.tokens, found.tokens, strict=True)]
    every = [one == other for one, other in zip(exact.tokens, found.tokens, strict=True)]
    return divergence, step, sum(first) / len(first), sum(every) / len(every)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None, help="checkpoint directory; unset: the packaged model")
    parser.add_argument("--prompts", type=int, default=4, help="prompts of each length")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(chosen.seed)
    head = (
        "prompt",
        "keep",
        "divergence, nats",
        "largest step / spread",
        "same first token",
        "same 16",
        "mask = compact",
    )
    sys.stdout.write(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}\n")
    for length in PROMPT_TOKENS:
        prompts = [[draw.randrange(5, 500) for _ in range(length)] for _ in range(chosen.prompts)]
        exact = answers(chosen.model, "off", 140, prompts)
        for keep in KEEPS:
            found = answers(chosen.model, "compact", keep, prompts)
            masked = answers(chosen.model, "mask", keep, prompts)
            same = torch.equal(found.logits_NV, masked.logits_NV) and found.tokens == masked.tokens
            divergence, step, first, every = drift(exact, found)
            row = f"{length} | {keep} | {divergence:.2e} | {step:.3f} | {first:.2f} | {every:.2f}"
            sys.stdout.write(f"| {row} | {'every bit' if same else 'NO'} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
