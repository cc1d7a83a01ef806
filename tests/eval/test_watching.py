"""Watching: shares and loads are those of the ops that run, and what runs is what would run unwatched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from deepinfer.accelerator import AcceleratorDriver, OpOptions, StepLayout, WindowCache
from deepinfer.accelerator.ops.attention import AttentionOps
from deepinfer.accelerator.ops.experts import ExpertOps, RouterWeights
from deepinfer.engine.build import build_engine_on
from deepinfer.engine.draft_tally import ChanceRange
from deepinfer.engine.options import EngineOptions
from deepinfer.engine.outputs import RequestOutput
from deepinfer.eval import Internals, watched_llm
from deepinfer.eval.watching import ExpertLoad, WatchingDriver
from deepinfer.llm import LLM
from deepinfer.numerics import Float32Record
from deepinfer.sampling.params import SamplingParams
from deepinfer.settings import Settings
from deepinfer_cpu_ref import Driver as ReferenceDriver

WINDOW = 32  # of the packaged model
PROMPT = [5 + (7 * place) % 900 for place in range(100)]


def make(driver: AcceleratorDriver, **options: object) -> LLM:
    given = EngineOptions(**{"num_blocks": 16, "max_num_seqs": 4, "decode_graphs": False, **options})  # type: ignore[arg-type]
    return LLM.from_engine(build_engine_on(driver, None, given, Settings()))


def run(llm: LLM, prompts: Sequence[Sequence[int]] = (PROMPT,)) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    return llm.generate(list(prompts), params, use_tqdm=False)


def test_a_watched_run_is_the_run_unwatched() -> None:
    watching = WatchingDriver(ReferenceDriver())
    watched, plain = run(make(watching)), run(make(ReferenceDriver()))
    assert [each.outputs for each in watched] == [each.outputs for each in plain]
    shares = watching.attention()
    assert [each.layer for each in shares] == list(range(7))
    assert all(each.window + each.entries + each.sink == pytest.approx(1.0) for each in shares)
    assert [each.entries > 0 for each in shares] == [False, False, True, True, True, True, True]


def test_shares_do_not_depend_on_how_a_prompt_is_cut() -> None:
    # Keys of a chunk come from the step itself and from the ring, which must be read alike.
    found = []
    for budget in (2048, 17):
        watching = WatchingDriver(ReferenceDriver())
        make(watching, max_num_batched_tokens=budget, kv_cache_dtype="float32").logits(PROMPT)
        found.append(watching.attention())
    for whole, cut in zip(*found, strict=True):
        assert (cut.window, cut.entries, cut.sink) == pytest.approx((whole.window, whole.entries, whole.sink), abs=1e-4)


def test_without_the_long_range_path_only_the_reachable_tokens_matter() -> None:
    # Seven windows in a row reach 7 * 31 positions back; entries reach everything.
    reached = 7 * (WINDOW - 1)
    prompt = [5 + (7 * place) % 900 for place in range(reached + 40)]
    other = [prompt[0] + 1, *prompt[1:]]
    near = make(WatchingDriver(ReferenceDriver(), long_range=False))
    assert torch.equal(near.logits(prompt)[-1], near.logits(other)[-1])
    far = make(WatchingDriver(ReferenceDriver()))
    assert not torch.equal(far.logits(prompt)[-1], far.logits(other)[-1])


def test_the_load_counts_every_choice_of_a_valid_row() -> None:
    watching = WatchingDriver(ReferenceDriver())
    make(watching).logits(PROMPT)
    loads = watching.experts()
    assert [sum(each.rows) for each in loads] == [2 * len(PROMPT)] * 7
    assert all(len(each.rows) == 8 and each.busiest_to_mean >= 1 for each in loads)
    (step,) = watching.loads(7)
    assert step == [list(each.rows) for each in loads]
    assert ExpertLoad(0, (3, 1, 0, 0)).busiest_to_mean == 3.0
    assert ExpertLoad(0, (0, 0)).busiest_to_mean == 0.0


def test_shares_by_hand() -> None:
    """One row that sees two equal keys of its window, and a sink that weighs as much as both."""
    watching = WatchingDriver(ReferenceDriver())
    group = watching.op_groups(OpOptions(kv_cache_dtype="float32"))["attention"]
    if not isinstance(group, AttentionOps):
        raise TypeError
    record = Float32Record(64)
    own_Tb = record.encode(torch.zeros(2, 64))
    one = torch.tensor([0])
    step = StepLayout(
        "prefill", 8, 4, torch.tensor([0, 2]), one, one, one.view(1, 1), torch.zeros(2, dtype=torch.int64),
        torch.arange(2), one, torch.zeros(2, dtype=torch.bool), torch.tensor([False, True]), 2, 2,
    )  # fmt: skip
    window = WindowCache(torch.zeros(1, 4, record.nbytes, dtype=torch.uint8), record)
    sinks_H = torch.log(torch.tensor([2.0]))
    group.sparse(torch.ones(2, 1, 64), own_Tb, window, None, sinks_H, 4, step)
    (shares,) = watching.attention()
    assert (shares.window, shares.entries, shares.sink) == pytest.approx((0.5, 0.0, 0.5))


def test_a_padding_row_has_no_load() -> None:
    watching = WatchingDriver(ReferenceDriver())
    group = watching.op_groups(OpOptions())["experts"]
    if not isinstance(group, ExpertOps):
        raise TypeError
    router = RouterWeights(torch.eye(4, 64), torch.tensor([0.0, 9.0, 0.0, 0.0]), torch.zeros(4))
    none = torch.zeros(2, dtype=torch.bool)
    group.route(torch.ones(2, 64), router, none, torch.tensor([True, False]), 1, 1.0)
    assert watching.experts() == (ExpertLoad(0, (0, 1, 0, 0)),)


def test_the_calibration_error_weighs_each_range_by_its_drafts() -> None:
    ranges = (ChanceRange(10, 1.0, 3), ChanceRange(0, 0.0, 0), ChanceRange(30, 27.0, 30))
    assert Internals((), (), ranges, (), ()).calibration_error == pytest.approx((2 + 3) / 40)
    assert Internals((), (), (), (), ()).calibration_error == 0.0


def test_a_report_with_internals_is_written_whole(tmp_path: Path) -> None:
    from deepinfer.eval import EvalReport

    file = tmp_path / "report.json"
    internals = Internals((2,), (1,), (ChanceRange(2, 1.0, 1),), (), (ExpertLoad(0, (1, 2)),))
    EvalReport({}, (), internals).save(file)
    assert '"calibration_error": 0.0' in file.read_text(encoding="utf-8")


def test_what_an_engine_measures_at_its_start_is_not_watched() -> None:
    options = EngineOptions(num_blocks=16, max_num_seqs=2, num_speculative_tokens=3, variable_verification=True)
    _, watching = watched_llm(None, "cpu_ref", options, drafts=3)
    assert (watching.loads(7), watching.attention(), watching.experts()) == ([], (), ())
