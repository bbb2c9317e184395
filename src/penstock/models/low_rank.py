"""Keys and values of fewer dimensions than their heads: `kv_rank` in a config.json, of any family.

`penstock prune --kv-rank` writes it. Beside what the family has, such a checkpoint has the tensors
`kv_bases.{i}` [2, key heads, head_dim, kv_rank]: of each layer's queries and of its keys, once they
are rotated (`ops.rotary_cache`). `v_proj` gives kv_rank values a head, which `o_proj` takes.
Sources: Saxena et al. 2024, arXiv:2408.05646 (Eigen Attention); of rotated keys, Singhania et al.
2024, arXiv:2406.02542 (Loki).
"""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import UnsupportedModelError
from penstock.models.config_reader import ConfigReader
from penstock.models.spec import ModelSpec, Rename
from penstock.nn.spec import AttentionSpec, LayerSpec
from penstock.ops.panels import COLUMNS

KEY = "kv_rank"
BASES = "kv_bases.{i}"


def with_rank(spec: ModelSpec, c: ConfigReader) -> ModelSpec:
    """The model with what its config.json says of `kv_rank`. Raises UnsupportedModelError."""
    if not c.has(KEY):
        return spec
    rank, decoder = c.integer(KEY), spec.decoder
    layers = []
    for layer in decoder.layers:
        if why := why_not(layer.attention, rank):
            raise UnsupportedModelError(f"config.json: {KEY} {rank} isn't built: {why}.")
        layers.append(ranked(layer, rank))
    rule = Rename(BASES, "layers.{i}.attention.bases.weight")
    rules = (rule, *spec.rules)
    return replace(spec, rules=rules, decoder=replace(decoder, layers=tuple(layers)))


def ranked(layer: LayerSpec, rank: int) -> LayerSpec:
    """A layer that keeps so many dimensions of keys and values."""
    return replace(layer, attention=replace(layer.attention, kv_rank=rank))


def why_not(attention: AttentionSpec, rank: int) -> str | None:
    """Why keys and values can't be kept in so many dimensions; None: they can."""
    if attention.latent is not None:
        return "the cache has latents (MLA), which are of few dimensions already"
    if attention.has_state:
        return "a layer has a state in place of keys and values"
    if attention.value_norm or attention.parts < 3:
        return "values are normed, or made with keys or elsewhere"
    if rank % COLUMNS or not 0 < rank <= attention.head_dim:
        return (
            f"keys and values of {attention.head_dim} dimensions a head are kept in fewer, a "
            f"multiple of {COLUMNS}"
        )
    return None
