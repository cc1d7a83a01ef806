"""The draft model of the golden, rings that tests fill by hand, and a second implementation in float64.

Legend: P context positions, n drafts, S streams, D hidden size, A taps times D, H heads, C head width, V vocabulary.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepinfer.accelerator.batch import StepKind, StepLayout
from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.ops.drafting import DraftBlock
from deepinfer.accelerator.plan import make_plan
from deepinfer.accelerator.weights import StoredWeight
from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.pools import CachePools
from deepinfer.model import ModelConfig, derive_roles
from deepinfer.model.checkpoint import Checkpoint
from deepinfer.model.draft import DraftModel, DraftRound
from deepinfer.model.draft_weights import load_draft
from deepinfer.model.rotary import rotary_tables
from deepinfer.model.weights import OuterWeights
from deepinfer_cpu_ref import Driver

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
POSITIONS = 256
NAN_BYTE = 0xFF


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "tiny8.safetensors")


@pytest.fixture(scope="session")
def tiny8() -> ModelConfig:
    return ModelConfig.from_file(GOLDEN / "tiny8.json")


@pytest.fixture(scope="session")
def golden_directory(golden: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("golden")
    shutil.copy(GOLDEN / "tiny8.json", directory / "config.json")
    weights = {name.removeprefix("w."): tensor for name, tensor in golden.items() if name.startswith("w.")}
    save_file(weights, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="session")
def draft_model_of(
    tiny8: ModelConfig, golden: dict[str, Tensor], golden_directory: Path
) -> Callable[[OpOptions], DraftModel]:
    """The golden's draft model for some options, loaded once for each."""
    models: dict[OpOptions, DraftModel] = {}
    driver = Driver()

    def build(options: OpOptions) -> DraftModel:
        if options not in models:
            ops = make_plan(driver, options, features=["drafts"]).ops
            matrix_VD = golden["w.head.weight"]
            head = StoredWeight("head.weight", "float32", matrix_VD, None, *matrix_VD.shape)
            # The draft never uses the target's last norm: a NaN there must not show.
            norm_D = torch.full_like(golden["w.norm.weight"], float("nan"))
            outer = OuterWeights(golden["w.embed.weight"], norm_D, ops.linear.prepare(head, "float32"))
            checkpoint = Checkpoint.open(golden_directory, groups=("draft",))
            weights = load_draft(tiny8, checkpoint, ops, driver.device, outer)
            models[options] = DraftModel(tiny8, weights, ops, rotary_tables(tiny8, POSITIONS))
        return models[options]

    return build


@dataclass
class Rings:
    """A draft model over state slots full of NaN bytes."""

    model: DraftModel
    pools: CachePools

    def store(self, work: Sequence[tuple[int, int, Tensor]], kind: StepKind = "prefill", padding: int = 0) -> None:
        """Store taps: for each (state slot, first position, taps [q, A])."""
        rows = [len(taps) for _, _, taps in work]
        starts = torch.tensor([0, *rows, *([padding] if padding else [])]).cumsum(0)
        cached = [first for _, first, _ in work] + [0] * bool(padding)
        slots = [slot for slot, _, _ in work] + [0] * bool(padding)
        counts = torch.tensor([*rows, padding] if padding else rows)
        taps_TA = torch.cat([taps for _, _, taps in work])
        taps_TA = torch.nn.functional.pad(taps_TA, (0, 0, 0, padding), value=float("nan"))
        request_T = torch.arange(len(counts)).repeat_interleave(counts)
        total = len(taps_TA)
        position_T = torch.arange(total) - starts[:-1][request_T] + torch.tensor(cached)[request_T]
        step = StepLayout(
            kind=kind,
            block_size=8,
            ring=self.pools.layout.ring,
            row_starts_R1=starts,
            cached_R=torch.tensor(cached),
            state_slots_R=torch.tensor(slots),
            block_table_RB=torch.zeros(len(counts), 1, dtype=torch.int64),
            request_T=request_T,
            position_T=position_T,
            window_start_R=torch.zeros(len(counts), dtype=torch.int64),
            image_T=torch.zeros(total, dtype=torch.bool),
            valid_T=torch.arange(total) < total - padding,
            max_position=int(position_T.max()) + 1,
            max_rows=int(counts.max()),
        )
        activation = self.model.ops.linear.embed(torch.tensor([0]), taps_TA).dtype
        self.model.store_context(taps_TA.to(activation), step, self.pools)

    def round(
        self,
        anchors: Sequence[int],
        contexts: Sequence[int],
        slots: Sequence[int],
        drafts: int,
        choose: Callable[[int, Tensor], Tensor] | None = None,
        starts: Sequence[int] | None = None,
        valid: Sequence[bool] | None = None,
    ) -> tuple[DraftRound, Tensor]:
        """Return a round and the logits [R, n, V] of its drafts; the best token is chosen unless told otherwise."""
        seen: list[Tensor] = []

        def watched(draft: int, logits_RV: Tensor) -> Tensor:
            seen.append(logits_RV.clone())
            return logits_RV.argmax(-1) if choose is None else choose(draft, logits_RV)

        count = len(anchors)
        block = DraftBlock(
            context_R=torch.tensor(contexts),
            state_slots_R=torch.tensor(slots),
            window_start_R=torch.tensor(starts or [0] * count),
            valid_R=torch.tensor(valid or [True] * count),
        )
        found = self.model.round(torch.tensor(anchors), block, drafts, self.pools, watched)
        return found, torch.stack(seen, 1)


@pytest.fixture(scope="session")
def rings_of(draft_model_of: Callable[[OpOptions], DraftModel], tiny8: ModelConfig) -> Callable[..., Rings]:
    """Make fresh rings, every byte of which is a NaN, for the golden's draft model."""

    def build(options: OpOptions, *, backtrack: int = 4, num_slots: int = 6) -> Rings:
        layout = CacheLayout.from_config(
            tiny8,
            derive_roles(tiny8),
            block_size=8,
            backtrack=backtrack,
            kv_cache_dtype=options.kv_cache_dtype,
            draft_stages=tiny8.num_nextn_predict_layers,
        )
        pools = CachePools(
            layout,
            torch.full((2, layout.block_bytes), NAN_BYTE, dtype=torch.uint8),
            torch.full((num_slots, layout.slot_bytes), NAN_BYTE, dtype=torch.uint8),
        )
        return Rings(draft_model_of(options), pools)

    return build


@dataclass(frozen=True)
class Reference:
    """The draft model from its formulas, one request at a time, everything in float64, no rings and no ops."""

    weights: dict[str, Tensor]
    config: ModelConfig

    def round(
        self, taps_PA: Tensor, anchor: int, drafts: int, chosen: Sequence[int] | None = None, start: int = 0
    ) -> tuple[list[int], Tensor, Tensor]:
        """Return drafts, logits [n, V] and confidence logits [n] after the context of ``taps_PA``.

        ``chosen`` dictates the drafts; ``start`` is the first context position that may be seen.
        """
        config, w = self.config, self.weights
        context = len(taps_PA)
        main_PD = self._rms(taps_PA.double() @ w["mtp.0.main_proj.weight"].T, w["mtp.0.main_norm.weight"])
        ids = [anchor] + [config.dspark_noise_token_id] * (drafts - 1)
        x_nSD = w["embed.weight"][ids].unsqueeze(1).repeat(1, config.hc_mult, 1)
        pre_nS = torch.zeros(drafts, config.hc_mult, dtype=torch.float64)
        pre_nS[:, 0] = 1.0
        first = max(0, start, context - config.sliding_window)
        for stage in range(config.num_nextn_predict_layers):
            stem = f"mtp.{stage}"
            keys_wC = self._key(main_PD[first:], stem, range(first, context))
            pre_a, post, comb = self._mixes(x_nSD, f"{stem}.hc_attn")
            x_nD = self._rms(torch.einsum("ns,nsd->nd", pre_nS, x_nSD), w[f"{stem}.attn_norm.weight"])
            y_nD = self._attention(x_nD, stem, keys_wC, context)
            x_nSD = post[:, :, None] * y_nD[:, None] + torch.einsum("nij,nid->njd", comb, x_nSD)
            pre_nS, post, comb = self._mixes(x_nSD, f"{stem}.hc_ffn")
            x_nD = self._rms(torch.einsum("ns,nsd->nd", pre_a, x_nSD), w[f"{stem}.ffn_norm.weight"])
            y_nD = torch.stack([self._experts(row_D, f"{stem}.ffn") for row_D in x_nD])
            x_nSD = post[:, :, None] * y_nD[:, None] + torch.einsum("nij,nid->njd", comb, x_nSD)
        last = f"mtp.{config.num_nextn_predict_layers - 1}"
        h_nD = torch.einsum("ns,nsd->nd", pre_nS, x_nSD)
        base_nV = self._rms(h_nD, w[f"{last}.norm.weight"]) @ w["head.weight"].T
        found: list[int] = []
        logits, confidences = [], []
        before = anchor
        for draft in range(drafts):
            m_M = w[f"{last}.markov_head.embed.weight"][before]
            logits.append(base_nV[draft] + w[f"{last}.markov_head.head.weight"] @ m_M)
            confidences.append(w[f"{last}.confidence_head.proj.weight"][0] @ torch.cat([h_nD[draft], m_M]))
            before = int(logits[-1].argmax()) if chosen is None else chosen[draft]
            found.append(before)
        return found, torch.stack(logits), torch.stack(confidences)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config.rms_norm_eps)

    def _rope(self, x: Tensor, positions: Sequence[int], sign: float = 1.0) -> Tensor:
        """Rotate the last channels of x [rows, ..., C] pair by pair, as complex numbers."""
        width = self.config.qk_rope_head_dim
        angles = torch.tensor(
            [[p * self.config.rope_theta ** (-2 * i / width) for i in range(width // 2)] for p in positions],
            dtype=torch.float64,
        )
        turn = torch.polar(torch.ones_like(angles), sign * angles)
        while turn.dim() < x.dim():
            turn = turn.unsqueeze(1)
        pairs = torch.view_as_complex(x[..., -width:].reshape(*x.shape[:-1], width // 2, 2).contiguous())
        return torch.cat((x[..., :-width], torch.view_as_real(pairs * turn).flatten(-2)), -1)

    def _key(self, x: Tensor, stem: str, positions: Sequence[int]) -> Tensor:
        w = self.weights
        key = self._rms(x @ w[f"{stem}.attn.wkv.weight"].T, w[f"{stem}.attn.kv_norm.weight"])
        return self._rope(key, positions) if len(x) else key

    def _attention(self, x_nD: Tensor, stem: str, context_wC: Tensor, context: int) -> Tensor:
        config, w = self.config, self.weights
        positions = range(context, context + len(x_nD))
        attn = f"{stem}.attn"
        qr = self._rms(x_nD @ w[f"{attn}.wq_a.weight"].T, w[f"{attn}.q_norm.weight"])
        query = (qr @ w[f"{attn}.wq_b.weight"].T).view(len(x_nD), config.num_attention_heads, config.head_dim)
        query = self._rope(query, positions)
        keys = torch.cat((context_wC, self._key(x_nD, stem, positions)))
        score = torch.einsum("nhc,kc->nhk", query, keys) / math.sqrt(config.head_dim)
        power = torch.exp(score)
        share = power / (power.sum(-1, keepdim=True) + torch.exp(w[f"{attn}.attn_sink"])[:, None])
        output = self._rope(torch.einsum("nhk,kc->nhc", share, keys), positions, -1.0)
        grouped = output.reshape(len(x_nD), config.o_groups, -1)
        first = w[f"{attn}.wo_a.weight"].view(config.o_groups, config.o_lora_rank, -1)
        return torch.einsum("ngk,grk->ngr", grouped, first).flatten(1) @ w[f"{attn}.wo_b.weight"].T

    def _mixes(self, x_nSD: Tensor, stem: str) -> tuple[Tensor, Tensor, Tensor]:
        config, w, streams = self.config, self.weights, self.config.hc_mult
        flat = x_nSD.flatten(1)
        m = flat @ w[f"{stem}_fn"].T / torch.sqrt((flat * flat).mean(1, keepdim=True) + config.rms_norm_eps)
        base, scale = w[f"{stem}_base"], w[f"{stem}_scale"]
        pre = torch.sigmoid(m[:, :streams] * scale[0] + base[:streams]) + config.hc_eps
        post = 2 * torch.sigmoid(m[:, streams : 2 * streams] * scale[1] + base[streams : 2 * streams])
        c = (m[:, 2 * streams :] * scale[2] + base[2 * streams :]).view(-1, streams, streams)
        c = torch.softmax(c, -1) + config.hc_eps
        c = c / (c.sum(1, keepdim=True) + config.hc_eps)
        for _ in range(config.hc_sinkhorn_iters - 1):
            c = c / (c.sum(2, keepdim=True) + config.hc_eps)
            c = c / (c.sum(1, keepdim=True) + config.hc_eps)
        return pre, post, c

    def _experts(self, x_D: Tensor, stem: str) -> Tensor:
        config, w = self.config, self.weights
        score = torch.sqrt(torch.log1p(torch.exp(w[f"{stem}.gate.weight"] @ x_D)))
        order = sorted(range(len(score)), key=lambda e: (-float(score[e] + w[f"{stem}.gate.bias"][e]), e))
        picked = order[: config.dspark_num_experts_per_tok]
        total = float(sum(score[e] for e in picked)) if len(picked) > 1 else 1.0
        result = self._expert(x_D, f"{stem}.shared_experts")
        for expert in picked:
            weight = score[expert] / total * config.routed_scaling_factor
            result = result + weight * self._expert(x_D, f"{stem}.experts.{expert}")
        return result

    def _expert(self, x_D: Tensor, stem: str) -> Tensor:
        limit, w = self.config.swiglu_limit, self.weights
        gate = (w[f"{stem}.w1.weight"] @ x_D).clamp(max=limit)
        up = (w[f"{stem}.w3.weight"] @ x_D).clamp(-limit, limit)
        return w[f"{stem}.w2.weight"] @ (gate * torch.sigmoid(gate) * up)


@pytest.fixture(scope="session")
def reference(golden: dict[str, Tensor], tiny8: ModelConfig) -> Reference:
    weights = {name.removeprefix("w."): tensor.double() for name, tensor in golden.items() if name.startswith("w.")}
    return Reference(weights, tiny8)
