"""What families with Mamba 2 share: its keys in config.json, and its tensors' names."""

from __future__ import annotations

import math

from torch import Tensor

from penstock.errors import UnsupportedModelError
from penstock.models.config_reader import ConfigReader
from penstock.models.spec import Rename, Rule, Share
from penstock.nn.spec import AttentionSpec, DecoderSpec, MambaSpec

_TRAINED = "time_step_min time_step_max time_step_floor time_step_rank".split()
"""Of how weights were drawn before training."""

MAMBA_KEYS = (
    *(f"mamba_{x}" for x in "n_heads n_groups d_state d_head d_conv expand chunk_size".split()),
    *("mamba_conv_bias", "mamba_proj_bias", "time_step_limit", *_TRAINED),
)
"""What says nothing of a model none of whose layers have states."""

_UNLIMITED = (None, [0, math.inf], [0, {"__float__": "Infinity"}])
"""What `time_step_limit` may be; the last as transformers writes it."""


def _steps(spec: DecoderSpec) -> int:
    """Rows of the projection that say how far steps go: its last."""
    return next(x.attention.num_heads for x in spec.layers if x.attention.mamba is not None)


def _mixed(tensor: Tensor, spec: DecoderSpec) -> Tensor:
    return tensor[: tensor.shape[0] - _steps(spec)]


def _gates(tensor: Tensor, spec: DecoderSpec) -> Tensor:
    return tensor[tensor.shape[0] - _steps(spec) :]


_AT, _OWN = "model.layers.{i}.mamba", "layers.{i}.attention"
_VECTORS = (("A_log", "rates"), ("dt_bias", "shift"), ("D", "skip"), ("norm.weight", "norm"))
MAMBA_RULES: tuple[Rule, ...] = (
    Rename(f"{_AT}.in_proj.{{p}}", f"{_OWN}.mixed.{{p}}", _mixed, of_rows=True),
    Share(f"{_AT}.in_proj.{{p}}", f"{_OWN}.gates.{{p}}", _gates, of_rows=True),
    Rename(f"{_AT}.conv1d.{{p}}", f"{_OWN}.conv.{{p}}"),
    Rename(f"{_AT}.out_proj.{{p}}", f"{_OWN}.out.{{p}}"),
    *(Rename(f"{_AT}.{theirs}", f"{_OWN}.{ours}.weight") for theirs, ours in _VECTORS),
)
"""Names of a layer's tensors."""


def mamba_heads(c: ConfigReader, eps: float, inner: int | None = None) -> AttentionSpec:
    """The layer that `mamba_…` describe. eps: of its norm; inner: values of all its heads, where
    those aren't `mamba_expand` times the hidden size.
    """
    c.only("hidden_act", ("silu", "swish"), "silu")  # the convolution's too, and that is built so
    c.get("mamba_chunk_size")  # of kernels that take many tokens at a time
    heads, groups = c.integer("mamba_n_heads", 128), c.integer("mamba_n_groups", 1)
    wide = c.integer("mamba_expand", 2) * c.integer("hidden_size")
    said = "mamba_expand times hidden_size" if inner is None else "mamba_d_ssm"
    inner = wide if inner is None else inner
    dim = c.get("mamba_d_head", "auto")
    dim = inner // heads if dim in ("auto", None) else c.integer("mamba_d_head")
    if dim * heads != inner:
        raise UnsupportedModelError(
            f"mamba_n_heads {heads} of mamba_d_head {dim} aren't the {inner} that {said} is."
        )
    mamba = MambaSpec(dim, c.integer("mamba_d_conv", 4), eps, c.flag("mamba_conv_bias", True))
    bias = c.flag("mamba_proj_bias", False)
    return mamba_state(c, mamba, heads, groups, c.integer("mamba_d_state", 256), bias)


def mamba_state(
    c: ConfigReader, mamba: MambaSpec, heads: int, groups: int, key_dim: int, bias: bool
) -> AttentionSpec:
    """A layer of so many heads with keys of key_dim; bias: of both its projections. Raises
    UnsupportedModelError for what isn't built.
    """
    limit = c.get("time_step_limit")
    if limit not in _UNLIMITED:
        raise UnsupportedModelError(
            f"time_step_limit {limit!r} isn't built: steps of Mamba 2 are as long as they come."
        )
    for key in _TRAINED:
        c.get(key)
    if heads % groups or key_dim % 16:
        raise UnsupportedModelError(
            f"Mamba 2 of {heads} heads in {groups} groups with states of {key_dim} isn't built: "
            "the first must be a multiple of the second, and the last one of 16."
        )
    return AttentionSpec(
        heads, groups, key_dim, 1.0, None, qkv_bias=bias, out_bias=bias, mamba=mamba
    )
