"""What of a decoder's layers one rank has, where several processes compute a step together."""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import ConfigError, UnsupportedModelError
from penstock.nn.spec import AttentionSpec, DecoderSpec, LayerSpec
from penstock.parallel import Part, Ranks, Ring, Share


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


def row_worth(spec: DecoderSpec) -> int:
    """How many positions a row may attend to for as many multiplications as its products take."""
    products = seen = 0
    for layer in spec.layers:
        a, mlp, experts = layer.attention, layer.mlp, layer.mlp.experts
        wide = mlp.intermediate
        if experts is not None:
            wide = experts.per_token * wide + experts.shared
        heads = sum(a.qkv_columns) + a.out_dim
        products += spec.hidden * (heads + (3 if mlp.gated else 2) * wide)
        seen += 2 * a.num_heads * a.seen_dim
    return products // seen


def check_shareable(spec: DecoderSpec, ranks: Ranks | Ring, max_len: int) -> None:
    """Raises UnsupportedModelError for what ranks can't share, ConfigError for what isn't there."""
    if any(layer.attention.has_state for layer in spec.layers):
        raise UnsupportedModelError(
            "A model some of whose layers have states can't be divided among processes: "
            "leave tensor_parallel_size, pipeline_parallel_size and context_parallel_size out."
        )
    if any(layer.attention.is_absent for layer in spec.layers):
        raise UnsupportedModelError(
            "A model some of whose layers don't attend can't be divided among processes: leave "
            "tensor_parallel_size, pipeline_parallel_size and context_parallel_size out."
        )
    _check_own(spec)
    if any(layer.mlp.experts and layer.mlp.experts.latent for layer in spec.layers):
        raise UnsupportedModelError(
            "A model whose experts work in a narrower space can't be divided among processes: "
            "leave tensor_parallel_size, pipeline_parallel_size and context_parallel_size out."
        )
    if isinstance(ranks, Ring):
        _check_ring(spec, ranks, max_len)
        return
    if ranks.whole_experts and not any(layer.mlp.experts for layer in spec.layers):
        raise ConfigError(
            "enable_expert_parallel has no effect on a model without experts. Leave it out."
        )
    if spec.vision is not None:
        raise UnsupportedModelError(
            "A model that sees pictures can't be divided among processes: leave "
            "tensor_parallel_size and pipeline_parallel_size out."
        )


def _check_own(spec: DecoderSpec) -> None:
    """Raises UnsupportedModelError for layers of a kind that ranks don't share."""
    lacking = {
        "values that are normed": any(x.attention.value_norm for x in spec.layers),
        "keys that are values too": any(x.attention.keys_are_values for x in spec.layers),
        "layers that read more than the stream": spec.reads_beside,
    }
    if found := [name for name, there in lacking.items() if there]:
        raise UnsupportedModelError(
            f"A model with {', '.join(found)} can't be divided among processes: leave "
            "tensor_parallel_size, pipeline_parallel_size and context_parallel_size out."
        )


def _check_ring(spec: DecoderSpec, ring: Ring, max_len: int) -> None:
    """Raises UnsupportedModelError for what can't be where ranks share sequences, ConfigError for
    texts that are too long.
    """
    seen = [layer.attention for layer in spec.layers]
    lacking = {
        "A model that sees pictures": spec.vision is not None,
        "Attention that isn't causal": not all(a.causal for a in seen),
    }
    for what, given in lacking.items():
        if given:
            raise UnsupportedModelError(
                f"{what} isn't built for ranks that share a sequence's tokens: leave "
                "context_parallel_size out."
            )
    asking = [a for a in seen if a.latent is None]  # latents pass by, however many
    most = min((ring.most_tokens(a.seen_dim) for a in asking), default=max_len)
    if max_len > most:
        raise ConfigError(
            f"Ranks that share a sequence's tokens have room for {most:,} of them, but "
            f"max_model_len is {max_len:,}: lower it, or leave context_parallel_size out."
        )
