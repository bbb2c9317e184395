"""Whether the numbers of a config can be computed with, in float32 and with positions of int32."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from penstock.errors import UnsupportedModelError
from penstock.models.spec import ModelSpec
from penstock.nn.rope import inverse_frequencies
from penstock.nn.spec import DecoderSpec, RopeSpec

MOST_POSITIONS = 1 << 31
"""Of any sequence: positions are int32."""

_MOST = 1 << 40
"""Of any other size."""
_MOST_TURNING = 1 << 16
"""Dimensions of a head that turn."""


def check_rope(rope: RopeSpec) -> None:
    """Raises ValueError for a rotation whose angles or factor no float32 holds, with the reason."""
    if rope.rotary_dim > _MOST_TURNING:
        raise ValueError(f"it turns {rope.rotary_dim} dimensions of a head, beyond {_MOST_TURNING}")
    if rope.factor > MOST_POSITIONS:
        raise ValueError(f"its factor of {rope.factor} is beyond any sequence")
    try:
        for length in (1, MOST_POSITIONS):  # longrope has factors for each
            with np.errstate(all="ignore"):
                inverse, factor = inverse_frequencies(rope, length)
                widest = np.append(inverse * MOST_POSITIONS, factor).astype(np.float32)
            if not np.isfinite(widest).all():
                raise ValueError("they aren't finite")
    except ArithmeticError as error:
        raise ValueError(str(error)) from error


def check_spec(spec: ModelSpec, where: str) -> None:
    """Raises UnsupportedModelError for numbers of `where` that no model can be run with."""
    decoder = spec.decoder
    most = {"positions": (decoder.max_position, MOST_POSITIONS)}
    most |= {name: (size, _MOST) for name, size in _sizes(decoder)}
    for name, (size, limit) in most.items():
        if size > limit:
            shown = f"{size:,}" if size < limit**2 else f"a number of {size.bit_length()} bits"
            raise UnsupportedModelError(
                f"{where}: its {name} are {shown}, beyond {limit:,}. The file is damaged, or of "
                "something else."
            )
    if spec.pictures is not None:
        for token in (spec.pictures.token_id, *(spec.pictures.marks or ())):
            if not 0 <= token < decoder.vocab_size:
                raise UnsupportedModelError(
                    f"{where}: token {token:,} stands for pictures in prompts, and its vocabulary "
                    f"has {decoder.vocab_size:,} tokens. One of them is another model's."
                )
    limits = torch.finfo(torch.float32)
    for name, value in _factors(decoder):
        if isinstance(value, complex) or not limits.tiny <= value <= limits.max:
            raise UnsupportedModelError(
                f"{where}: its {name} is {value}, which isn't above 0 as a float32. The file is "
                "damaged, or of something else."
            )
    ropes = {layer.attention.rope for layer in decoder.layers}
    for rope in (rope for rope in ropes if rope is not None):
        try:
            check_rope(rope)
        except ValueError as error:
            raise UnsupportedModelError(
                f"{where}: positions can't be rotated by its rope_theta={rope.theta} and rope "
                f"parameters of type {rope.kind!r}: {error}."
            ) from error


def _sizes(decoder: DecoderSpec) -> Iterator[tuple[str, int]]:
    yield "tokens of the vocabulary", decoder.vocab_size
    yield "values of a hidden state", decoder.hidden
    for layer in set(decoder.layers):
        yield "heads", layer.attention.num_heads
        yield "values of a head", layer.attention.head_dim
        yield "values of a latent", layer.attention.cached[1]
        yield "values of all heads", layer.attention.out_dim
        yield "values of a state", math.prod((layer.attention.state_shapes or ((),))[0])
        if layer.attention.latent is not None:
            yield "values of compressed queries", layer.attention.latent.query_rank
        if layer.mlp.experts is not None:
            yield "values between the matrices of shared experts", layer.mlp.experts.shared
        yield "values between up and down", layer.mlp.intermediate
        yield "tokens of a window", layer.attention.window


def _factors(decoder: DecoderSpec) -> Iterator[tuple[str, float]]:
    """What must be above 0 and finite; a cap of 0 is none."""
    yield "norm's epsilon", decoder.norm.eps
    yield "embedding's scale", decoder.embed_scale
    yield "scale of logits", decoder.logit_scale
    yield "cap of logits", decoder.final_softcap or 1.0
    for layer in set(decoder.layers):
        yield "scale of attention scores", layer.attention.scale
        yield "cap of attention scores", layer.attention.softcap or 1.0
        if layer.mlp.experts is not None:
            yield "scale of experts' weights", layer.mlp.experts.scale
