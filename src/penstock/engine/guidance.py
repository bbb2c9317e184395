"""Classifier-free guidance: what a negative prompt would say, turned around.

A guided sample is two sequences: its own, and a shadow that follows the negative prompt with the
same output. Both are computed in the same steps, and the sample's next token is drawn from

    log p = log p_shadow + scale · (log p_own - log p_shadow)

Above 1 the scale moves away from the negative prompt; 1 is the sample's own distribution, for which
no shadow is made. The two share cached blocks as any sequences do.
Source: Sanchez et al. 2023, arXiv:2306.17806.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from penstock.engine.intake import Intake
from penstock.engine.outputs import RequestMetrics
from penstock.engine.request import Request, Sequence, Status
from penstock.sampling import SamplingParams
from penstock.sampling.samplers.rows import log_softmax


def add_shadow(request: Request, negative: list[int], intake: Intake) -> Request:
    """A request whose sequences are those of `request` after another prompt, each its mate."""
    params = request.params
    shadow = Request(
        request_id=request.request_id,
        prompt=None,
        prompt_token_ids=negative,
        params=SamplingParams(n=params.n, max_tokens=params.max_tokens, detokenize=False),
        arrival=request.arrival + 1,
        stream=False,
        metrics=RequestMetrics(request.metrics.arrival_time),
        options=request.options,
        live=params.n,
        guides=request,
    )
    shadow.sequences = [intake.sequence(shadow, i, 0) for i in range(params.n)]
    for own, other in zip(request.sequences, shadow.sequences, strict=True):
        own.shadow = other
        own.mates = other.mates = [own, other]
    return shadow


def guided(sampled: Seq[Sequence], drawn: Seq[int], logits: Tensor) -> Tensor:
    """The logits [R, V] that tokens are drawn from: shadows have gone into theirs.

    logits [S, V] float32 belong to `sampled`, in their order; drawn: which of them are drawn from.
    """
    place = {sequence: row for row, sequence in enumerate(sampled)}
    found = logits[drawn]
    for row, at in enumerate(drawn):
        sequence = sampled[at]
        if sequence.shadow is None:
            continue
        scale = sequence.request.params.guidance_scale
        beside = place[sequence.shadow]
        base = log_softmax(logits[beside : beside + 1])[0]
        own = log_softmax(found[row : row + 1])[0]
        lacking = own.isneginf() | base.isneginf()  # of a reduced vocabulary
        found[row] = (base + scale * (own - base)).masked_fill_(lacking, -torch.inf)
    return found


def follow(sequence: Sequence) -> None:
    """Let a sample's shadow have the tokens that the sample was given."""
    shadow = sequence.shadow
    if shadow is not None and shadow.status is Status.RUNNING:
        shadow.tokens += sequence.tokens[sequence.num_prompt + shadow.num_output :]
