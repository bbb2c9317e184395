"""Choosing tokens: what a request asks for, and the pipeline from logits to token ids."""

from penstock import kernels as _kernels  # the native library registers its operators
from penstock.sampling.beam_params import BeamSearchParams
from penstock.sampling.beams import BeamSearch, Continuation, Hypothesis, log_probabilities
from penstock.sampling.best_of import best_of
from penstock.sampling.constraint import Bits, Constraint, num_words
from penstock.sampling.logprobs import Logprob, TokenLogprobs, prompt_logprobs
from penstock.sampling.params import CUTS, SUGGESTED, SamplingParams
from penstock.sampling.pending import NO_TOKEN, Pending, Sampled
from penstock.sampling.pipeline import Sampler
from penstock.sampling.state import SequenceSampling
from penstock.sampling.structured import StructuredOutputs, StructuredOutputsParams

__all__ = [
    "CUTS",
    "NO_TOKEN",
    "SUGGESTED",
    "BeamSearch",
    "BeamSearchParams",
    "Bits",
    "Constraint",
    "Continuation",
    "Hypothesis",
    "Logprob",
    "Pending",
    "Sampled",
    "Sampler",
    "SamplingParams",
    "SequenceSampling",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "TokenLogprobs",
    "best_of",
    "log_probabilities",
    "num_words",
    "prompt_logprobs",
]

del _kernels
