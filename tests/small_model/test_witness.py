"""The trainer's forward pass is a second witness: its numbers are the engine's, and the golden file's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from deepinfer import LLM
from deepinfer.model import ModelConfig
from deepinfer.model.checkpoint import write_checkpoint
from tools.small_model.codecs import Codecs
from tools.small_model.configuration import compressed_ids
from tools.small_model.draft import Rounds, draft
from tools.small_model.mixing import balanced
from tools.small_model.model import SmallModel
from tools.small_model.parameters import random_weights, stack, value_of
from tools.small_model.run import Options

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
GATHERED = Options(dense_entries=0)


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "tiny8.safetensors")


@pytest.fixture(scope="module")
def tiny8() -> ModelConfig:
    return ModelConfig.from_file(GOLDEN / "tiny8.json")


@pytest.fixture(scope="module")
def golden_weights(golden: dict[str, Tensor], tiny8: ModelConfig) -> dict[str, Tensor]:
    return stack(tiny8, {name[2:]: tensor for name, tensor in golden.items() if name.startswith("w.")})


@pytest.mark.parametrize("options", [Options(), GATHERED])
@torch.no_grad()
def test_golden_logits_and_taps(
    golden: dict[str, Tensor], tiny8: ModelConfig, golden_weights: dict[str, Tensor], options: Options
) -> None:
    model = SmallModel(tiny8)
    passed = model.forward(golden_weights, golden["ids"].expand(2, -1), options)
    for row in range(2):
        logits = model.logits(passed.run, passed.hidden_BTD[row])
        torch.testing.assert_close(logits, golden["logits"], rtol=0, atol=2e-5)
        torch.testing.assert_close(passed.taps_BTA[row], golden["taps"], rtol=0, atol=2e-5)


@torch.no_grad()
def test_golden_logits_with_released_records(
    golden: dict[str, Tensor], tiny8: ModelConfig, golden_weights: dict[str, Tensor]
) -> None:
    model = SmallModel(tiny8)
    passed = model.forward(golden_weights, golden["ids"][None], Options(codecs=Codecs(records=True)))
    error = (model.logits(passed.run, passed.hidden_BTD[0]) - golden["logits_fakequant"]).abs()
    # A last-bit difference can flip one 4-bit code.
    assert (error < 1e-4).float().mean() >= 0.99
    assert error.max() < 1e-2


@torch.no_grad()
def test_golden_draft_round(golden: dict[str, Tensor], tiny8: ModelConfig, golden_weights: dict[str, Tensor]) -> None:
    model = SmallModel(tiny8)
    ids = torch.cat((golden["ids"], golden["draft_anchor"], golden["draft_tokens"]))[None]
    passed = model.forward(golden_weights, ids)
    drafted = draft(model, passed.run, passed.taps_BTA, ids, Rounds(torch.tensor([0]), torch.tensor([69])), 3)
    torch.testing.assert_close(drafted.logits_RnV[0], golden["draft_logits"], rtol=0, atol=2e-5)
    torch.testing.assert_close(drafted.confidence_Rn[0], golden["draft_confidence_logits"], rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def engine_logits(
    thin: ModelConfig, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[list[int]], Tensor]:
    directory = tmp_path_factory.mktemp("witness") / "thin"
    weights = random_weights(thin, 3)
    plain = replace(thin, quantization_config=None)
    write_checkpoint(plain, lambda parameter: value_of(parameter, weights), directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    llm = LLM(directory, "cpu_ref", kv_cache_dtype="float32")
    return llm.logits


@pytest.mark.parametrize("length", [1, 7, 8, 33, 101])
@torch.no_grad()
def test_the_engine_has_the_same_logits(
    engine_logits: Callable[[list[int]], Tensor], thin: ModelConfig, tokenizer: Tokenizer, length: int
) -> None:
    """Around window, pairs, picks and candidate blocks, with the token map of the real tokenizer."""
    model, weights = SmallModel(thin, compressed_ids(tokenizer, thin)), random_weights(thin, 3)
    ids = torch.randint(3, thin.vocab_size - 2, (length,), generator=torch.Generator().manual_seed(length))
    expected = engine_logits(ids.tolist())
    for options in (Options(), GATHERED):
        passed = model.forward(weights, ids[None], options)
        torch.testing.assert_close(model.logits(passed.run, passed.hidden_BTD[0]), expected, rtol=0, atol=1e-4)


def test_the_gradient_of_the_balanced_matrices_is_that_of_the_iteration() -> None:
    logits = torch.randn(4, 4, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
    pull = torch.randn(4, 4, 5, generator=torch.Generator().manual_seed(2))
    comb = torch.softmax(logits, 1) + 1e-6
    comb = comb / (comb.sum(0) + 1e-6)
    for _ in range(19):
        comb = comb / (comb.sum(1, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(0, keepdim=True) + 1e-6)
    found = balanced(logits, 20, 1e-6)
    torch.testing.assert_close(found, comb)
    (wanted,) = torch.autograd.grad((comb * pull).sum(), logits)
    (gradient,) = torch.autograd.grad((found * pull).sum(), logits)
    torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_without_the_long_range_path_nothing_beyond_the_windows_is_seen(thin: ModelConfig) -> None:
    model, weights = SmallModel(replace(thin, engram_compressed_vocab_size=thin.vocab_size)), random_weights(thin, 3)
    ids = torch.randint(3, 1000, (1, 120), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[0, 20:24] += 1
    reach = thin.num_hidden_layers * (thin.sliding_window - 1)
    for far, changed in ((True, True), (False, False)):
        options = Options(long_range=far)
        last, last_other = (model.forward(weights, each, options).hidden_BTD[0, 27 + reach :] for each in (ids, other))
        assert bool((last != last_other).any()) == changed
