"""One round of each peer that `compare.py` compares: a prefill and some greedy decode steps on random prompts."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

LLAMA = "llama.cpp"
LLAMA_BENCH = "llama-bench"
SAME_WIDTHS = (
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "n_routed_experts",
    "num_experts_per_tok",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "hc_mult",
    "hc_sinkhorn_iters",
    "swiglu_limit",
)


@dataclass(frozen=True, slots=True)
class Workload:
    """What every peer does in a round: prompts of random tokens, then greedy tokens."""

    batch: int
    prompt_tokens: int
    decode_tokens: int
    threads: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second of one round."""

    prefill: float
    decode: float


Round = Callable[[], Speed]


def prompts(work: Workload) -> list[list[int]]:
    """Return the same random prompts for every peer."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(10, 32_000, (work.batch, work.prompt_tokens), generator=generator).tolist()


def speed_of(work: Workload, prefill_s: float, decode_steps_s: list[float]) -> Speed:
    """Return the speeds of a round from the time of its prefill and of each of its decode steps."""
    return Speed(work.batch * work.prompt_tokens / prefill_s, work.batch / statistics.median(decode_steps_s))


def open_deepinfer(work: Workload, model: Path) -> Round:
    """Return a round of this engine, whole: scheduler, model, sampler."""
    from deepinfer import LLM, SamplingParams

    llm = LLM(
        model,
        "cpu_ref",
        dtype="float32" if work.dtype == "float32" else "bfloat16",
        max_num_seqs=work.batch,
        max_model_len=work.prompt_tokens + work.decode_tokens + 1,
        num_blocks=work.batch * ((work.prompt_tokens + work.decode_tokens) // 16 + 2) + 1,
    )
    params = SamplingParams(temperature=0, max_tokens=work.decode_tokens + 1, ignore_eos=True)
    rounds = iter(range(10**9))

    def run() -> Speed:
        engine = llm.engine
        number = next(rounds)
        for index, ids in enumerate(prompts(work)):
            engine.add_request(f"{number}.{index}", ids, params)
        prefill_s, decode_steps_s = 0.0, []
        while engine.has_unfinished_requests():
            started = time.perf_counter()
            engine.step()
            passed = time.perf_counter() - started
            if engine.last_step.kind == "prefill":
                prefill_s += passed
            elif engine.last_step.kind == "decode" and len(engine.last_step.rows) == work.batch:
                decode_steps_s.append(passed)
        return speed_of(work, prefill_s, decode_steps_s)

    return run


def open_transformers(work: Workload, model: Path) -> Round:
    """Return a round of transformers' DeepSeek-V4 with random weights of the same widths."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    from deepinfer.model import ModelConfig

    widths = ModelConfig.from_file(model / "config.json")
    config = DeepseekV4Config(
        **{name: getattr(widths, name) for name in SAME_WIDTHS},
        n_shared_experts=1,
        num_key_value_heads=1,
        layer_types=["compressed_sparse_attention"] * widths.num_hidden_layers,
        mlp_layer_types=["moe"] * widths.num_hidden_layers,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    peer = DeepseekV4ForCausalLM(config).to(getattr(torch, work.dtype)).eval()
    ids = torch.tensor(prompts(work))

    def run() -> Speed:
        with torch.inference_mode():
            started = time.perf_counter()
            output = peer(ids, use_cache=True, logits_to_keep=1)
            prefill_s = time.perf_counter() - started
            decode_steps_s = []
            for _ in range(work.decode_tokens):
                started = time.perf_counter()
                following = output.logits[:, -1:].argmax(-1)
                output = peer(following, past_key_values=output.past_key_values, use_cache=True)
                decode_steps_s.append(time.perf_counter() - started)
        return speed_of(work, prefill_s, decode_steps_s)

    return run


def open_llama(work: Workload, model: Path) -> Round:
    """Return a round of llama.cpp's own benchmark, which decodes one sequence."""
    counts = ["-p", str(work.prompt_tokens), "-n", str(work.decode_tokens), "-t", str(work.threads)]
    command = [LLAMA_BENCH, "-m", str(model), *counts, "-r", "1", "-o", "json"]

    def run() -> Speed:
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603 - fixed words
        return llama_speed(done.stdout)

    return run


def llama_speed(report: str) -> Speed:
    """Return the speeds in a JSON report of llama-bench: a list of tests, each of a prompt or of generation alone."""
    tests = json.loads(report)
    prefill = [test["avg_ts"] for test in tests if test["n_prompt"] and not test["n_gen"]]
    decode = [test["avg_ts"] for test in tests if test["n_gen"] and not test["n_prompt"]]
    if len(prefill) != 1 or len(decode) != 1:
        found = [(test["n_prompt"], test["n_gen"]) for test in tests]
        raise ValueError(f"{LLAMA_BENCH} was to report one prompt and one generation, it reported {found}")
    return Speed(prefill[0], decode[0])


PEERS = {"deepinfer": open_deepinfer, "transformers": open_transformers, LLAMA: open_llama}
