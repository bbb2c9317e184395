"""Choosing tokens: what a request asks for, and the pipeline from logits to token ids."""

from penstock import kernels as _kernels  # the native library registers its operators
from penstock.sampling.constraint import Bits, Constraint, num_words
from penstock.sampling.logprobs import Logprob, TokenLogprobs, prompt_logprobs
from penstock.sampling.params import CUTS, SUGGESTED, SamplingParams
from penstock.sampling.pipeline import NO_TOKEN, Sampled, Sampler
from penstock.sampling.state import SequenceSampling
from penstock.sampling.structured import StructuredOutputs

__all__ = [
    "CUTS",
    "NO_TOKEN",
    "SUGGESTED",
    "Bits",
    "Constraint",
    "Logprob",
    "Sampled",
    "Sampler",
    "SamplingParams",
    "SequenceSampling",
    "StructuredOutputs",
    "TokenLogprobs",
    "num_words",
    "prompt_logprobs",
]

del _kernels
