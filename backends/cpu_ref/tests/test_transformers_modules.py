"""Modules of transformers' DeepSeek-V4, an independent implementation, beside the same chains of ops.

V4 differs from V4.1 outside these modules; inside them it computes the same once its per-head query norm is the
identity, its position bias is zero, and its hyper-connections collapse with the coefficients they just computed.

Legend: T rows, D hidden size, H heads, C head width, S streams.
"""

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as peer
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from deepinfer.accelerator.ops.attention import LongRange
from deepinfer.accelerator.ops.experts import RouterWeights
from deepinfer.accelerator.ops.mixing import MixWeights
from deepinfer.accelerator.ops.norm import RotaryTable
from deepinfer.accelerator.ops.selection import SelectionRule
from deepinfer.accelerator.weights import StoredExpert, StoredWeight

ROWS, HIDDEN, HEADS, WIDTH, ROTARY, WINDOW, EPS = 21, 64, 4, 32, 16, 8, 1e-20


@pytest.fixture
def config():
    config = DeepseekV4Config(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        head_dim=WIDTH,
        qk_rope_head_dim=ROTARY,
        q_lora_rank=48,
        o_groups=2,
        o_lora_rank=24,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "heavily_compressed_attention"],
        mlp_layer_types=["moe", "moe"],
        compress_rates={"heavily_compressed_attention": 2, "compressed_sparse_attention": 4},
        n_routed_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        swiglu_limit=1.0,
        index_n_heads=3,
        index_head_dim=32,
        rms_norm_eps=EPS,
        vocab_size=50,
        pad_token_id=2,
    )
    config._attn_implementation = "eager"
    return config


@pytest.fixture
def groups(ops):
    return ops(kv_cache_dtype="float32")


def randomised(module):
    """Give every parameter a value of its own, norms and sinks too."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (1.0 if "norm" in name else HIDDEN**-0.5))
    return module


def stored(weight):
    weight = weight.detach()
    return StoredWeight("w", "float32", weight, None, weight.shape[0], weight.shape[1])


@pytest.mark.parametrize("layer", [0, 1], ids=["window", "window and every pair"])
def test_attention(world, groups, config, layer):
    module = randomised(peer.DeepseekV4Attention(config, layer))
    module.q_b_norm = nn.Identity()
    if module.compressor is not None:
        module.compressor.position_bias.data.zero_()
    rotary = peer.DeepseekV4RotaryEmbedding(config)
    x, position = torch.randn(ROWS, HIDDEN), torch.arange(ROWS)
    tables = {kind: rotary(x, position[None], layer_type=kind) for kind in ("main", "compress")}
    back = position[:, None] - position[None]
    mask = torch.zeros(ROWS, ROWS).masked_fill((back < 0) | (back >= WINDOW), -torch.inf)
    with torch.no_grad():
        expected = module(x[None], tables, position[None], mask[None, None])[0][0]

    linear, norm, codec = groups["linear"], groups["norm"], groups["codec"]
    cos, sin = tables["compress" if layer else "main"]
    table = RotaryTable(cos[0], sin[0])

    def project(x, weight):
        return linear.dense(x, linear.prepare(stored(weight)))

    here = world(requests=1, width=WIDTH, released=False, window_size=WINDOW, ratio=2)
    step = here.step([(0, 0, ROWS)])
    query = norm.rms(project(x, module.q_a_proj.weight), module.q_a_norm.weight.detach(), EPS)
    query = project(query, module.q_b_proj.weight).view(ROWS, HEADS, WIDTH)
    query = norm.rotary(query, table, position)
    kv = norm.rms(project(x, module.kv_proj.weight), module.kv_norm.weight.detach(), EPS)
    records = codec.encode(norm.rotary(kv, table, position), here.window.format)
    long_range = None
    if module.compressor is not None:
        compressor = module.compressor
        gate, latent = project(x, compressor.gate_proj.weight), project(x, compressor.kv_proj.weight)
        pooled = groups["compression"].pool_pairs(gate, latent, here.pending, step)
        latent = norm.rms(pooled, compressor.kv_norm.weight.detach(), EPS)
        slots = groups["plumbing"].entry_slots(step, 2)
        codec.store_entries(here.entries, norm.rotary(latent, table, position // 2 * 2), slots)
        seen = torch.arange(ROWS // 2).expand(ROWS, -1)
        long_range = LongRange(here.entries, seen.masked_fill(seen >= (position[:, None] + 1) // 2, -1))
    output = groups["attention"].sparse(query, records, here.window, long_range, module.sinks.detach(), WINDOW, step)
    output = norm.rotary(output, table, position, inverse=True).reshape(ROWS, 2, -1)
    output = linear.grouped(output, linear.prepare_grouped(stored(module.o_a_proj.weight), 2)).flatten(1)
    torch.testing.assert_close(project(output, module.o_b_proj.weight), expected, rtol=1e-5, atol=2e-6)


def test_index_scores(world, groups, config):
    scorer = randomised(peer.DeepseekV4IndexerScorer(config))
    x, query, keys = torch.randn(ROWS, HIDDEN), torch.randn(ROWS, 3, 32), torch.randn(ROWS, 32)
    with torch.no_grad():
        scores = scorer(query[None], keys[None], x[None])[0]
    here = world(requests=1, index_width=32, released=False)
    step = here.step([(0, 0, ROWS)])
    groups["codec"].store_index_keys(here.index, keys, groups["plumbing"].entry_slots(step, 1))
    weights = groups["linear"].dense(x, groups["linear"].prepare(stored(scorer.weights_proj.weight)))
    chosen = groups["selection"].top_entries(
        query, weights * 32**-0.5 * 3**-0.5, here.index, step, SelectionRule(5, 1, 8)
    )
    for row in range(ROWS):
        order = sorted(range(row + 1), key=lambda entry, row=row: (-float(scores[row, entry]), entry))[:5]
        assert [entry for entry in chosen.entries_TK[row].tolist() if entry >= 0] == sorted(order)


def test_mixture_of_experts(groups, config):
    block = randomised(peer.DeepseekV4SparseMoeBlock(config, 0))
    block.gate.e_score_correction_bias.copy_(torch.randn(6))
    x = torch.randn(ROWS, HIDDEN) * 3
    with torch.no_grad():
        expected = block(x[None])[0]
    experts = groups["experts"]
    gate_up, down = block.experts.gate_up_proj, block.experts.down_proj
    kept = [
        StoredExpert(stored(both[:40]), stored(low), stored(both[40:])) for both, low in zip(gate_up, down, strict=True)
    ]
    own = block.shared_experts
    shared = StoredExpert(*(stored(part.weight) for part in (own.gate_proj, own.down_proj, own.up_proj)))
    bias = block.gate.e_score_correction_bias
    router = RouterWeights(block.gate.weight.detach(), bias, bias)
    nowhere, everywhere = torch.zeros(ROWS, dtype=torch.bool), torch.ones(ROWS, dtype=torch.bool)
    routing = experts.route(x, router, nowhere, everywhere, 3, config.routed_scaling_factor)
    result = experts.local(x, routing, experts.prepare(kept, 1.0), experts.prepare_shared(shared, 1.0))
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_hyper_connections(groups, config):
    module = randomised(peer.DeepseekV4HyperConnection(config))
    streams, output = torch.randn(ROWS, 4, HIDDEN), torch.randn(ROWS, HIDDEN)
    with torch.no_grad():
        post, comb, collapsed = (part[0] for part in module(streams[None]))
        mixed = post[..., None] * output[:, None] + torch.matmul(comb.transpose(1, 2), streams)
    weights = MixWeights(module.fn.detach(), module.base.detach(), module.scale.detach())
    mixing = groups["mixing"]
    mix = mixing.mixes(streams, weights, config.hc_sinkhorn_iters, config.hc_eps, EPS)
    torch.testing.assert_close(mix.post_TS, post, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mix.comb_TSS, comb, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(mixing.collapse(streams, mix.pre_TS), collapsed, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(mixing.post(output, streams, mix), mixed, rtol=1e-5, atol=2e-6)
