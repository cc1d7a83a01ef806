from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from deepinfer.sampling import RequestSampling, RowRequest, SampledRow, Sampler, SamplingParams, build_sampling_step
from deepinfer_cpu_ref.sampling import CpuRefSampling

VOCABULARY = 101
END = 100

MakeRow = Callable[..., RowRequest]
SampleRows = Callable[[torch.Tensor, Sequence[RowRequest]], list[SampledRow]]


@pytest.fixture
def make_row() -> MakeRow:
    """From parameters to a row: prompt, outputs, the model's end tokens and the vocabulary may be given."""

    def make(
        prompt: Sequence[int] = (1, 2, 3),
        outputs: Sequence[int] = (),
        vocabulary: int = VOCABULARY,
        end: Sequence[int] = (END,),
        **values: object,
    ) -> RowRequest:
        params = SamplingParams(**values)
        assert params.problems(vocabulary) == ()
        sampling = RequestSampling.create(
            params,
            seed=params.seed if params.seed is not None else 11,
            prompt_token_ids=prompt,
            end_token_ids=end,
            vocab_size=vocabulary,
        )
        return RowRequest(sampling, len(prompt) + len(outputs), outputs)

    return make


@pytest.fixture
def sample_rows() -> SampleRows:
    """Sample rows of given logits through the reference ops."""

    def sample(logits: torch.Tensor, rows: Sequence[RowRequest]) -> list[SampledRow]:
        step = build_sampling_step(rows, torch.device("cpu"))
        return Sampler(CpuRefSampling()).sample(logits.clone(), step).read()

    return sample
