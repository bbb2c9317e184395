"""Choosing tokens: what a request asks for, and the pipeline from logits to token ids."""

from penstock import kernels as _kernels  # the native library registers its operators
from penstock.sampling.logprobs import Logprob, TokenLogprobs, prompt_logprobs
from penstock.sampling.params import CUTS, SUGGESTED, SamplingParams
from penstock.sampling.pipeline import NO_TOKEN, Sampled, Sampler
from penstock.sampling.state import SequenceSampling

__all__ = [
    "CUTS",
    "NO_TOKEN",
    "SUGGESTED",
    "Logprob",
    "Sampled",
    "Sampler",
    "SamplingParams",
    "SequenceSampling",
    "TokenLogprobs",
    "prompt_logprobs",
]

del _kernels
