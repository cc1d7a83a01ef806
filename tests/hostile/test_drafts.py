"""The whole loop on the golden's model: target, context, round, pool, verification; beside plain decoding.

The bench is as plain as can be: one request, one state slot, pools full of NaN bytes.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.ops.drafting import DraftBlock
from deepinfer.accelerator.plan import make_plan
from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.pools import CachePools
from deepinfer.model import ModelConfig, derive_roles
from deepinfer.model.checkpoint import Checkpoint
from deepinfer.model.draft import DraftModel
from deepinfer.model.draft_weights import load_draft
from deepinfer.model.rotary import rotary_tables
from deepinfer.model.transformer import Hidden, Transformer
from deepinfer.model.weights import load_model
from deepinfer.sampling import RequestSampling, RowRequest, SampledRow, SamplingParams, build_sampling_step
from deepinfer.sampling.draft_pool import DraftPool
from deepinfer.sampling.drafting import DraftDraws, DraftPolicy, cumulative_chances
from deepinfer.sampling.verification import RunRequest, Verifier, build_verification_step
from deepinfer_cpu_ref import Driver

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
CPU = torch.device("cpu")
DRAFTS = 3
SLOT = torch.tensor([1])


class Loop:
    """One model with drafts, in batch-invariant mode."""

    def __init__(self, directory: Path) -> None:
        golden = load_file(GOLDEN / "tiny8.safetensors")
        shutil.copy(GOLDEN / "tiny8.json", directory / "config.json")
        weights = {name.removeprefix("w."): value for name, value in golden.items() if name.startswith("w.")}
        save_file(weights, directory / "model.safetensors")
        self.config = ModelConfig.from_file(directory / "config.json")
        self.ops = make_plan(Driver(), OpOptions(batch_invariant=True), features=["drafts"]).ops
        target = load_model(self.config, Checkpoint.open(directory), self.ops, CPU)
        draft = load_draft(self.config, Checkpoint.open(directory, groups=("draft",)), self.ops, CPU, target.outer)
        rotary = rotary_tables(self.config, 128)
        self.target = Transformer(self.config, target, self.ops, rotary)
        self.draft = DraftModel(self.config, draft, self.ops, rotary)
        self.prompt: list[int] = golden["ids"][:21].tolist()

    def pools(self) -> CachePools:
        layout = CacheLayout.from_config(
            self.config, derive_roles(self.config), block_size=8, backtrack=DRAFTS + 1, draft_stages=2
        )
        blocks = torch.full((17, layout.block_bytes), 0xFF, dtype=torch.uint8)
        return CachePools(layout, blocks, torch.full((2, layout.slot_bytes), 0xFF, dtype=torch.uint8))

    def forward(self, pools: CachePools, history: list[int], cached: int, rows: list[int], kind: str) -> Hidden:
        count = len(rows)
        step = StepLayout(
            kind="prefill" if kind == "prefill" else "decode",
            block_size=8,
            ring=pools.layout.ring,
            row_starts_R1=torch.tensor([0, count]),
            cached_R=torch.tensor([cached]),
            state_slots_R=SLOT,
            block_table_RB=torch.arange(1, 17)[None],
            request_T=torch.zeros(count, dtype=torch.int64),
            position_T=torch.arange(cached, cached + count),
            window_start_R=torch.tensor([0]),
            image_T=torch.zeros(count, dtype=torch.bool),
            valid_T=torch.ones(count, dtype=torch.bool),
            max_position=cached + count,
            max_rows=count,
        )
        before = [history[cached - back] if cached >= back else -1 for back in (1, 2, 3)]
        ids_T = torch.tensor(rows)
        tokens_TG = self.target.ngram_tokens(ids_T, torch.tensor([before]), step)
        hidden = self.target.forward(ids_T, tokens_TG, step, pools, with_taps=True)
        assert hidden.taps_TA is not None
        self.draft.store_context(hidden.taps_TA, step, pools)
        return hidden

    def answer(
        self, sampling: RequestSampling, length: int, policy: DraftPolicy | None, script: Sequence[int] = ()
    ) -> tuple[list[SampledRow], int]:
        """Return the first tokens with their log-probabilities, and the steps that they took.

        With a script the drafts are its tokens, but every fifth is wrong.
        """
        pools, history, steps = self.pools(), list(self.prompt), 0
        found: list[SampledRow] = []
        pool = DraftPool(num_slots=2, drafts=DRAFTS, kept_tokens=policy.kept_tokens if policy else 0, device=CPU)
        verifier = Verifier(self.ops.sampling, self.ops.drafting, policy or DraftPolicy())
        rows, cached, kind = history, 0, "prefill"
        while len(found) < length:
            hidden = self.forward(pools, history, cached, rows, kind)
            drafts = pool.gather(SLOT)
            checked = rows[1:] if kind == "decode" else []
            request = RunRequest(sampling, len(history), history[len(self.prompt) :], checked)
            logits_BV: Tensor = self.target.logits(hidden.hidden_TD[len(rows) - 1 - len(checked) :]).float()
            (run,) = verifier.verify(logits_BV, build_verification_step([request], CPU), drafts).read()
            found += run.rows
            cached, steps = len(history), steps + 1
            cached += run.accepted
            history += run.token_ids
            kind, rows = "decode", history[-1:]
            if policy is not None:
                drafted = self.round(pools, pool, sampling, history, policy)
                if script:
                    made = range(len(found), len(found) + DRAFTS)
                    drafted = [(script[at % len(script)] + (at % 5 == 4)) % self.config.vocab_size for at in made]
                    tokens_Rn = torch.tensor([drafted])
                    pool.store(SLOT, tokens_Rn, torch.ones(1, DRAFTS), None)
                rows = rows + drafted
        return found[:length], steps

    def round(
        self, pools: CachePools, pool: DraftPool, sampling: RequestSampling, history: list[int], policy: DraftPolicy
    ) -> list[int]:
        settings = build_sampling_step([RowRequest(sampling, len(history), history[len(self.prompt) :])], CPU).rows
        draws = DraftDraws(self.ops.drafting, policy, settings)
        context = torch.tensor([len(history) - 1])
        block = DraftBlock(context, SLOT, torch.tensor([0]), torch.tensor([True]))
        made = self.draft.round(torch.tensor(history[-1:]), block, DRAFTS, pools, draws)
        chances_Rn = cumulative_chances(made.confidence_logits_Rn)
        pool.store(SLOT, made.token_ids_Rn, chances_Rn, draws.distributions())
        return list(pool.gather(SLOT).input_ids()[0].tolist())


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    torch.set_num_threads(1)
    return Loop(tmp_path_factory.mktemp("drafts"))


def sampling_of(loop: Loop, **values: object) -> RequestSampling:
    params = SamplingParams(logprobs=2, **values)  # type: ignore[arg-type]
    return RequestSampling.create(
        params, seed=5, prompt_token_ids=loop.prompt, end_token_ids=[], vocab_size=loop.config.vocab_size
    )


@pytest.mark.parametrize("values", [{"temperature": 0.3, "top_p": 0.9}], ids=str)
def test_coupled_drafts_change_no_bit_of_an_answer(loop: Loop, values: dict[str, object]) -> None:
    """Tokens and log-probabilities, whether drafts are rejected (the model's own) or mostly accepted (a script).

    Rows that are disowned and rows that stay pass rings that wrap, pending pairs, block edges and n-gram history.
    """
    policy = DraftPolicy(verification="coupled")
    plain, _ = loop.answer(sampling_of(loop, **values), 12, None)
    assert loop.answer(sampling_of(loop, **values), 6, policy)[0] == plain[:6]
    drafted, steps = loop.answer(sampling_of(loop, **values), 12, policy, [row.token_id for row in plain])
    assert drafted == plain[:12]
    assert steps < 8  # drafts were accepted, 12 steps would be the plain run


def test_standard_drafts_change_no_bit_at_temperature_0(loop: Loop) -> None:
    plain, _ = loop.answer(sampling_of(loop, temperature=0), 6, None)
    drafted, _ = loop.answer(sampling_of(loop, temperature=0), 6, DraftPolicy(capacity=64))
    assert drafted == plain


def test_standard_drafts_repeat_themselves(loop: Loop) -> None:
    first, _ = loop.answer(sampling_of(loop), 5, DraftPolicy(capacity=64))
    again, _ = loop.answer(sampling_of(loop), 5, DraftPolicy(capacity=64))
    assert first == again
