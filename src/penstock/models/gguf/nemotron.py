"""Nemotron-H from GGUF. A file's tensors say what its blocks are.

Names and values are those of llama.cpp's converters (github.com/ggml-org/llama.cpp, conversion/).
"""

from __future__ import annotations

from penstock.models.gguf.container import Container
from penstock.models.gguf.mamba import scanned_names
from penstock.models.gguf.metadata import Metadata
from penstock.models.gguf.parts import QK, Architecture, Config, heads_by_layer, layers_of

_AT = "backbone.layers.{i}."
_MIXER = f"{_AT}mixer."
_NAMES = {
    "token_embd": "backbone.embeddings",
    "output": "lm_head",
    "output_norm": "backbone.norm_f",
    "attn_norm": f"{_AT}norm",
    **{f"attn_{x}": f"{_MIXER}{x}_proj" for x in "qkv"},
    "attn_output": f"{_MIXER}o_proj",
    **scanned_names(_MIXER),
    **{f"ffn_{x}": f"{_MIXER}{x}_proj" for x in ("up", "down")},
    **{f"ffn_{x}_exps": f"{_MIXER}experts.{{e}}.{x}_proj" for x in ("up", "down")},
    **{f"ffn_{x}_shexp": f"{_MIXER}shared_experts.{x}_proj" for x in ("up", "down")},
    "ffn_latent_down": f"{_MIXER}fc1_latent_proj",
    "ffn_latent_up": f"{_MIXER}fc2_latent_proj",
    "ffn_gate_inp": f"{_MIXER}gate",
    "exp_probs_b": f"{_MIXER}gate.e_score_correction_bias",
}
_SIGMOID = 2  # of llama.cpp's gating functions
_LETTERS = (("ssm_in", "M"), ("attn_q", "*"), ("ffn_up_exps", "E"), ("ffn_up", "-"))


def _pattern(m: Metadata, c: Container, blocks: int) -> str:
    """A letter for each block, by a matrix that only its kind has."""
    found = ""
    for i in range(blocks):
        kinds = [letter for stem, letter in _LETTERS if f"blk.{i}.{stem}.weight" in c.tensors]
        if len(kinds) != 1:
            stems = ", ".join(stem for stem, _ in _LETTERS)
            raise m.fail(f"blk.{i}", f"{len(kinds)} of {stems}", "one: a block is of one kind")
        found += kinds[0]
    return found


def _experts(m: Metadata) -> Config:
    gating = m.integer(m.own("expert_gating_func"), _SIGMOID)
    if gating != _SIGMOID:
        raise m.fail(m.own("expert_gating_func"), gating, f"{_SIGMOID}, experts by sigmoids")
    groups = m.integer(m.own("expert_group_count"), 1) or 1
    if groups == 1:
        m.get(m.own("expert_group_used_count"))
    chosen = 1 if groups == 1 else m.integer(m.own("expert_group_used_count"))
    return {
        "n_routed_experts": m.integer(m.own("expert_count")),
        "num_experts_per_tok": m.integer(m.own("expert_used_count")),
        "moe_intermediate_size": m.integer(m.own("expert_feed_forward_length")),
        "moe_shared_expert_intermediate_size": m.integer(
            m.own("expert_shared_feed_forward_length")
        ),
        "n_shared_experts": m.integer(m.own("expert_shared_count"), 1),
        "routed_scaling_factor": m.number(m.own("expert_weights_scale"), 1.0) or 1.0,
        "norm_topk_prob": m.flag(m.own("expert_weights_norm"), False),
        "n_group": groups,
        "topk_group": chosen,
        "moe_latent_size": m.integer(m.own("moe_latent_size"), 0) or None,
    }


_UNUSED = """feed_forward_length attention.value_length rope.dimension_count rope.freq_base
    rope.scaling.finetuned rope.scaling.type vocab_size""".split()
"""What tensors say as well, and a rotation's where there is none."""
_OF_EXPERTS = """expert_count expert_used_count expert_feed_forward_length expert_shared_count
    expert_shared_feed_forward_length expert_weights_scale expert_weights_norm expert_group_count
    expert_group_used_count expert_gating_func moe_latent_size""".split()
"""A converter says it of models without any, too."""


def _config(m: Metadata, c: Container) -> Config:
    for key in (*_UNUSED, *_OF_EXPERTS):
        m.get(m.own(key))
    guesses, blocks = m.integer(m.own("nextn_predict_layers"), 0), layers_of(m, c)
    if guesses >= blocks:
        raise m.fail(m.own("nextn_predict_layers"), guesses, f"below the {blocks} blocks")
    pattern = _pattern(m, c, blocks - guesses)
    heads = m.integer(m.own("ssm.time_step_rank"))
    inner = m.integer(m.own("ssm.inner_size"))
    if not heads or inner % heads:
        raise m.fail(m.own("ssm.inner_size"), inner, f"a multiple of the {heads} heads")
    plain = pattern.find("-")
    sizes: Config = {"n_routed_experts": m.integer(m.own("expert_count"), 0)}
    if "E" in pattern:
        sizes = _experts(m)
    if plain >= 0:
        sizes["intermediate_size"] = c.tensors[f"blk.{plain}.ffn_up.weight"].shape[0]
    usual = m.number(m.own("attention.layer_norm_epsilon"), 1e-5)
    return {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "num_nextn_predict_layers": guesses,
        "hidden_size": m.integer(m.own("embedding_length")),
        "num_attention_heads": m.integer(m.own("attention.head_count")),
        "num_key_value_heads": max(heads_by_layer(m, c, "states or feed-forward blocks")),
        "head_dim": m.integer(m.own("attention.key_length")),
        "max_position_embeddings": m.integer(m.own("context_length")),
        "layer_norm_epsilon": m.number(m.own("attention.layer_norm_rms_epsilon"), usual),
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "n_groups": m.integer(m.own("ssm.group_count")),
        "ssm_state_size": m.integer(m.own("ssm.state_size")),
        "conv_kernel": m.integer(m.own("ssm.conv_kernel")),
        "use_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in c.tensors),
        "use_bias": any(name.endswith(".ssm_in.bias") for name in c.tensors),
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in c.tensors),
        **sizes,
    }


NEMOTRON: dict[str, Architecture] = {
    name: Architecture(_config, _NAMES, rotated=QK, scanned=True)
    for name in ("nemotron_h", "nemotron_h_moe")
}
"""Built architectures of NVIDIA's."""
