"""What of a decoder's layers one rank has, where several processes compute a step together."""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import ConfigError, UnsupportedModelError
from penstock.nn.spec import AttentionSpec, DecoderSpec, LayerSpec
from penstock.parallel import Part, Ranks, Share


def heads_of(spec: AttentionSpec, ranks: Ranks) -> tuple[Share, range]:
    """Query heads of all ranks, and the key heads that this one's read."""
    keys = spec.num_heads if spec.latent is not None else spec.num_kv_heads
    return ranks.heads(spec.num_heads, keys)


def attends_apart(spec: AttentionSpec) -> bool:
    """Whether ranks have heads of their own: beside a norm over all heads, each has all."""
    return spec.qk_norm != "full"


def own_attention(spec: AttentionSpec, ranks: Ranks) -> AttentionSpec:
    """The attention of this rank's heads. A latent is all ranks', which each keeps."""
    if not attends_apart(spec):
        return spec
    queries, keys = heads_of(spec, ranks)
    return replace(spec, num_heads=len(queries.own), num_kv_heads=len(keys))


def own_layers(spec: DecoderSpec, ranks: Ranks) -> tuple[LayerSpec, ...]:
    """Layers with this rank's heads: what its cache holds."""
    return tuple(
        replace(layer, attention=own_attention(layer.attention, ranks)) for layer in spec.layers
    )


def own_qkv(spec: AttentionSpec, ranks: Ranks) -> Part:
    """This rank's queries, keys and values, of a matrix that makes all heads'."""
    dim, (q, k, v) = spec.head_dim, spec.qkv_columns
    if not attends_apart(spec):
        return Part.of(ranks.split(q + k + v))
    queries, keys = heads_of(spec, ranks)

    def after(first: int, width: int) -> range:
        return range(first + keys.start * width, first + keys.stop * width)

    parts = queries.times(dim).own, after(q, dim), after(q + k, spec.kept_dim)
    return Part(parts, q + k + v)


def check_shareable(spec: DecoderSpec, ranks: Ranks) -> None:
    """Raises UnsupportedModelError for what ranks can't share, ConfigError for what isn't there."""
    if ranks.whole_experts and not any(layer.mlp.experts for layer in spec.layers):
        raise ConfigError(
            "enable_expert_parallel has no effect on a model without experts. Leave it out."
        )
    if spec.vision is not None:
        raise UnsupportedModelError(
            "A model that sees pictures can't be divided among processes: leave "
            "tensor_parallel_size and pipeline_parallel_size out."
        )
