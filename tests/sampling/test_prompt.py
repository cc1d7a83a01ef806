"""Prompt log-probabilities: every split gives the same list, and vocabulary x prompt never exists."""

from __future__ import annotations

import pytest
import torch

from deepinfer.errors import InvariantError
from deepinfer.sampling import PromptLogProbabilities
from deepinfer.sampling.prompt import ROWS_PER_PIECE
from deepinfer_cpu_ref.sampling import CpuRefSampling

OPS = CpuRefSampling()
VOCABULARY = 37
WIDTH = 8
HEAD = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(0))


def project(hidden_TD: torch.Tensor) -> torch.Tensor:
    # One row at a time, so that this test's own product cannot depend on the split.
    return torch.stack([(HEAD * row).sum(-1) for row in hidden_TD])


def hidden(length: int) -> torch.Tensor:
    return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(length))


def prompt(length: int) -> list[int]:
    return [(7 * place + length) % VOCABULARY for place in range(length)]


def run(length: int, chunk: int, count: int = 2) -> PromptLogProbabilities:
    gathered = PromptLogProbabilities(prompt(length), count)
    hidden_TD = hidden(length)
    for start in range(0, length, chunk):
        wanted = gathered.wanted(start, min(chunk, length - start))
        gathered.record(wanted, hidden_TD[wanted.start : wanted.stop], project, OPS)
    return gathered


@pytest.mark.parametrize("length", range(1, 21))
def test_every_split_gives_one_entry_per_position_and_the_first_is_empty(length: int) -> None:
    whole = run(length, length)
    assert len(whole.entries()) == length
    assert whole.entries()[0] is None
    assert whole.is_complete
    exact = project(hidden(length)).double().log_softmax(-1)
    for place, entry in enumerate(whole.entries()[1:], 1):
        assert entry is not None
        best = int(exact[place - 1].argmax())
        assert set(entry) >= {best, prompt(length)[place]}
        for token_id, value in entry.items():
            assert value == pytest.approx(float(exact[place - 1, token_id]), abs=1e-5)
    for chunk in range(1, 21):
        assert run(length, chunk).entries() == whole.entries()


def test_a_chunk_that_is_computed_again_adds_nothing() -> None:
    gathered = PromptLogProbabilities(prompt(10), 1)
    hidden_TD = hidden(10)
    first = gathered.wanted(0, 6)
    gathered.record(first, hidden_TD[0:6], project, OPS)
    assert list(gathered.wanted(0, 4)) == []
    again = gathered.wanted(0, 10)
    assert again == range(6, 9)
    gathered.record(again, hidden_TD[6:9], project, OPS)
    assert gathered.entries() == run(10, 10, count=1).entries()
    # Recomputing a preempted request covers its outputs too: nothing about them belongs to the prompt.
    assert list(gathered.wanted(0, 15)) == []
    assert list(gathered.wanted(9, 3)) == []


def test_a_gap_is_an_error_and_not_a_shift() -> None:
    gathered = PromptLogProbabilities(prompt(10), 1)
    with pytest.raises(InvariantError, match="position 0"):
        gathered.record(range(2, 4), hidden(2), project, OPS)
    with pytest.raises(InvariantError, match="3 rows"):
        gathered.record(range(2), hidden(3), project, OPS)


def test_logits_are_projected_in_pieces() -> None:
    length = 3 * ROWS_PER_PIECE + 5
    sizes: list[int] = []

    def watched(hidden_TD: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden_TD))
        return project(hidden_TD)

    gathered = PromptLogProbabilities(prompt(length), 0)
    gathered.record(gathered.wanted(0, length), hidden(length)[:-1], watched, OPS)
    assert max(sizes) == ROWS_PER_PIECE
    assert sum(sizes) == length - 1
    assert gathered.is_complete


def test_a_count_of_zero_lists_the_prompts_own_tokens() -> None:
    entries = run(6, 6, count=0).entries()
    assert [list(entry) for entry in entries if entry is not None] == [[token_id] for token_id in prompt(6)[1:]]


def test_a_row_with_nan_has_no_entry_and_its_neighbours_keep_theirs() -> None:
    listed = PromptLogProbabilities([4, 2, 3, 1], 1)
    logits_TV = torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, float("nan"), 2.0, 3.0], [float("-inf"), 0.0, 2.0, 3.0]])
    listed.record(range(3), torch.zeros(3, 8), lambda hidden_TD: logits_TV[: len(hidden_TD)], CpuRefSampling())
    first, second, third, fourth = listed.entries()
    assert first is None
    assert second is not None
    assert set(second) == {2, 3}
    assert third is None
    assert fourth is not None
    assert set(fourth) == {1, 3}
