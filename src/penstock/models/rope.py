"""Reading rotary embeddings from configs; `nn.rope` has the formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from penstock.errors import UnsupportedModelError
from penstock.models.config_reader import ConfigReader
from penstock.nn.spec import RopeSpec


def _plain(spec: RopeSpec, scaling: ConfigReader, _: float) -> RopeSpec:
    scaling.only("factor", (1,), 1)
    return replace(spec, original_max_position=0)


def _dynamic(spec: RopeSpec, scaling: ConfigReader, _: float) -> RopeSpec:
    """No scaling up to max_position_embeddings, beyond which nothing goes here."""
    _factor(scaling)
    return replace(spec, original_max_position=0)


def _linear(spec: RopeSpec, scaling: ConfigReader, _: float) -> RopeSpec:
    return replace(spec, kind="linear", factor=_factor(scaling), original_max_position=0)


def _proportional(spec: RopeSpec, scaling: ConfigReader, _: float) -> RopeSpec:
    """Angles of a whole head, of which only the fast ones move."""
    return replace(spec, kind="proportional", factor=_factor(scaling, 1.0), original_max_position=0)


def _llama3(spec: RopeSpec, scaling: ConfigReader, _: float) -> RopeSpec:
    return replace(
        spec,
        kind="llama3",
        factor=_factor(scaling),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
    )


def _yarn(spec: RopeSpec, scaling: ConfigReader, ratio: float) -> RopeSpec:
    factor = _factor(scaling, ratio)
    cos_factor = scaling.number("attention_factor", 0.0) or None
    mscale, all_dim = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    if cos_factor is None and mscale and all_dim:
        stretch = 0.1 * math.log(max(factor, 1.0))
        below = stretch * all_dim + 1.0
        if below == 0:
            raise UnsupportedModelError(f"rope: mscale_all_dim {all_dim} divides by 0.")
        cos_factor = (stretch * mscale + 1.0) / below
    return replace(
        spec,
        kind="yarn",
        factor=factor,
        attention_factor=cos_factor,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.flag("truncate", scaling.nullable("truncate", True) is not None),
    )


def _longrope(spec: RopeSpec, scaling: ConfigReader, ratio: float) -> RopeSpec:
    short, long = scaling.numbers("short_factor"), scaling.numbers("long_factor")
    if not len(short) == len(long) == spec.rotary_dim // 2:
        raise UnsupportedModelError(
            f"longrope has {len(short)} short and {len(long)} long factors; a head that turns "
            f"{spec.rotary_dim} dimensions needs {spec.rotary_dim // 2} of each."
        )
    return replace(
        spec,
        kind="longrope",
        factor=_factor(scaling, ratio),
        attention_factor=scaling.number("attention_factor", 0.0) or None,
        short_factors=short,
        long_factors=long,
    )


def _factor(scaling: ConfigReader, default: float | None = None) -> float:
    factor = scaling.number("factor", default)
    if factor <= 0:
        raise UnsupportedModelError(f"rope: factor must be above 0: {factor}")
    return factor


def _sections(scaling: ConfigReader, spec: RopeSpec) -> RopeSpec:
    """With the pairs that turn by time, rows and columns (M-RoPE), where some are said to."""
    if not scaling.has("mrope_section"):
        return spec
    given = scaling.get("mrope_section")
    whole = isinstance(given, list) and all(type(n) is int and n > 0 for n in given)
    if not whole or len(given) != 3 or 2 * sum(given) != spec.rotary_dim:
        raise UnsupportedModelError(
            f"rope: mrope_section must be three numbers of pairs, {spec.rotary_dim // 2} together, "
            f"not {given!r}."
        )
    in_turns = scaling.flag("mrope_interleaved", False)
    if in_turns and 3 * max(given[1:]) > sum(given) + 2:
        raise UnsupportedModelError(f"rope: mrope_section {given} can't take turns.")
    return replace(spec, sections=tuple(given), in_turns=in_turns)


_ROPES: dict[str, Callable[[RopeSpec, ConfigReader, float], RopeSpec]] = {
    "default": _plain,
    "mrope": _plain,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # its first name
    "proportional": _proportional,
}
"""Rope types: (rotation without scaling, its dictionary, new ÷ old context) → rotation."""


def rope(
    c: ConfigReader, dim: int, *, theta: float = 10000.0, partial: float | None = None
) -> RopeSpec:
    """The rotary embedding of a config: `rope_theta` and `rope_scaling`, or `rope_parameters`.

    theta: the family's default; partial: the default share of a head that turns, None where the
    family has no such choice.
    """
    scaling = c.nested("rope_scaling")
    parameters = c.nested("rope_parameters")
    if scaling and parameters and c.get("rope_scaling") != c.get("rope_parameters"):
        raise UnsupportedModelError(
            "config.json has rope_scaling and rope_parameters, and they differ. Remove one."
        )
    theta = c.number("rope_theta", theta)
    return rope_spec(c, parameters or scaling, dim, theta=theta, partial=partial)


def rope_spec(
    c: ConfigReader,
    scaling: ConfigReader | None,
    dim: int,
    *,
    theta: float,
    partial: float | None = None,
) -> RopeSpec:
    """One dictionary of rope parameters as a `RopeSpec`, for a head of `dim`."""
    scaling = scaling or ConfigReader({})
    theta = scaling.number("rope_theta", theta)
    share = 1.0 if partial is None else partial
    share = scaling.number("partial_rotary_factor", c.number("partial_rotary_factor", share))
    rotary_dim = int(dim * share) if 0 < share < 2 else 0
    if (partial is None and share != 1.0) or rotary_dim % 2 or not 0 < rotary_dim <= dim:
        raise UnsupportedModelError(
            f"partial_rotary_factor {share} of a head of {dim} isn't built for this family."
        )
    if theta <= 0:
        raise UnsupportedModelError(f"rope_theta must be above 0: {theta}")
    max_position = c.integer("max_position_embeddings", 2048)
    key = "original_max_position_embeddings"  # Phi-3 keeps it outside, and that one wins
    original = c.integer(key, scaling.integer(key, max_position))
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    scaling.get("type")
    if kind not in _ROPES:
        raise UnsupportedModelError(f"rope type {kind!r} isn't built; {', '.join(_ROPES)} are.")
    plain = RopeSpec(theta, rotary_dim, original_max_position=original)
    if kind == "proportional":
        plain = replace(plain, rotary_dim=dim, moving_dim=rotary_dim)
    spec = _sections(scaling, _ROPES[kind](plain, scaling, max_position / original))
    rest = [key for key in scaling.unread() if scaling.has(key)]
    if rest:
        raise UnsupportedModelError(
            f"rope of type {kind!r} has keys that nothing reads: {', '.join(rest)}."
        )
    return spec


def layer_ropes(
    c: ConfigReader, dim: int, *, local_theta: float, global_theta: float
) -> tuple[RopeSpec, RopeSpec]:
    """The rotations of sliding layers and of those that see everything, for heads of `dim`: each
    has an object in `rope_parameters`, and `rope_scaling` is of the second kind alone.
    """
    scaling, both = c.nested("rope_scaling"), c.nested("rope_parameters")
    if scaling and both:
        raise UnsupportedModelError("config.json has rope_scaling and rope_parameters: remove one.")
    local = both.nested("sliding_attention") if both else None
    everywhere = both.nested("full_attention") if both else scaling
    if both and both.unread():
        raise UnsupportedModelError(
            f"rope_parameters has keys that nothing reads: {', '.join(both.unread())}. "
            "This family keeps one object for full_attention and one for sliding_attention there."
        )
    return (
        rope_spec(c, local, dim, theta=local_theta),
        rope_spec(c, everywhere, dim, theta=global_theta),
    )
