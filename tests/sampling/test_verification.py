"""Verification of mixed batches: whose rows are whose, what ends a run, and what log-probabilities say.

A tape takes the place of a model: the logits behind a history are a function of the history alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.ops.drafting import DraftDistributions
from deepinfer.accelerator.ops.sampling import RowStatus
from deepinfer.errors import ArgumentError
from deepinfer.sampling import RowRequest, SampledRow, Sampler, build_sampling_step
from deepinfer.sampling.draft_pool import DraftPool, Drafts
from deepinfer.sampling.drafting import DraftDraws, DraftPolicy, cumulative_chances, draft_rows
from deepinfer.sampling.streams import Keying, original_stream, stream
from deepinfer.sampling.verification import RunRequest, VerifiedRun, Verifier, build_verification_step
from deepinfer_cpu_ref import Driver

MakeRow = Callable[..., RowRequest]

CPU = torch.device("cpu")
VOCABULARY = 101
PROMPT = (1, 2, 3)
GROUPS = Driver().op_groups(OpOptions())
SAMPLING, DRAFTING = GROUPS["sampling"], GROUPS["drafting"]
STANDARD, COUPLED = DraftPolicy(capacity=64), DraftPolicy(verification="coupled")


def tape(history: Sequence[int], kind: int = 0, scale: float = 3.0) -> Tensor:
    """Return the logits [V] behind a history; the draft model's (kind 1) are the target's with noise."""
    seed = hash((tuple(history), 12345)) % 2**31
    logits_V = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * scale
    if kind:
        logits_V = logits_V + torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed + 1)) * 0.7
    return logits_V


def drafted(row: RowRequest, drafts: int, policy: DraftPolicy) -> Drafts:
    """Draft behind a row's history, as a draft model would."""
    draws = DraftDraws(DRAFTING, policy, build_sampling_step([row], CPU, keying=policy.keying).rows)
    history = [*PROMPT, *row.output_token_ids]
    for draft in range(drafts):
        history.append(int(draws(draft, tape(history, 1)[None])))
    tokens_Rn = torch.tensor([history[len(history) - drafts :]], dtype=torch.int64).view(1, drafts)
    none_RnK = torch.zeros(1, drafts, 0, dtype=torch.int64)
    kept = draws.distributions() or DraftDistributions(none_RnK, none_RnK, none_RnK.sum(-1))
    return Drafts(tokens_Rn, kept, torch.ones(1, drafts))


def joined(each: Sequence[Drafts], most: int) -> Drafts:
    """Put the drafts of several requests side by side; who has fewer has placeholders."""
    kept = max((drafts.distributions.ids_RnK.shape[2] for drafts in each), default=0)

    def padded(tensor: Tensor, fill: int = 0) -> Tensor:
        missing = [0, kept - tensor.shape[2]] if tensor.dim() == 3 else []
        return torch.nn.functional.pad(tensor, [*missing, 0, most - tensor.shape[1]], value=fill)

    return Drafts(
        torch.cat([padded(drafts.token_ids_Rn, -1) for drafts in each]),
        DraftDistributions(
            torch.cat([padded(drafts.distributions.ids_RnK, -1) for drafts in each]),
            torch.cat([padded(drafts.distributions.weights_RnK) for drafts in each]),
            torch.cat([padded(drafts.distributions.sums_Rn) for drafts in each]),
        ),
        torch.cat([padded(drafts.chances_Rn) for drafts in each]),
    )


def verified(
    rows: Sequence[RowRequest], drafts: Drafts, counts: Sequence[int], policy: DraftPolicy, keying: Keying | None = None
) -> list[VerifiedRun]:
    """Verify the first ``counts`` drafts of each request against the tape."""
    requests, logits = [], []
    for row, count, tokens in zip(rows, counts, drafts.token_ids_Rn.tolist(), strict=True):
        history = [*PROMPT, *row.output_token_ids]
        requests.append(RunRequest(row.sampling, row.token_index, row.output_token_ids, tokens[:count]))
        logits += [tape([*history, *tokens[:place]]) for place in range(count + 1)]
    step = build_verification_step(requests, CPU, keying=keying or policy.keying)
    return Verifier(SAMPLING, DRAFTING, policy).verify(torch.stack(logits), step, drafts).read()


def answer(make_row: MakeRow, length: int, drafts: int, policy: DraftPolicy, **values: object) -> list[SampledRow]:
    """Return the first tokens of a request, drafted and verified step by step; 0 drafts is the plain sampler."""
    found: list[SampledRow] = []
    while len(found) < length:
        row = make_row(prompt=PROMPT, outputs=[each.token_id for each in found], **values)
        if drafts:
            (run,) = verified([row], drafted(row, drafts, policy), [drafts], policy)
            found += run.rows
        else:
            step = build_sampling_step([row], CPU)
            logits_1V = tape([*PROMPT, *row.output_token_ids])[None]
            found += Sampler(SAMPLING).sample(logits_1V, step).read()
    return found[:length]


SETTINGS: list[dict[str, object]] = [
    {"seed": 1, "logprobs": 3},
    {"temperature": 0, "logprobs": 2},
    {"seed": 2, "top_p": 0.8, "logprobs": 5, "raw_logprobs": True},
    {"seed": 3, "top_k": 6, "temperature": 1.4, "logprobs": 0},
    {"seed": 4, "presence_penalty": 1.2, "frequency_penalty": 0.4, "repetition_penalty": 1.3, "logprobs": 4},
    {"seed": 5, "min_tokens": 6, "stop_token_ids": [5, 6, 7], "first_n_token_no_eos": 9, "logprobs": 1},
    {"seed": 6, "golden_token_ids": [9, -1, 55, -1, -1, 3], "logprobs": 2},
    {"seed": 7, "allowed_token_ids": [10, 20, 30, 40], "logit_bias": {20: 2.0}, "logprobs": 4},
]


@pytest.mark.parametrize("values", SETTINGS, ids=lambda values: ",".join(values))
def test_coupled_tokens_and_log_probabilities_do_not_depend_on_drafts(
    make_row: MakeRow, values: dict[str, object]
) -> None:
    plain = answer(make_row, 9, 0, COUPLED, **values)
    for drafts in (2, 5):
        assert answer(make_row, 9, drafts, COUPLED, **values) == plain


@pytest.mark.parametrize("values", [SETTINGS[1], {**SETTINGS[4], "temperature": 0}], ids=["plain", "penalties"])
def test_greedy_answers_are_those_without_drafts_in_both_modes(make_row: MakeRow, values: dict[str, object]) -> None:
    plain = answer(make_row, 9, 0, STANDARD, **values)
    for drafts in (2, 5):
        assert answer(make_row, 9, drafts, STANDARD, **values) == plain


@pytest.mark.parametrize("values", SETTINGS, ids=lambda values: ",".join(values))
def test_log_probabilities_of_a_run_are_those_of_the_same_history_without_drafts(
    make_row: MakeRow, values: dict[str, object]
) -> None:
    found = answer(make_row, 9, 3, STANDARD, **values)
    tokens = [row.token_id for row in found]
    for place, row in enumerate(found):
        # Force the same token on the plain sampler, behind the same history.
        again = make_row(prompt=PROMPT, outputs=tokens[:place], **{**values, "golden_token_ids": tokens})
        step = build_sampling_step([again], CPU)
        (plain,) = Sampler(SAMPLING).sample(tape([*PROMPT, *tokens[:place]])[None], step).read()
        assert row == plain


def test_the_same_seed_repeats_a_standard_answer(make_row: MakeRow) -> None:
    first = answer(make_row, 12, 3, STANDARD, seed=9)
    assert first == answer(make_row, 12, 3, STANDARD, seed=9)
    assert first != answer(make_row, 12, 3, STANDARD, seed=10)


def mixed(make_row: MakeRow) -> list[RowRequest]:
    return [
        make_row(prompt=PROMPT, outputs=[4], seed=1, temperature=0.7, logprobs=2),
        make_row(prompt=PROMPT, outputs=[5, 6], seed=2, top_k=4, logprobs=3),
        make_row(prompt=PROMPT, outputs=[], temperature=0, logprobs=1),
        make_row(prompt=PROMPT, outputs=[7, 8, 9], seed=4, top_p=0.6, temperature=1.6, presence_penalty=1.0),
    ]


@pytest.mark.parametrize("policy", [STANDARD, COUPLED], ids=["standard", "coupled"])
def test_mixed_draft_counts_equal_solo_runs_in_every_order(make_row: MakeRow, policy: DraftPolicy) -> None:
    """Four requests with 0 to 3 drafts and four sets of settings, in all 24 orders."""
    rows, counts = mixed(make_row), [0, 1, 2, 3]
    drafts = [drafted(row, max(count, 1), policy) for row, count in zip(rows, counts, strict=True)]
    alone = [verified([rows[n]], drafts[n], [counts[n]], policy)[0] for n in range(4)]
    for order in itertools.permutations(range(4)):
        together = verified(
            [rows[n] for n in order], joined([drafts[n] for n in order], 3), [counts[n] for n in order], policy
        )
        assert together == [alone[n] for n in order]


@pytest.mark.parametrize("policy", [STANDARD, COUPLED], ids=["standard", "coupled"])
def test_a_placeholder_yields_one_token_of_the_targets_own(make_row: MakeRow, policy: DraftPolicy) -> None:
    """Also where -1 would name the last entry, and where the target all but wants the drafts behind it."""
    row = make_row(prompt=PROMPT, outputs=[4], seed=3)
    plain = verified([row], drafted(row, 3, policy), [0], policy)[0]
    for tokens in ([-1, -1, -1], [-1, plain.token_ids[0], 5], [-1, VOCABULARY - 1, 0]):
        drafts = drafted(row, 3, policy)
        drafts = Drafts(torch.tensor([tokens]), drafts.distributions, drafts.chances_Rn)
        requests = [RunRequest(row.sampling, row.token_index, row.output_token_ids, [0, 0, 0])]
        logits_BV = torch.stack([tape([*PROMPT, 4]), *[torch.full((VOCABULARY,), math.nan)] * 3])
        step = build_verification_step(requests, CPU)
        (run,) = Verifier(SAMPLING, DRAFTING, policy).verify(logits_BV, step, drafts).read()
        assert run == plain
        assert run.accepted == 0


@pytest.mark.parametrize("policy", [STANDARD, COUPLED], ids=["standard", "coupled"])
def test_what_lies_behind_a_runs_end_has_no_say(make_row: MakeRow, policy: DraftPolicy) -> None:
    """Rows behind the first rejected draft may be NaN or empty: they are never emitted."""
    row = make_row(prompt=PROMPT, outputs=[4], temperature=0, logprobs=1)
    best = int(tape([*PROMPT, 4]).argmax())
    wrong = (best + 1) % VOCABULARY
    certain = DraftDistributions(
        torch.tensor([[[wrong], [0]]]), torch.full((1, 2, 1), 2**31), torch.full((1, 2), 2**31)
    )
    drafts = Drafts(torch.tensor([[wrong, 0]]), certain, torch.ones(1, 2))
    logits_BV = torch.stack(
        [tape([*PROMPT, 4]), torch.full((VOCABULARY,), math.nan), torch.full((VOCABULARY,), -math.inf)]
    )
    step = build_verification_step([RunRequest(row.sampling, row.token_index, [4], [wrong, 0])], CPU)
    (run,) = Verifier(SAMPLING, DRAFTING, policy).verify(logits_BV, step, drafts).read()
    assert run.token_ids == (best,)
    assert [each.status for each in run.rows] == [RowStatus.OK]


@pytest.mark.parametrize("policy", [STANDARD, COUPLED], ids=["standard", "coupled"])
@pytest.mark.parametrize(("fill", "status"), [(math.nan, RowStatus.NAN), (-math.inf, RowStatus.EMPTY)])
def test_a_broken_row_ends_the_run_behind_the_accepted_drafts(
    make_row: MakeRow, policy: DraftPolicy, fill: float, status: RowStatus
) -> None:
    row = make_row(prompt=PROMPT, outputs=[4], temperature=0, logprobs=1)
    best = int(tape([*PROMPT, 4]).argmax())
    certain = DraftDistributions(torch.tensor([[[best], [0]]]), torch.full((1, 2, 1), 2**31), torch.full((1, 2), 2**31))
    drafts = Drafts(torch.tensor([[best, 0]]), certain, torch.ones(1, 2))
    logits_BV = torch.stack([tape([*PROMPT, 4]), torch.full((VOCABULARY,), fill), tape([1])])
    step = build_verification_step([RunRequest(row.sampling, row.token_index, [4], [best, 0])], CPU)
    (run,) = Verifier(SAMPLING, DRAFTING, policy).verify(logits_BV, step, drafts).read()
    assert run.token_ids == (best,)
    assert run.accepted == 1
    assert [(each.token_id, each.status) for each in run.rows] == [(best, RowStatus.OK), (-1, status)]


def test_penalties_of_rejected_drafts_are_forgotten(make_row: MakeRow) -> None:
    """The counts of a request are cached; a draft that was counted and rejected must not stay in them."""
    row = make_row(prompt=PROMPT, outputs=[4], frequency_penalty=2.0)
    seen = row.sampling.seen
    assert dict(zip(*seen.columns([4], [7, 7])[:3:2], strict=True)) == {4: 2.0, 7: 4.0}
    assert dict(zip(*seen.columns([4, 8, 9])[:3:2], strict=True)) == {4: 2.0, 8: 2.0, 9: 2.0}


def test_streams_are_those_of_the_true_index_or_of_the_original(make_row: MakeRow) -> None:
    row = make_row(prompt=PROMPT, outputs=[4, 5], seed=7)
    request = [RunRequest(row.sampling, row.token_index, row.output_token_ids, [1, 2])]
    ours = build_verification_step(request, CPU)
    indices = [5, 6, 7]
    assert ours.sampling.rows.streams_B.tolist() == [stream(index) for index in indices]
    assert ours.resample_streams_B.tolist() == [4 * index + 1 for index in indices]
    assert ours.accept_streams_B.tolist() == [4 * index + 2 for index in indices]
    theirs = build_verification_step(request, CPU, keying=Keying.ORIGINAL)
    positions = [5, 5 + 10_000_019, 5 + 20_000_038]
    assert theirs.sampling.rows.streams_B.tolist() == [original_stream(position) for position in positions]
    assert theirs.resample_streams_B.tolist() == [3 * position + 1 for position in positions]
    assert theirs.accept_streams_B.tolist() == [3 * position + 2 for position in positions]

    rows = build_sampling_step([row], CPU).rows
    assert draft_rows(rows, 2, STANDARD).streams_B.tolist() == [4 * 7 + 3]
    assert draft_rows(rows, 2, COUPLED).streams_B.tolist() == [4 * 7]
    original = draft_rows(
        build_sampling_step([row], CPU, keying=Keying.ORIGINAL).rows, 2, DraftPolicy(keying=Keying.ORIGINAL)
    )
    assert original.streams_B.tolist() == [3 * 7]
    assert original.seeds_B.tolist() == [7 + 1_000_000_007]


def test_a_policy_that_cannot_be_is_refused_with_every_reason() -> None:
    with pytest.raises(ArgumentError) as caught:
        DraftPolicy(verification="greedy", capacity=0, reach=1.5)  # type: ignore[arg-type]
    assert len(caught.value.problems) == 3
    with pytest.raises(ArgumentError, match=r"coupling needs Keying\.INDEX"):
        DraftPolicy(verification="coupled", keying=Keying.ORIGINAL)


def test_chances_are_cumulative_and_calibrated() -> None:
    logits_Rn = torch.tensor([[0.0, math.log(3.0)], [200.0, -200.0]])
    torch.testing.assert_close(cumulative_chances(logits_Rn), torch.tensor([[0.5, 0.375], [1.0, 0.0]]))
    halved = cumulative_chances(logits_Rn, torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(halved[0, 1], torch.tensor(0.5 * (1 / (1 + 3**-0.5))))


# --- the pool ----------------------------------------------------------------------------------------------------


def pool_of(slots: int = 5, drafts: int = 3, kept: int = 4) -> DraftPool:
    return DraftPool(num_slots=slots, drafts=drafts, kept_tokens=kept, device=CPU)


def some_drafts(requests: int, drafts: int = 3, kept: int = 4, offset: int = 0) -> Drafts:
    ids_RnK = (torch.arange(requests * drafts * kept).view(requests, drafts, kept) + offset) % VOCABULARY
    weights_RnK = ids_RnK + 2**31 - 200
    return Drafts(
        ids_RnK[:, :, 0], DraftDistributions(ids_RnK, weights_RnK, weights_RnK.sum(-1)), torch.rand(requests, drafts)
    )


def same(left: Drafts, right: Drafts) -> bool:
    pairs = (
        (left.token_ids_Rn, right.token_ids_Rn),
        (left.distributions.ids_RnK, right.distributions.ids_RnK),
        (left.distributions.weights_RnK, right.distributions.weights_RnK),
        (left.distributions.sums_Rn, right.distributions.sums_Rn),
        (left.chances_Rn, right.chances_Rn),
    )
    return all(torch.equal(one, other) for one, other in pairs)


def test_the_pool_gives_back_what_was_stored_in_any_order() -> None:
    pool, drafts = pool_of(), some_drafts(3)
    slots_R = torch.tensor([4, 1, 2])
    pool.store(slots_R, drafts.token_ids_Rn, drafts.chances_Rn, drafts.distributions)
    assert same(pool.gather(slots_R), drafts)
    assert pool.gather(torch.tensor([2])).token_ids_Rn.tolist() == drafts.token_ids_Rn[2:].tolist()
    assert pool.gather(torch.tensor([3])).usable().tolist() == [0]


def test_slot_0_always_holds_placeholders() -> None:
    pool, drafts = pool_of(), some_drafts(2)
    pool.store(torch.tensor([0, 3]), drafts.token_ids_Rn, drafts.chances_Rn, drafts.distributions)
    nobody = pool.gather(torch.tensor([0]))
    assert nobody.token_ids_Rn.tolist() == [[-1, -1, -1]]
    assert nobody.chances_Rn.tolist() == [[0.0, 0.0, 0.0]]
    assert nobody.input_ids().tolist() == [[0, 0, 0]]
    assert int(nobody.distributions.sums_Rn.sum()) == 0


def test_a_cleared_slot_holds_nothing_of_its_last_owner() -> None:
    pool, fresh, drafts = pool_of(), pool_of(), some_drafts(2)
    pool.store(torch.tensor([1, 2]), drafts.token_ids_Rn, drafts.chances_Rn, drafts.distributions)
    pool.clear(torch.tensor([1, 2]))
    everything = torch.arange(5)
    assert same(pool.gather(everything), fresh.gather(everything))


def test_only_drafts_before_the_first_placeholder_are_usable_or_embedded() -> None:
    pool, drafts = pool_of(), some_drafts(1, offset=7)
    tokens = torch.tensor([[7, -1, 15]])
    pool.store(torch.tensor([1]), tokens, torch.full((1, 3), 0.5), drafts.distributions)
    found = pool.gather(torch.tensor([1]))
    assert found.usable().tolist() == [1]
    assert found.input_ids().tolist() == [[7, 0, 0]]
    assert found.chances_Rn.tolist() == [[0.5, 0.0, 0.5]]


def test_the_pool_is_small_and_smaller_still_where_no_distribution_is_kept() -> None:
    """256 requests, five drafts: 15 MiB instead of the 630 MiB of whole float32 rows."""
    assert DraftPool(num_slots=256, drafts=5, kept_tokens=1024, device=CPU).nbytes < 16 * 2**20
    assert DraftPool(num_slots=256, drafts=5, kept_tokens=0, device=CPU).nbytes < 64 * 2**10
    with pytest.raises(ArgumentError):
        DraftPool(num_slots=0, drafts=-1, kept_tokens=1, device=CPU)


def test_a_coupled_round_stores_no_distribution(make_row: MakeRow) -> None:
    drafts = drafted(make_row(prompt=PROMPT, seed=1), 3, COUPLED)
    pool = DraftPool(num_slots=2, drafts=3, kept_tokens=COUPLED.kept_tokens, device=CPU)
    pool.store(torch.tensor([1]), drafts.token_ids_Rn, drafts.chances_Rn, None)
    assert pool.gather(torch.tensor([1])).token_ids_Rn.tolist() == drafts.token_ids_Rn.tolist()
