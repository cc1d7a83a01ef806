"""The engine against a slow full-sequence forward in numpy float64: no cache, no chunks, none of the project's model.

Legend: T positions, S streams, D hidden, H heads, C head_dim, J index heads, I index head_dim, N entries, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from deepinfer import LLM

Array = NDArray[Any]


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _best(scores: Array, count: int) -> Array:
    return np.lexsort((np.arange(len(scores)), -scores))[:count]


class Forward:
    """One pass over a whole sequence."""

    def __init__(self, config: Any, weights: dict[str, Array], ids: list[int], image: Array) -> None:
        self.c, self.w, self.ids, self.image = config, weights, np.array(ids), image
        self.entries: dict[int, Array] = {}
        self.index_keys: dict[int, Array] = {}
        self.picks: list[list[int]] = []
        self.candidates: list[set[int]] = []

    def norm(self, x: Array, name: str) -> Array:
        return self.w[name] * x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c.rms_norm_eps)

    def turn(self, x: Array, positions: Array, ratio: int, sign: float = 1.0) -> Array:
        width, scaling = self.c.qk_rope_head_dim, self.c.rope_scaling
        pair = np.arange(width // 2)
        base = self.c.compress_rope_theta if ratio else self.c.rope_theta
        frequency = base ** (-2.0 * pair / width)
        if ratio:

            def at(turns: float) -> float:
                return (
                    width
                    * math.log(scaling.original_max_position_embeddings / (2 * math.pi * turns))
                    / (2 * math.log(base))
                )

            low, high = max(math.floor(at(scaling.beta_fast)), 0), min(math.ceil(at(scaling.beta_slow)), width - 1)
            ramp = np.clip((pair - low) / max(high - low, 1e-3), 0, 1)
            frequency = frequency / scaling.factor * ramp + frequency * (1 - ramp)
        angle = (positions[:, None] * frequency).reshape(len(positions), *[1] * (x.ndim - 2), width // 2)
        cosine, sine = np.cos(angle), sign * np.sin(angle)
        even, odd, turned = x[..., -width::2], x[..., -width + 1 :: 2], x.copy()
        turned[..., -width::2], turned[..., -width + 1 :: 2] = even * cosine - odd * sine, odd * cosine + even * sine
        return turned

    def mixes(self, x_TSD: Array, name: str) -> tuple[Array, Array, Array]:
        T, S, _ = x_TSD.shape
        scale, base, small = self.w[f"{name}_scale"], self.w[f"{name}_base"], self.c.hc_eps
        flat = x_TSD.reshape(T, -1)
        m = flat @ self.w[f"{name}_fn"].T / np.sqrt((flat * flat).mean(-1, keepdims=True) + self.c.rms_norm_eps)
        pre = _sigmoid(m[:, :S] * scale[0] + base[:S]) + small
        post = 2 * _sigmoid(m[:, S : 2 * S] * scale[1] + base[S : 2 * S])
        mix = np.exp((m[:, 2 * S :] * scale[2] + base[2 * S :]).reshape(T, S, S))
        mix = mix / mix.sum(-1, keepdims=True) + small
        mix = mix / (mix.sum(-2, keepdims=True) + small)
        for _ in range(self.c.hc_sinkhorn_iters - 1):
            mix = mix / (mix.sum(-1, keepdims=True) + small)
            mix = mix / (mix.sum(-2, keepdims=True) + small)
        return pre, post, mix

    def engram_rows(self, layer: int) -> Array:
        c, seen, rows = self.c, set[int](), np.full((len(self.ids), self.c.num_engram_columns), -1)
        for owner in c.engram_layer_ids:  # a prime is used once over all layers
            primes = []
            for _ in range(c.engram_max_ngram_size - 1):
                prime = c.engram_vocab_size - 1
                for _ in range(c.engram_n_heads):
                    prime = next(n for n in range(prime + 1, 2**31) if n not in seen and _is_prime(n))
                    seen.add(prime)
                    primes.append(prime)
            if owner == layer:
                break
        bound = max(1, (2**63 - 1) // c.engram_compressed_vocab_size // 2)
        multipliers = (
            2 * np.random.default_rng(10007 * layer).integers(0, bound, size=c.engram_max_ngram_size, dtype=np.int64)
            + 1
        )
        for p in np.flatnonzero(~self.image):
            roll, is_blocked = 0, False
            for back in range(c.engram_max_ngram_size):
                is_blocked = is_blocked or p < back or bool(self.image[p - back])
                roll ^= (c.engram_pad_token_id if is_blocked else int(self.ids[p - back])) * int(multipliers[back])
                for column in range((back - 1) * c.engram_n_heads, back * c.engram_n_heads) if back else ():
                    rows[p, column] = roll % primes[column] + sum(primes[:column])
        return rows

    def engram(self, x_TSD: Array, layer: int) -> Array:
        name, (T, S, D) = f"layers.{layer}.engram.", x_TSD.shape
        found = self.w[f"{name}embed.weight"][self.engram_rows(layer)].reshape(T, -1) @ self.w[f"{name}wkv.weight"].T
        key, value = found[:, : S * D].reshape(T, S, D), found[:, S * D :]
        sizes = np.sqrt((x_TSD**2).mean(-1) + self.c.rms_norm_eps) * np.sqrt((key**2).mean(-1) + self.c.rms_norm_eps)
        dot = (x_TSD * self.w[f"{name}q_weight"] * self.w[f"{name}k_weight"] * key).sum(-1) / sizes / D**0.5
        gate = _sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(dot), 1e-6)), dot)) * ~self.image[:, None]
        return x_TSD + gate[..., None] * value[:, None]

    def compress(self, x: Array, name: str, layer: int, ratio: int) -> None:
        k = x @ self.w[f"{name}compressor.wkv.weight"].T
        if ratio == 2:
            pairs = len(k) // 2
            gate = np.exp(x @ self.w[f"{name}compressor.wgate.weight"].T)[: 2 * pairs].reshape(pairs, 2, -1)
            k = (gate / gate.sum(1, keepdims=True) * k[: 2 * pairs].reshape(pairs, 2, -1)).sum(1)
        latent, positions = self.norm(k, f"{name}compressor.norm.weight"), np.arange(len(k)) * ratio
        self.entries[layer] = self.turn(latent, positions, ratio)
        key = self.norm(latent @ self.w[f"{name}indexer.wk.weight"].T, f"{name}indexer.k_norm.weight")
        self.index_keys[layer] = self.turn(key, positions, ratio)

    def pick(self, x: Array, query: Array, name: str, layer: int, owner: int, ratio: int) -> None:
        c, T = self.c, len(x)
        asked = (query @ self.w[f"{name}indexer.wq_b.weight"].T).reshape(T, c.index_n_heads, c.index_head_dim)
        asked = self.turn(asked, np.arange(T), ratio)
        share_TJ = x @ self.w[f"{name}indexer.weights_proj.weight"].T * (c.index_head_dim * c.index_n_heads) ** -0.5
        reached = np.maximum(np.einsum("tji,ni->tjn", asked, self.index_keys[owner]), 0)
        score_TN = np.einsum("tj,tjn->tn", share_TJ, reached)
        self.picks, kept, size = [], [], c.candidate_block_size
        for t in range(T):
            score = score_TN[t, : (t + 1) // ratio].copy()
            if layer == c.candidate_source_layer_id:
                blocks = np.array([score[at : at + size].max() for at in range(0, len(score), size)])
                blocks[-1] = np.inf
                kept.append(set(_best(blocks, c.candidate_topk_blocks).tolist()))
            elif ratio == 1:
                score[[n // size not in self.candidates[t] for n in range(len(score))]] = -np.inf
            self.picks.append([n for n in _best(score, c.index_topk) if score[n] > -np.inf])
        self.candidates = kept or self.candidates

    def attention(self, x: Array, layer: int) -> Array:
        c, T, name, ratio = self.c, len(x), f"layers.{layer}.attn.", self.c.compress_ratios[layer]
        now = np.arange(T)
        query = self.norm(x @ self.w[f"{name}wq_a.weight"].T, f"{name}q_norm.weight")
        q = self.turn((query @ self.w[f"{name}wq_b.weight"].T).reshape(T, -1, c.head_dim), now, ratio)
        kv = self.turn(self.norm(x @ self.w[f"{name}wkv.weight"].T, f"{name}kv_norm.weight"), now, ratio)
        owner = max((source for source in c.kv_source_layer_ids if source <= layer), default=0)
        if ratio and owner == layer:
            self.compress(x, name, layer, ratio)
        if ratio and layer in c.index_source_layer_ids:
            self.pick(x, query, name, layer, owner, ratio)
        seen = np.empty_like(q)
        for t in range(T):
            keys = kv[max(0, t + 1 - c.sliding_window) : t + 1]
            if ratio:
                keys = np.concatenate([keys, self.entries[owner][self.picks[t]]])
            weight = np.exp(q[t] @ keys.T * c.head_dim**-0.5)
            seen[t] = weight @ keys / (weight.sum(-1) + np.exp(self.w[f"{name}attn_sink"]))[:, None]
        seen = self.turn(seen, now, ratio, sign=-1.0).reshape(T, c.o_groups, -1)
        inner = np.einsum("tgk,gok->tgo", seen, self.w[f"{name}wo_a.weight"].reshape(c.o_groups, c.o_lora_rank, -1))
        return inner.reshape(T, -1) @ self.w[f"{name}wo_b.weight"].T

    def expert(self, x: Array, name: str) -> Array:
        limit = self.c.swiglu_limit
        gate = np.minimum(x @ self.w[f"{name}w1.weight"].T, limit)
        up = np.clip(x @ self.w[f"{name}w3.weight"].T, -limit, limit)
        return (gate * _sigmoid(gate) * up) @ self.w[f"{name}w2.weight"].T

    def experts(self, x: Array, layer: int) -> Array:
        name, out = f"layers.{layer}.ffn.", self.expert(x, f"layers.{layer}.ffn.shared_experts.")
        score = np.sqrt(np.logaddexp(0, x @ self.w[f"{name}gate.weight"].T))
        for t in range(len(x)):
            bias = self.w[f"{name}gate.bias_vl" if self.image[t] else f"{name}gate.bias"]
            chosen = _best(score[t] + bias, self.c.num_experts_per_tok)
            total = score[t, chosen].sum() if len(chosen) > 1 else 1.0
            for each in chosen:
                share = score[t, each] / total * self.c.routed_scaling_factor
                out[t] += share * self.expert(x[t], f"{name}experts.{each}.")
        return out

    def logits(self) -> Array:
        x = np.repeat(self.w["embed.weight"][self.ids][:, None], self.c.hc_mult, axis=1)
        pre = np.zeros(x.shape[:2])
        pre[:, 0] = 1
        for layer in range(self.c.num_hidden_layers):
            if layer in self.c.engram_layer_ids:
                x = self.engram(x, layer)
            for part, run in (("attn", self.attention), ("ffn", self.experts)):
                next_pre, post, mix = self.mixes(x, f"layers.{layer}.hc_{part}")
                y = run(self.norm((pre[..., None] * x).sum(1), f"layers.{layer}.{part}_norm.weight"), layer)
                x, pre = post[..., None] * y[:, None] + np.einsum("tij,tid->tjd", mix, x), next_pre
        return self.norm((pre[..., None] * x).sum(1), "norm.weight") @ self.w["head.weight"].T


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


@pytest.mark.parametrize(
    ("name", "image_positions"),
    [("one_of_each", []), ("narrow", [*range(12, 18), 25, 30]), ("turned_round", [0, *range(8, 14)])],
)
def test_logits_are_those_of_the_formulas(
    name: str, image_positions: list[int], odd: Callable[..., LLM], odd_directory: Callable[[str], Path]
) -> None:
    ids = np.random.default_rng(5).integers(0, 101, 31).tolist()
    image = np.isin(np.arange(31), image_positions)
    llm = odd(name, dtype="float64", block_size=6, max_num_batched_tokens=7)
    stored = load_file(odd_directory(name) / "model.safetensors")
    weights = {key: value.astype(np.float64) for key, value in stored.items()}
    expected = Forward(llm.engine.config, weights, ids, image).logits()
    np.testing.assert_allclose(llm.logits(ids, image.tolist()).numpy(), expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize(("name", "kv_cache_dtype"), [("one_of_each", "released"), ("narrow", "float32")])
def test_no_cut_of_the_prompt_moves_a_bit_in_the_invariant_mode(
    name: str, kv_cache_dtype: str, odd: Callable[..., LLM]
) -> None:
    ids = np.random.default_rng(6).integers(0, 101, 13).tolist()
    cuts = [
        odd(name, batch_invariant=True, kv_cache_dtype=kv_cache_dtype, block_size=block, max_num_batched_tokens=budget)
        for block, budget in ((2, 1), (6, 5), (128, 64))
    ]
    first, *others = [llm.logits(ids).numpy() for llm in cuts]
    for other in others:
        np.testing.assert_array_equal(other, first)
