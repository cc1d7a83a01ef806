"""Sampling: what a request may ask, its random streams, the rows of a step, log-probabilities."""

from deepinfer.sampling.grammar import StructuredOutputs
from deepinfer.sampling.limits import SamplingLimits
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.prompt import PromptLogProbabilities
from deepinfer.sampling.request import RequestSampling
from deepinfer.sampling.rows import RowRequest, SamplingStep, build_sampling_step
from deepinfer.sampling.sampler import SampledRow, SampledStep, Sampler
from deepinfer.sampling.streams import DrawCase, Keying, original_stream, random_seed, sibling_seed, stream

__all__ = [
    "DrawCase",
    "Keying",
    "PromptLogProbabilities",
    "RequestSampling",
    "RowRequest",
    "SampledRow",
    "SampledStep",
    "Sampler",
    "SamplingLimits",
    "SamplingParams",
    "SamplingStep",
    "StructuredOutputs",
    "build_sampling_step",
    "original_stream",
    "random_seed",
    "sibling_seed",
    "stream",
]
