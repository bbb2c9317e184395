"""Nemotron-H: most of its blocks are Mamba 2 or feed-forward, a few attend.

What is a layer in its files is one block with a norm before it; here a layer is one that mixes
tokens, and the feed-forward block after it, where one follows. A feed-forward block that follows
another, or none, is a layer without attention.
Source: NVIDIA 2025, arXiv:2504.03624 and 2508.14444; transformers' `nemotron_h`.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import UnsupportedModelError
from penstock.models.common import (
    DENSE_RULES,
    attention,
    decoder,
    layer_kinds,
    model_spec,
    routed_experts,
    some_attend,
)
from penstock.models.config_reader import ConfigReader
from penstock.models.mamba import MAMBA_RULES, mamba_state
from penstock.models.registry import register
from penstock.models.spec import Ignore, ModelSpec, Rename, Rule
from penstock.nn.spec import (
    NO_ATTENTION,
    NO_MLP,
    AttentionSpec,
    LayerSpec,
    MambaSpec,
    MlpSpec,
    NormSpec,
)

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}
_EARLIER = {
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_n_groups": "n_groups",
}
"""Keys of earlier files, which count where both are there."""
_MODULES = {"mamba": "mamba", "attention": "self_attn", "mlp": "mlp", "moe": "mlp"}
_AT = "model.layers.{i}"
_EXPERTS = tuple(
    Rename(f"{_AT}.mlp.{theirs}_proj.{{p}}", f"layers.{{i}}.mlp.{ours}.{{p}}")
    for side in ("up", "down")
    for theirs, ours in (
        (f"experts.{{e}}.{side}", f"{side}.{{e}}"),
        (f"shared_experts.{side}", f"shared.{side}"),
    )
)
_RULES: tuple[Rule, ...] = (
    Rename(f"{_AT}.mlp.up_proj.{{p}}", "layers.{i}.mlp.up.{p}"),
    Rename(f"{_AT}.mlp.gate.weight", "layers.{i}.mlp.router.weight"),
    Rename(f"{_AT}.mlp.fc1_latent_proj.weight", "layers.{i}.mlp.narrow.weight"),
    Rename(f"{_AT}.mlp.fc2_latent_proj.weight", "layers.{i}.mlp.widen.weight"),
    Rename(f"{_AT}.mlp.gate.e_score_correction_bias", "layers.{i}.mlp.correction.weight"),
    *_EXPERTS,
    Ignore("mtp.*"),  # what guesses further tokens
    *MAMBA_RULES,
    *DENSE_RULES,
)


def _blocks(c: ConfigReader) -> list[str]:
    """What each block is: one of `_MODULES`."""
    key = "layers_block_type" if c.has("layers_block_type") else "layer_types"
    pattern, types = c.get("hybrid_override_pattern"), c.get(key)
    named = dict(zip(_MODULES, _MODULES, strict=True)) | _NAMES
    if types is None and isinstance(pattern, str):
        key, types, named = "hybrid_override_pattern", list(pattern), _LETTERS
    if types is None or types == []:
        raise UnsupportedModelError(
            "config.json says of no block what it is, by layers_block_type or by the letters of "
            f"hybrid_override_pattern ({pattern!r})."
        )
    count = c.integer("num_hidden_layers", len(types) if isinstance(types, list) else 1)
    return layer_kinds(key, types, named, count)


def _remembers(c: ConfigReader, eps: float) -> AttentionSpec:
    """The layer with states that the config describes."""
    c.only("mamba_hidden_act", ("silu", "swish"), "silu")
    c.only("mamba_proj_bias", (False,), False)
    for key in ("chunk_size", "expand", "mamba_ssm_cache_dtype", "use_mamba_kernels"):
        c.get(key)  # of kernels that take many tokens at a time; heads say how wide it is
    c.replace(**{ours: c.get(theirs) for theirs, ours in _EARLIER.items() if c.has(theirs)})
    mamba = MambaSpec(
        c.integer("mamba_head_dim", 64),
        c.integer("conv_kernel", 4),
        eps,
        c.flag("use_conv_bias", True),
    )
    heads, groups = c.integer("mamba_num_heads", 128), c.integer("n_groups", 8)
    state = c.integer("ssm_state_size", 128)
    return mamba_state(c, mamba, heads, groups, state, c.flag("use_bias", False))


_OF_EXPERTS = """n_routed_experts n_shared_experts moe_intermediate_size num_experts_per_tok
    moe_shared_expert_intermediate_size moe_latent_size n_group topk_group norm_topk_prob
    routed_scaling_factor""".split()


def _feed_forward(c: ConfigReader, blocks: list[str]) -> dict[str, MlpSpec]:
    """The kinds of feed-forward blocks that there are."""
    c.only("mlp_hidden_act", ("relu2",), "relu2")
    found: dict[str, MlpSpec] = {}
    bias = c.flag("mlp_bias", False)
    c.get("moe_shared_expert_overlap")  # of when it is computed
    if "moe" in blocks:
        c.only("n_shared_experts", (1,), 1)
        c.only("mlp_bias", (False,), False)
        c.assume(topk_group=1)
        c.replace(hidden_act="silu")  # of gates, which these have none of
        mixed = routed_experts(c, 8, 2, normalize=True, scale=1.0, groups=1)
        assert mixed.experts is not None
        shared = c.integer("moe_shared_expert_intermediate_size", 7688)
        latent = c.integer("moe_latent_size") if c.has("moe_latent_size") else 0
        experts = replace(mixed.experts, shared=shared, latent=latent)
        found["moe"] = replace(mixed, activation="relu2", gated=False, experts=experts)
    if "mlp" in blocks:
        found["mlp"] = MlpSpec(c.integer("intermediate_size"), "relu2", gated=False, bias=bias)
    for key in (*_OF_EXPERTS, "intermediate_size"):
        c.get(key)  # of blocks that it lacks
    return found


_UNUSED = """num_logits_to_keep rescale_prenorm_residual num_nextn_predict_layers
    mtp_layers_block_type mtp_hybrid_override_pattern keep_mtp_spec_in_bf16 rope_theta
    rope_scaling rope_parameters partial_rotary_factor attn_layer_offset attn_layer_period
    max_window_layers""".split()


@register("NemotronHForCausalLM")
def read_config(c: ConfigReader) -> ModelSpec:
    """`config.json` of a Nemotron-H."""
    c.assume(num_key_value_heads=8, max_position_embeddings=4096)
    for key in _UNUSED:
        c.get(key)  # of training, of a rotation that there is none of
    c.only("residual_in_fp32", (False,), False)
    c.only("sliding_window", (None,), None)
    c.only("attention_bias", (False,), False)
    eps = c.number("layer_norm_epsilon", 1e-5)
    for key in ("rms_norm_eps", "norm_eps"):  # where it is said twice
        c.only(key, (eps,), eps)
    dim = c.integer("attention_head_dim" if c.has("attention_head_dim") else "head_dim", 128)
    c.only("head_dim", (dim,), dim)  # which the first files call otherwise
    attends = attention(c, None, dim)
    kinds = {"attention": attends, "mamba": _remembers(c, eps)}
    blocks = _blocks(c)
    feed_forward = _feed_forward(c, blocks)
    layers: list[LayerSpec] = []
    aliases = [("embeddings.", "model.embed_tokens."), ("norm_f.", "model.norm.")]
    for number, block in enumerate(blocks):
        if block in kinds:
            layers.append(LayerSpec(kinds[block], NO_MLP))
        elif not layers or layers[-1].mlp.intermediate:
            layers.append(LayerSpec(NO_ATTENTION, feed_forward[block]))
        else:
            layers[-1] = replace(layers[-1], mlp=feed_forward[block])
        at = f"model.layers.{len(layers) - 1}"
        norm = "input_layernorm" if block in kinds else "post_attention_layernorm"
        aliases += [
            (f"layers.{number}.norm.", f"{at}.{norm}."),
            (f"layers.{number}.mixer.", f"{at}.{_MODULES[block]}."),
        ]
    some_attend([layer.attention for layer in layers])
    spec = decoder(c, layers, norm=NormSpec(eps=eps))
    found = model_spec(c, "nemotron_h", spec, _RULES, prefixes=("backbone.", "model."))
    return replace(found, aliases=tuple(aliases))
