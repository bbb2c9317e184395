"""What of a decoder's layers one rank has, where several processes compute a step together."""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import UnsupportedModelError
from penstock.nn.spec import AttentionSpec, DecoderSpec, LayerSpec
from penstock.parallel import Part, Ranks, Share


def heads_of(spec: AttentionSpec, ranks: Ranks) -> tuple[Share, range]:
    """Query heads of all ranks, and the key heads that this one's read."""
    keys = spec.num_heads if spec.latent is not None else spec.num_kv_heads
    return ranks.heads(spec.num_heads, keys)


def own_attention(spec: AttentionSpec, ranks: Ranks) -> AttentionSpec:
    """The attention of this rank's heads. A latent is all ranks', which each keeps."""
    queries, keys = heads_of(spec, ranks)
    return replace(spec, num_heads=len(queries.own), num_kv_heads=len(keys))


def own_layers(spec: DecoderSpec, ranks: Ranks) -> tuple[LayerSpec, ...]:
    """Layers with this rank's heads: what its cache holds."""
    return tuple(
        replace(layer, attention=own_attention(layer.attention, ranks)) for layer in spec.layers
    )


def own_qkv(spec: AttentionSpec, ranks: Ranks) -> Part:
    """This rank's queries, keys and values, of a matrix that makes all heads'."""
    (queries, keys), dim = heads_of(spec, ranks), spec.head_dim
    q, kv = spec.num_heads * dim, spec.num_kv_heads * dim

    def after(first: int) -> range:
        return range(first + keys.start * dim, first + keys.stop * dim)

    return Part((queries.times(dim).own, after(q), after(q + kv)), q + 2 * kv)


def check_shareable(spec: DecoderSpec) -> None:
    """Raises UnsupportedModelError for what ranks can't share."""
    why = None
    if spec.vision is not None:
        why = "a model that sees pictures"
    elif any(layer.attention.qk_norm == "full" for layer in spec.layers):
        why = "a norm over all heads of a layer together"
    elif any(layer.mlp.experts is not None for layer in spec.layers):
        why = "a mixture of experts"
    if why is not None:
        raise UnsupportedModelError(f"tensor_parallel_size isn't built for {why}. Leave it out.")
