"""Falcon-H1: attention and Mamba 2 side by side in each layer, and a multiplier at every turn.

Both read the same normed rows, and what they give is added together: here they are two layers, of
which the first waits for the second (`LayerSpec.waits`).

No multiplier takes an operator, and no matrix is changed by one, so that adapters and codes are
those of the file:
- Of a matrix that reads normed rows, it is the norm's. The norm of Mamba 2's projection takes z's;
  x, B and C have theirs in the convolution, divided by it, and steps a norm of their own.
- Of the gate of an MLP it is the norm's, too, so that what `up` gives is multiplied as well. What
  `down` gives still lacks the quotient of both: the residual stream is kept divided by it, and
  norms of it have an epsilon divided by its square, as Granite's.
- What attention gives is linear in its values, which its norm multiplies; scores, which get that
  twice, are scaled by its inverse square. Keys' own is of the scores.
- What Mamba 2 gives is multiplied where it is normed, or would be.
Source: TII 2025, arXiv:2507.22448; transformers' `falcon_h1`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.errors import UnsupportedModelError
from penstock.models.bamba import BLOCK_RULES
from penstock.models.common import attention, decoder, gated_mlp, head_dim, model_spec
from penstock.models.config_reader import ConfigReader
from penstock.models.mamba import mamba_heads
from penstock.models.registry import register
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec, Ones, Rename, Rule, Share
from penstock.nn.spec import NO_MLP, AttentionSpec, DecoderSpec, LayerSpec, NormSpec

_UNUSED = """attn_layer_indices mamba_norm_before_gate mamba_use_mlp mlp_expansion_factor
    num_logits_to_keep layer_types layers_block_type""".split()
"""Of training, of transformers' memory, or said by every layer alike."""

_AT = "model.layers.{i}"


@dataclass(frozen=True, slots=True)
class _Multipliers:
    """Those of one config."""

    reads: float  # what attention reads
    gives: float
    remembers: float  # what Mamba 2 reads
    recalls: float  # what it gives
    parts: tuple[float, ...]  # of its projection: z, x, B, C, steps
    gate: float
    down: float

    @property
    def stream(self) -> float:
        """What the residual stream is divided by."""
        return self.down / self.gate

    @property
    def values(self) -> float:
        """Of attention's values, beside what it reads."""
        return self.gives / self.stream

    @property
    def own_steps(self) -> bool:
        """Whether steps are multiplied otherwise than z is."""
        return self.parts[4] != self.parts[0]


def _several(c: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    found = c.numbers(key) if c.has(key) else (1.0,) * count
    if len(found) != count or any(number <= 0 for number in found):
        raise UnsupportedModelError(
            f"config.json: {key} must be {count} numbers above 0, not {list(found)}."
        )
    return found


def _multipliers(c: ConfigReader) -> _Multipliers:
    gate, down = _several(c, "mlp_multipliers", 2)
    return _Multipliers(
        c.positive("attention_in_multiplier", 1.0),
        c.positive("attention_out_multiplier", 1.0),
        c.positive("ssm_in_multiplier", 1.0),
        c.positive("ssm_out_multiplier", 1.0),
        _several(c, "ssm_multipliers", 5),
        gate,
        down,
    )


@dataclass(frozen=True, slots=True)
class _Times:
    """A norm's weights, multiplied."""

    factor: float

    def __call__(self, tensor: Tensor, spec: DecoderSpec) -> Tensor:
        return tensor.float() * self.factor


@dataclass(frozen=True, slots=True)
class _Convolved:
    """A convolution's weights, each of so many channels multiplied."""

    factors: tuple[float, ...]
    channels: tuple[int, ...]

    def __call__(self, tensor: Tensor, spec: DecoderSpec) -> Tensor:
        each = torch.tensor(self.factors).repeat_interleave(torch.tensor(self.channels))
        return tensor.float() * each.view(-1, 1, 1)


def _times(factor: float) -> _Times | None:
    return None if factor == 1.0 else _Times(factor)


def _rules(by: _Multipliers, remembers: AttentionSpec, count: int) -> tuple[Rule, ...]:
    """Names of so many layers' tensors, of which each is two here."""
    z, *mixed, steps = by.parts
    keys, values = remembers.qkv_columns[1:]
    norm, read = f"{_AT}.input_layernorm.weight", by.remembers * z
    rules: list[Rule] = [
        Rename(norm, "layers.{i}.attention_norm.weight", _times(read)),
        Rename(f"{_AT}.pre_ff_layernorm.weight", "layers.{i}.mlp_norm.weight", _times(by.gate)),
    ]
    if any(part != z for part in mixed):
        each = _Convolved(tuple(part / z for part in mixed), (values, keys, keys))
        conv = f"{_AT}.mamba.conv1d.weight"
        rules.append(Rename(conv, "layers.{i}.attention.conv.weight", each))
    if remembers.mamba is not None and not remembers.mamba.normed:
        rules.append(Ones((), "layers.{i}.attention.norm.weight"))
    if by.own_steps:
        own = _times(by.remembers * steps)
        rules.append(Share(norm, "layers.{i}.attention.step_norm.weight", own))
    attended = _times(by.reads * by.values)
    rules += [
        Share(norm.format(i=2 * i), f"layers.{2 * i + 1}.attention_norm.weight", attended)
        for i in range(count)
    ]
    return (*rules, *BLOCK_RULES)


def _aliases(count: int) -> tuple[tuple[str, str], ...]:
    """Of each layer's tensors: whose they are here."""
    found = [(f"{name}.", f"model.{name}.") for name in ("embed_tokens", "final_layernorm")]
    for i in range(count):
        at, first, second = f"layers.{i}.", f"model.layers.{2 * i}.", f"model.layers.{2 * i + 1}."
        found += [(f"{at}{part}.", f"{first}{part}.") for part in ("mamba", "input_layernorm")]
        found.append((at, second))
    return tuple(found)


def _remembers(c: ConfigReader, by: _Multipliers, eps: float) -> AttentionSpec:
    for key in ("projectors_bias", "mamba_proj_bias"):
        c.only(key, (False,), False)
    normed = c.flag("mamba_rms_norm", False)
    if normed:
        c.only("mamba_norm_before_gate", (False,), True)
    inner = None
    if c.nullable("mamba_d_ssm", 1024) is not None:
        inner = c.integer("mamba_d_ssm", 1024)
    found = mamba_heads(c, eps, inner)
    assert found.mamba is not None
    scale = by.recalls / by.stream
    mamba = replace(found.mamba, normed=normed, own_steps=by.own_steps, out_scale=scale)
    return replace(found, mamba=mamba)


@register("FalconH1ForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Falcon-H1."""
    c.assume(num_key_value_heads=8, max_position_embeddings=8192)
    for key in _UNUSED:
        c.get(key)
    for key in ("attention_bias", "mlp_bias"):
        c.only(key, (False,), False)
    by, count = _multipliers(c), c.integer("num_hidden_layers")
    eps, dim = c.number("rms_norm_eps", 1e-5), head_dim(c)
    scale = dim**-0.5 * c.positive("key_multiplier", 1.0) / by.values**2
    attends = attention(c, rope(c, dim), dim, scale=scale)
    remembers = _remembers(c, by, eps)
    both = (LayerSpec(remembers, NO_MLP, waits=True), LayerSpec(attends, gated_mlp(c)))
    spec = replace(
        decoder(c, both * count, norm=NormSpec(eps=eps / by.stream**2)),
        embed_scale=c.positive("embedding_multiplier", 1.0) / by.stream,
        embed_scale_rounds=False,
        logit_scale=c.positive("lm_head_multiplier", 1.0),
    )
    rules = _rules(by, remembers, count)
    found = model_spec(c, "falcon_h1", spec, rules, prefixes=("model.",))
    return replace(found, aliases=_aliases(count))
